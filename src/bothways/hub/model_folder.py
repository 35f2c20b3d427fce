"""The model folder, both ways: what is saved is a Hugging Face folder, and theirs open here.

`config.json`, `model.safetensors` and the tokenizer's files are transformers' own; what they have no place for lies in
`bothways.json`. A model that none of its classes can be has a folder of our own type (`bothways.interop.ownfolder`). Loading is
strict: a part that the folder lacks starts at random only if it is asked for by name.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

import bothways
from bothways.core.atomic_files import replace_folder
from bothways.core.errors import ConfigError, FolderError
from bothways.families.family import Architecture
from bothways.families.weight_names import KeyTable, to_theirs
from bothways.hub.hf_config import DROPOUTS, RECORD, HFConfig, Problem, read_hf_config, with_names
from bothways.hub.hf_config_write import form_of, outputs_of
from bothways.hub.infer_heads import faults_of, heads_of
from bothways.hub.load_report import LoadPlan, LoadReport, head_of, listed, plan_loading
from bothways.hub.model_card import Card, render_card
from bothways.hub.resolve import MODEL_FILES, PICKLE_FILES, PROGRAM, modules_folder, resolve
from bothways.hub.weight_files import AGAIN, Weights, open_weights, read_json
from bothways.model.head_config import Head, PoolerHead
from bothways.model.init import without_weights
from bothways.model.model import Model, build_head, with_pooler

if TYPE_CHECKING:
    from bothways.text.tokenizer import Tokenizer

VERSION = "bothways"
"""The key in the record under which the library's version stands."""


@dataclass(frozen=True)
class LoadedModel:
    """A model folder in memory.

    Attributes:
        model: in evaluation mode, in fp32, on the CPU.
        report: what became of every tensor.
        folder: where it lies; its tokenizer's files lie there too, if it has them.
        labels: names of the outputs of the label or tag head, in order; none without such a head or with a fresh one.
        problem: what the label head was trained for, if the folder says it.
        extra: what `bothways.json` holds beside.
        faults: what the file lacks of heads that were left out for it, by kind.
    """

    model: Model
    report: LoadReport
    folder: Path
    labels: tuple[str, ...] = ()
    problem: Problem | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)

    def tokenizer(self) -> Tokenizer:
        """What its ids mean, with as many segments as the model has.

        Raises:
            TokenizerError: the folder has no tokenizer, or one that cannot be read.
        """
        from bothways.text.tokenizer import Tokenizer

        return Tokenizer.load(self.folder).for_segments(self.model.config.segments)


def load_model(
    source: str | Path,
    heads: Iterable[Head] | None = None,
    fresh: Collection[str] = (),
    *,
    whole: bool = True,
) -> LoadedModel:
    """Open a model folder, or one of the Hub.

    Args:
        source: the folder, or its id on the Hub.
        heads: which heads the model is to have, with the pooler that they read; none means those that the folder has.
        fresh: kinds among them that start at random, even where the folder holds them: "labels" for a new task.
        whole: whether the file must hold all of these heads; else those that it lacks something of are left out.

    Raises:
        FolderError: it is no model folder of a known family, a file is corrupt, or a tensor that is in no fresh head, nor in
            one that is left out, is missing or of another shape.
        ConfigError: `fresh` names a head that the model is not to have.
    """
    folder = resolve(source)
    settings, weights = read_hf_config(folder), open_weights(folder)
    settings = with_names(settings, weights.shapes)
    asked = (
        heads_of(settings, weights.shapes)
        if heads is None
        else with_pooler(settings.encoder, heads)
    )
    faults = {} if whole else faults_of(settings, weights.shapes, asked, fresh)
    wanted = tuple(head for head in asked if head.kind not in faults)
    kinds = {head.kind for head in wanted}
    if not set(fresh) <= kinds:
        raise ConfigError(
            f"{sorted(fresh)} must be among the model's heads, {sorted(kinds)}", where="fresh"
        )
    model, report = build_model(settings, weights, wanted, fresh)
    program = modules_folder(folder) / PROGRAM
    model.kept = {
        "config.json": settings.ids,
        PROGRAM: read_json(program) if program.is_file() else {},
    }
    extra = read_json(folder / RECORD) if (folder / RECORD).exists() else {}
    extra = {key: value for key, value in extra.items() if key not in (VERSION, DROPOUTS)}
    labels = settings.labels() if {"labels", "tags"} & (kinds - set(fresh)) else ()
    return LoadedModel(model, report, folder, labels, settings.problem, extra, faults)


