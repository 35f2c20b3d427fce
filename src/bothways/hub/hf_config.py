"""What the `config.json` of a model folder says, in our terms."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from bothways.core.errors import FolderError
from bothways.families.catalogue import FAMILIES, family_named
from bothways.families.config_rules import read_choice, read_number
from bothways.families.family import Architecture, HeadKind
from bothways.families.weight_names import KeyTable
from bothways.hub.native_format import KEYS, OWN, read_description
from bothways.hub.weight_files import read_json
from bothways.model.config import EncoderConfig
from bothways.model.head_config import Head, LabelHead, TagHead
from bothways.model.lstm_config import ModelConfig

Problem = Literal["single_label_classification", "multi_label_classification", "regression"]
"""What a label head is for, as transformers names it."""
RECORD = "bothways.json"
DROPOUTS = "dropouts"
"""The key in the record under which those of heads stand, by kind, where transformers has no setting for them."""


@dataclass(frozen=True)
class HFConfig:
    """Attributes:
    model_type: the family.
    keys: its weight names.
    encoder: the shape.
    architecture: the class that it names, if that is one of the family's here.
    labels: gives the names of a label head's outputs, in order; what is wrong with them is said only where they are asked for.
    dropouts: of heads that have one of their own, by kind; none means the encoder's.
    problem: what such a head is for, if it is said.
    heads: in a folder of our own type, what it says of them; none where the class tells.
    ids: of special tokens, as it says them; but not of padding, which the shape has.
    """

    model_type: str
    keys: KeyTable
    encoder: ModelConfig
    architecture: Architecture | None
    labels: Callable[[], tuple[str, ...]]
    dropouts: Mapping[HeadKind, float | None]
    problem: Problem | None
    heads: tuple[Head, ...] | None = None
    ids: Mapping[str, Any] = field(default_factory=dict)


def read_hf_config(folder: Path) -> HFConfig:
    """Read `config.json`.

    Raises:
        FolderError: there is none, its family is unknown, or a setting has no counterpart here or is malformed.
    """
    file = folder / "config.json"
    if not file.is_file():
        fix = "Give the folder of one model, as transformers' save_pretrained writes it."
        if any(folder.glob("*.ckpt*.index")):
            fix = f"It holds a checkpoint of TensorFlow: make a model of it with bothways convert {folder} --out FOLDER"
        raise FolderError("is no model folder: it has no config.json", where=folder, fix=fix)
    raw, where = read_json(file), str(file)
    if raw.get("model_type") == OWN:
        return _own_settings(raw, file)
    family = family_named(str(raw.get("model_type")))
    if family is None:
        known = ", ".join([*(family.model_type for family in FAMILIES), OWN])
        what = f"model_type {raw.get('model_type')!r} is no known family: it must be one of {known}"
        raise FolderError(
            what, where=where, fix="A BERT from before model_type was written needs the line added."
        )
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list):
        raise FolderError(
            f"architectures must name classes in a list, not {architectures!r:.40}", where=where
        )
    encoder = family.translation.read(raw, where)
    return HFConfig(
        family.model_type,
        family.keys_for(encoder),
        encoder,
        family.architecture_named(map(str, architectures)),
        functools.partial(_labels, raw, where),
        {
            kind: _dropout(raw, key, default, where)
            for kind, (key, default) in family.dropouts.items()
        }
        | _recorded(folder),
        _problem(raw, where),
        ids={
            key: value
            for key, value in raw.items()
            if key.endswith("_token_id") and key != "pad_token_id"
        },
    )


def with_names(settings: HFConfig, names: Collection[str]) -> HFConfig:
    """The same with what the names of the folder's tensors tell beside."""
    family, encoder = family_named(settings.model_type), settings.encoder
    if family is None or not isinstance(encoder, EncoderConfig):
        return settings
    encoder = family.seen(encoder, names)
    return replace(settings, encoder=encoder, keys=family.keys_for(encoder))


def _own_settings(raw: Mapping[str, Any], file: Path) -> HFConfig:
    described, labels = read_description(raw, file), _labels(raw, str(file))
    counts = {head.count for head in described.heads if isinstance(head, LabelHead | TagHead)}
    if "id2label" in raw and counts != {len(labels)}:
        raise FolderError(
            f"id2label names {len(labels)} outputs, and the heads have {sorted(counts) or 'none'}",
            where=file,
        )
    named = (
        labels
        if "id2label" in raw
        else tuple(label_name(at) for at in range(max(counts, default=0)))
    )
    architecture, problem = described.architecture, _problem(raw, str(file))
    return HFConfig(
        OWN, KEYS, described.encoder, architecture, lambda: named, {}, problem, described.heads
    )


def _problem(raw: Mapping[str, Any], where: str) -> Problem | None:
    problems: dict[str, Problem] = {name: name for name in get_args(Problem)}
    return (
        None
        if raw.get("problem_type") is None
        else read_choice(raw, "problem_type", problems, "", where)
    )


def _dropout(raw: Mapping[str, Any], key: str, default: float | None, where: str) -> float | None:
    return default if raw.get(key) is None else float(read_number(raw, key, 0.0, where))


def _recorded(folder: Path) -> dict[HeadKind, float]:
    """The dropouts of heads that the record tells."""
    file = folder / RECORD
    said = read_json(file).get(DROPOUTS, {}) if file.is_file() else {}
    if not isinstance(said, dict):
        raise FolderError(
            f"{DROPOUTS} must be a table of heads with their rates, not {said!r:.40}", where=file
        )
    return {kind: read_number(said, kind, 0.0, str(file)) for kind in _ANSWERING if kind in said}


_ANSWERING: tuple[HeadKind, ...] = ("labels", "tags", "choice")


def label_name(at: int) -> str:
    """What transformers calls an output without a name."""
    return f"LABEL_{at}"


def _labels(raw: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """As transformers reads them: where two settings tell two numbers of outputs, the names count for nothing."""
    names = raw.get("id2label")
    if names is not None and (
        not isinstance(names, dict) or set(names) != {str(at) for at in range(len(names))}
    ):
        raise FolderError(
            f"id2label must name the outputs 0, 1, 2 … and nothing else, not {names!r}", where=where
        )
    count = 2 if names is None else len(names)
    count = (
        read_number(raw, "num_labels", count, where) if raw.get("num_labels") is not None else count
    )
    if count < 1:
        raise FolderError(
            f"a head with labels must have at least one output, not {count}", where=where
        )
    if names is None or len(names) != count:
        return tuple(label_name(at) for at in range(count))
    return tuple(str(names[str(at)]) for at in range(count))
