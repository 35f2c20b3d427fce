"""The form that a model is written in: as a class of transformers, or as one of ours, and what `config.json` says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bothways.core.errors import FolderError
from bothways.families.catalogue import family_for
from bothways.families.family import Architecture, Family
from bothways.families.weight_names import KeyTable
from bothways.hub.hf_config import DROPOUTS, Problem, label_name
from bothways.hub.load_report import listed
from bothways.hub.native_format import KEYS, Description, own_settings
from bothways.model.head_config import ChoiceHead, LabelHead, TagHead
from bothways.model.lstm_config import LSTMConfig
from bothways.model.model import Model

if TYPE_CHECKING:
    from bothways.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class FolderForm:
    """A class of transformers, or one of ours.

    Attributes:
        settings: what `config.json` says of class and shape.
        keys: how its tensors are named.
        dropouts: what it says of a head's own dropout.
        record: what `bothways.json` says, where the class has no setting for that.
    """

    settings: Mapping[str, Any]
    architecture: Architecture
    keys: KeyTable
    dropouts: Mapping[str, Any] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)


def form_of(model: Model, tokenizer: Tokenizer | None, place: Path) -> FolderForm:
    """How a model with this tokenizer, or without one, is to be written in `place`.

    Raises:
        FolderError: its family has no class in transformers for these heads.
    """
    config = model.config
    family = family_for(config, None if tokenizer is None else tokenizer.kind)
    if family is None or isinstance(config, LSTMConfig):
        return FolderForm(
            own_settings(model), Description(config, model.specification).architecture, KEYS
        )
    architecture = family.architecture_with(model.heads)
    if architecture is None:
        sets = "; ".join(
            f"{', '.join(sorted(known.heads))} ({known.name})" for known in family.architectures
        )
        what = f"transformers has no class for the heads {', '.join(model.heads) or 'none'}: it has {sets}"
        raise FolderError(what, where=place)
    if architecture.own:
        return FolderForm(own_settings(model), architecture, KEYS)
    settings: dict[str, Any] = {
        "architectures": [architecture.name],
        "model_type": family.model_type,
        "dtype": "float32",
    }
    ids = model.kept.get("config.json", {}) if tokenizer is None else _ids(tokenizer)
    settings |= {**(family.translation.write(config) or {}), **ids}
    return FolderForm(settings, architecture, family.keys_for(config), *_dropouts(family, model))


def _ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    """Of special tokens, but for padding; a text begins with [CLS] and ends with [SEP] if the tokenizer says nothing else."""
    from bothways.text.tokenizer_files import tokenizer_config

    said = tokenizer_config(tokenizer.backend, tokenizer.specials)
    names = {"bos_token": said["cls_token"], "eos_token": said["sep_token"]} | said
    return {
        f"{use}_token_id": tokenizer.id(names[f"{use}_token"])
        for use in ("bos", "eos", "cls", "sep")
    }


def _dropouts(family: Family, model: Model) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `config.json` says of a head's own dropout, and what `bothways.json` does."""
    head = _answering(model)
    key, default = ("", None) if head is None else family.dropouts.get(head.kind, ("", None))
    rate = None if head is None else head.dropout
    if head is None or (rate is None and default is None):
        return {}, {}
    rate = model.config.head_dropout if rate is None else rate
    return ({key: rate}, {}) if key else ({}, {DROPOUTS: {head.kind: rate}})


def _answering(model: Model) -> LabelHead | TagHead | ChoiceHead | None:
    """The head with a dropout of its own, if there is one."""
    return next(
        (
            head
            for head in model.specification
            if isinstance(head, LabelHead | TagHead | ChoiceHead)
        ),
        None,
    )


def outputs_of(
    model: Model, labels: Sequence[str], problem: Problem | None, place: Path
) -> dict[str, Any]:
    """What `config.json`, in `place`, is to say of a head's outputs: their names, and the problem that they answer.

    Raises:
        FolderError: the names do not fit the outputs, or the outputs the problem.
    """
    head, settings = _answering(model), dict[str, Any]()
    count = head.count if isinstance(head, LabelHead | TagHead) else 0
    if problem == "single_label_classification" and count == 1:
        what = "one output cannot choose among classes, and transformers refuses it"
        raise FolderError(
            what, where=place, fix="Give it two outputs, or say that its problem is regression."
        )
    if labels and len(labels) != count:
        raise FolderError(
            f"{len(labels)} names were given for {count} outputs: {listed(labels)}", where=place
        )
    if count:
        names = list(labels) or [label_name(at) for at in range(count)]
        settings |= {
            "id2label": {str(at): name for at, name in enumerate(names)},
            "label2id": {name: at for at, name in enumerate(names)},
        }
    return settings | (
        {"problem_type": problem} if head is not None and problem is not None else {}
    )