def build_model(
    settings: HFConfig, weights: Weights, heads: Iterable[Head], fresh: Collection[str] = ()
) -> tuple[Model, LoadReport]:
    """The model with its weights, in evaluation mode, and what became of every tensor.

    Raises:
        FolderError: a tensor that is in no fresh head is missing or of another shape.
    """
    wanted = tuple(heads)
    model, plan = plan_model(settings, weights, wanted, fresh)
    table = settings.keys
    _check(plan.report, table, weights.file, {head.kind for head in wanted})
    state = _read(plan, table, model.state_dict(), weights)
    for head in wanted:
        if head.kind in fresh:
            started = build_head(settings.encoder, head).state_dict()
            state |= {f"heads.{head.kind}.{name}": tensor for name, tensor in started.items()}
    model.load_state_dict(state, assign=True)
    return model.eval(), plan.report


def plan_model(
    settings: HFConfig, weights: Weights, heads: Iterable[Head], fresh: Collection[str] = ()
) -> tuple[Model, LoadPlan]:
    """The model without memory for its weights, and what loading would do; nothing but names and shapes is read."""
    with without_weights():
        model = Model(settings.encoder, heads)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    has = None if settings.architecture is None else settings.architecture.heads
    return model, plan_loading(settings.keys, shapes, weights.shapes, fresh, has)


def _check(report: LoadReport, table: KeyTable, file: Path, kinds: Collection[str]) -> None:
    wrong = [*report.missing, *report.misshapen]
    if not wrong:
        return
    heads = {head_of(rule.ours) for name in wrong for rule in table.origins(name)}
    if None in heads:
        part, fix = "the encoder", AGAIN
    else:
        lacking = sorted(kind for kind in kinds if kind in heads)
        part = f"the head{'s' * (len(lacking) > 1)} {' and '.join(lacking)}"
        fix = f"To start at random what is missing: fresh={','.join(lacking)} (in Python fresh={lacking})."
    raise FolderError(
        f"does not hold {part} of this model: {'; '.join(report.faults)}", where=file, fix=fix
    )


def _read(
    plan: LoadPlan, table: KeyTable, names: Iterable[str], weights: Weights
) -> dict[str, Tensor]:
    """Our tensors, in fp32; those of fresh heads are left out. What is theirs as it is stays where it was read."""
    for copy, name in plan.copies:
        if not torch.equal(weights.read(plan.found[copy]), weights.read(plan.found[name])):
            what = f"holds {copy} apart from {name}, and its config.json says that they are one"
            fix = 'If they differ by intent, write "tie_word_embeddings": false there; or load it without the head.'
            raise FolderError(what, where=weights.file, fix=fix)
    state = {}
    for ours in set(names) - set(plan.report.fresh):
        place = table.place(ours)
        parts = [_exact(weights, plan.found[name]) for name in place.names]
        state[ours] = place.join(parts).contiguous()
    return state


def _exact(weights: Weights, name: str) -> Tensor:
    tensor = weights.read(name)
    if not tensor.is_floating_point():
        what = f"holds {name} as {str(tensor.dtype).removeprefix('torch.')}: quantised weights cannot be read"
        raise FolderError(
            what, where=weights.file, fix="Use the model's fp32, fp16 or bf16 weights."
        )
    return tensor.to(torch.float32)


def save_model(
    folder: str | Path,
    model: Model,
    tokenizer: Tokenizer | None = None,
    *,
    labels: Sequence[str] = (),
    problem: Problem | None = None,
    card: Card | None = None,
    extra: Mapping[str, Any] | None = None,
    beside: Mapping[str, Any] | None = None,
) -> None:
    """Write a model folder; it appears whole or not at all, and replaces an older one.

    transformers opens it if one of its families can express the configuration; else it is of our own type, which it does not.

    Args:
        folder: where; if it exists, it must hold nothing but a model.
        model: its weights are written in fp32.
        tokenizer: what its ids mean.
        labels: names of the outputs of the label or tag head, in order; none means LABEL_0, LABEL_1 …
        problem: what the label head is for.
        card: what `README.md` says.
        extra: what goes into `bothways.json`: tuned thresholds, the training's record. JSON only.
        beside: JSON files of other programs, by name, such as those of sentence-transformers.

    Raises:
        FolderError: the family has no class in transformers for these heads, the names do not fit the outputs, the tokenizer
            has more ids than the embedding, or the folder holds something else.
        ResourceError: there is no room or no permission; an older model then stays as it was.
    """
    place = Path(folder)
    form = form_of(model, tokenizer, place)
    settings = {**form.settings, **outputs_of(model, labels, problem, place), **form.dropouts}
    if tokenizer is not None and tokenizer.size > model.config.vocab:
        what = f"the tokenizer has {tokenizer.size} ids, the model's embedding {model.config.vocab} rows"
        raise FolderError(
            what, where=place, fix="Save the tokenizer that the model was trained with."
        )
    _check_free(place)
    with replace_folder(place) as hidden:
        _write_json(hidden / "config.json", settings)
        _write_json(
            hidden / RECORD, {VERSION: bothways.__version__, **(extra or {}), **form.record}
        )
        for name, tree in (beside or {}).items():
            (hidden / name).parent.mkdir(exist_ok=True)
            _write_json(hidden / name, tree)
        (hidden / "README.md").write_text(
            render_card(card or Card(), form.architecture), encoding="utf8"
        )
        if tokenizer is not None:
            tokenizer.save(
                hidden, positions=model.config.max_positions, segments=model.config.segments > 1
            )
        _write_weights(hidden / "model.safetensors", model, form.keys, form.architecture)


def _check_free(place: Path) -> None:
    if place.exists() and not place.is_dir():
        raise FolderError(
            "is a file, where a model folder is to be", where=place, fix="Choose another folder."
        )
    known = (*MODEL_FILES, *PICKLE_FILES, "README.md")
    held = sorted(file.name for file in place.iterdir()) if place.exists() else []
    foreign = [
        name for name in held if not any(fnmatch.fnmatch(name, pattern) for pattern in known)
    ]
    if foreign:
        what = f"holds more than a model, which would be lost: {listed(foreign)}"
        raise FolderError(what, where=place, fix="Choose an empty or a new folder.")


def _write_json(file: Path, tree: Any) -> None:
    file.write_text(json.dumps(tree, indent=2, ensure_ascii=False) + "\n", encoding="utf8")


def _write_weights(file: Path, model: Model, table: KeyTable, architecture: Architecture) -> None:
    """What the class holds idle and the model does not have is written as in a new model: nothing reads it."""
    state = {
        name: tensor.detach().to("cpu", torch.float32)
        for name, tensor in model.state_dict().items()
    }
    if "pooler" in architecture.idle - set(model.heads):
        with torch.random.fork_rng(
            devices=[]
        ):  # draws of its own, so that equal models give equal files
            torch.default_generator.manual_seed(0)
            pooler = build_head(model.config, PoolerHead()).state_dict()
        state |= {f"heads.pooler.{name}": tensor for name, tensor in pooler.items()}
    prefix = table.prefix if architecture.bare else ""
    theirs = to_theirs(table, state)
    theirs |= {spare.theirs: theirs[name] for name, spare in table.spares.items() if name in theirs}
    tensors = {name.removeprefix(prefix): tensor.clone() for name, tensor in theirs.items()}
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except (
        SafetensorError
    ) as error:  # hides what the operating system refused, such as room on the disk
        raise OSError(str(error)) from error
