"""A model folder opened for a task: what it records, what is set, and whether both fit."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bothways.core.config import reader as configs
from bothways.core.config.values import Tree, parse_overrides, rename
from bothways.core.errors import ConfigError, FolderError, argument, call, report_findings, setting
from bothways.core.files import local_path
from bothways.core.runtime.devices import choose_device
from bothways.core.terminal import listed, quantity
from bothways.hub import sentence_transformers
from bothways.hub.hf_config import RECORD
from bothways.hub.model_folder import LoadedModel, load_model
from bothways.hub.resolve import resolve_run
from bothways.hub.static_embedding import StaticEncoder
from bothways.prediction import PredictPrecision, Runtime
from bothways.prediction.predictor import Predictor
from bothways.prediction.session_model import SessionModel, open_session, open_static
from bothways.tasks.base import TaskModel
from bothways.tasks.catalogue import ALL_TASKS, TASKS, AnyTask, task_kind
from bothways.tasks.classification.task import NEEDS_ENTAILMENT
from bothways.tasks.masked_lm.task import NEEDS_DIRECTION
from bothways.tasks.predictions import CUT_TO_TOP, prediction_type
from bothways.tasks.reranking.task import cross_encoder
from bothways.tasks.sentence_embedding.task import sentence_encoder
from bothways.training.encoding_checks import check_model


@dataclass(frozen=True)
class FolderRecord:
    """The task that a folder is for, and the length it was trained with, if they are known."""

    length: int | None = None
    task: AnyTask | None = None


_FINETUNE_FIRST = f"Fine-tune it first: {call('finetune', 'MODEL', 'TRAIN', task='…')}."
_CHOOSE_OTHER = "Choose another task, or another model."


def open_task(
    folder: str | Path,
    task: str | None = None,
    *,
    length: int | None = None,
    device: str = "auto",
    precision: PredictPrecision = "fp32",
    batch_invariant: bool = False,
    runtime: Runtime = "torch",
    settings: Tree | Iterable[str] = (),
) -> Predictor:
    """Open a model folder, the folder of a fine-tuning run, or a Hub id, as `bothways.load`.

    Args:
        settings: changed settings of the task: {"pooling": "max"}, or texts such as "pooling=max".

    Raises:
        FolderError: the folder cannot be read, lacks the heads that the task needs, has them with
            other outputs, or gives two outputs one name.
        TokenizerError: the tokenizer cannot be read.
        BothwaysError: the tokenizer has more ids than the model.
        ConfigError: the length is beyond the model's positions; an unknown device, task or setting;
            a precision that the device does not have.
    """
    reopen = original = None
    if runtime == "torch":
        options: Any = {"length": length, "device": device, "settings": settings}
        task_model = open_task_model(folder, task, **options)
        # Opened again, perhaps in another process, the program may work in another folder.
        location = local_path(folder)
        source = location.absolute() if location.exists() else folder
        reopen = functools.partial(open_task_model, source, task, **options)
        is_static = isinstance(task_model.model.encoder, StaticEncoder)
        if is_static and precision not in ("auto", "fp32"):
            message = f"a StaticEmbedding folder has no matrix products, and none in {precision}"
            raise ConfigError(message, where="precision", fix="Set the precision to fp32.")
    else:
        if device not in ("auto", "cpu"):
            message = f"an exported model runs on the CPU, not on {device}"
            raise ConfigError(message, where="device", fix="Set the device to cpu.")
        loaded = open_session(resolve_run(str(folder)), precision, runtime)
        task_model = _bind(loaded, task, length=length, settings=settings)
        match loaded.extra.get("source"):
            case {"sha256": str(digest), "length": own_length, "settings": dict(own_settings)}:
                changed = {**own_settings, **parse_overrides(settings)}
                original = digest, length or own_length, changed
    return Predictor(
        task_model, precision, batch_invariant=batch_invariant, reopen=reopen, source=original
    )


def open_task_model(
    folder: str | Path,
    task: str | None = None,
    *,
    length: int | None = None,
    device: str = "auto",
    settings: Tree | Iterable[str] = (),
) -> TaskModel[Any, Any]:
    """Open a folder as `open_task`, with the model as it is saved, in evaluation mode."""
    source = resolve_run(str(folder))
    if (static := open_static(source, device)) is not None:
        return _bind(static, task, length=length, settings=settings)
    loaded = load_model(source, whole=False)
    return _bind(loaded, task, length=length, settings=settings).to(choose_device(device))


def open_finetuned(folder: str | Path, device: str = "auto") -> TaskModel[Any, Any]:
    """Open a folder in the task of its training, where no other can be named."""
    try:
        return open_task_model(folder, device=device)
    except _UntrainedError as error:
        raise FolderError(error.what, where=error.where, fix=_FINETUNE_FIRST) from None


_ALIASES = {
    "max_length": "length", "max_seq_length": "length", "truncate_dim": "components",
    "normalize_embeddings": "normalised", "top_k": "top", "doc_stride": "stride",
    "pooling_mode": "pooling", "labels": "candidates", "candidate_labels": "candidates",
    "hypothesis_template": "template",
}  # fmt: skip
"""Names of transformers and sentence-transformers for settings that mean the same here."""


def _renamed(settings: Tree, names: Collection[str]) -> dict[str, Any]:
    """Return settings in which those with an alias of these names have the name.

    Others stay as they are spelled, for the message that names them.
    """
    return rename(settings, {alias: name for alias, name in _ALIASES.items() if name in names})


def _bind(
    loaded: LoadedModel, name: str | None, *, length: int | None, settings: Tree | Iterable[str]
) -> TaskModel[Any, Any]:
    """Return the task of a folder with its model, in evaluation mode."""
    settings = _renamed(parse_overrides(settings), ("length", "candidates"))
    if isinstance(named := settings.get("candidates"), str) and not named.startswith("["):
        labels = named.replace("\uff0c", ",").split(",")  # a full-width comma, typed in Chinese
        settings["candidates"] = [label.strip() for label in labels if label.strip()]
    name = "zero-shot" if name is None and named is not None else name
    if "length" in settings:
        if length is not None:
            fix = "Leave one of them out."
            raise ConfigError("is given twice, once as a setting", where="length", fix=fix)
        length = configs.read(FolderRecord, {"length": settings.pop("length")}).length
    if "task" in settings:  # as in the settings of a run
        message = "a setting of the task has no prefix here"
        fix = f"Write, for example, {setting('columns.text', 'body')}."
        raise ConfigError(message, where="task", fix=fix)
    base, recorded_length = _recorded_task(loaded, None if name is None else task_kind(name))
    task = _changed(base, settings)
    _check_heads(task, loaded)
    if task.name == "embed":
        projection = sentence_transformers.read_projection(loaded.folder)
        if projection is not None:
            loaded.model.heads[sentence_transformers.PROJECTION] = projection
    folder, positions = loaded.tokenizer_folder or loaded.folder, loaded.model.config.max_positions
    lengths = (length, recorded_length, sentence_transformers.read_length(folder, positions))
    max_length = next(value for value in lengths if value is not None)
    tokenizer = loaded.tokenizer
    report_findings(check_model(loaded.model.config, tokenizer, max_length))
    task_model: TaskModel[Any, Any] = task.bind(loaded.model, tokenizer, loaded.labels, max_length)
    return task_model.eval()


def rebound(
    task_model: TaskModel[Any, Any], settings: Tree, length: int | None = None
) -> TaskModel[Any, Any]:
    """Return the model with other settings of its task, or another length; they share weights."""
    settings = _renamed(settings, ("length",))
    length = settings.pop("length", length) or task_model.length
    task = _changed(task_model.task, settings)
    bound: TaskModel[Any, Any] = task.bind(
        task_model.model, task_model.tokenizer, task_model.labels, length
    )
    return bound.eval()


def _changed(task: Any, settings: Tree) -> AnyTask:
    """Return a task with other settings.

    Raises:
        ConfigError: a setting is unknown or of other tasks, or a value is not allowed.
    """
    for key in settings:
        name = _ALIASES.get(key, key)
        kinds = [kind for kind, cls in ALL_TASKS.items() if name in cls.__dataclass_fields__]
        if kinds and name not in task.__dataclass_fields__:
            message = f"is a setting of {' and '.join(kinds)}; the task here is {task.name}"
            fix = "Leave it out."
            if name == "top" and issubclass(prediction_type(task), CUT_TO_TOP):
                fix = f"To keep the best of each prediction, give predict {argument(best=2)}."
            raise ConfigError(message, where=key, fix=fix)
    overrides = _renamed(settings, task.__dataclass_fields__)
    changed: AnyTask = configs.load(type(task), base=task, overrides=overrides)
    return changed


def _check_heads(task: AnyTask, loaded: LoadedModel) -> None:
    """Raise FolderError if the model lacks a head of the task, or its outputs do not fit."""
    needed = {head.kind for head in task.heads(loaded.labels, None)}
    name = task.name
    if not needed <= set(loaded.model.heads):
        heads = " and ".join(map(repr, sorted(needed)))
        message = f"the task {name!r} needs the head {heads}; this model has: "
        masked = "Choose a model with its masked head, such as the folder of a pre-training run."
        advice = {"masked": masked, "causal": NEEDS_DIRECTION, "labels": NEEDS_ENTAILMENT}
        fix = _FINETUNE_FIRST if name in TASKS else advice[min(needed)]
        message, fix = _lacking(message, loaded, fix)
        raise FolderError(message, where=loaded.folder, fix=fix)
    if not needed and isinstance(loaded.model, SessionModel) and loaded.model.heads:
        message = f"the task {name!r} reads vectors; this export ends in the head {_heads(loaded)}"
        fix = f"Export the model for it: {call('export', 'MODEL', out='FOLDER', task=name)}"
        raise FolderError(message, where=loaded.folder, fix=fix)
    if task.problem is not None and loaded.problem not in (None, task.problem):
        message = f"its label head is for {loaded.problem}, not for {task.problem}"
        raise FolderError(message, where=loaded.folder, fix=_CHOOSE_OTHER)
    if task.model_class.scale == "number" and len(loaded.labels) > 1:
        outputs = f"{quantity(len(loaded.labels), 'output(s)')} ({listed(loaded.labels)})"
        message = f"its label head has {outputs}, and {name} has one"
        raise FolderError(message, where=loaded.folder, fix=_CHOOSE_OTHER)
    if task.problem == "single_label_classification" and len(loaded.labels) == 1:
        # The softmax of one output is 1, whatever the text.
        message = f"its label head has 1 output ({loaded.labels[0]}), and {name} needs two"
        score, single = argument(task="regress"), argument(task="multilabel")
        fix = f"A score is read by {score}, the probability of one label by {single}."
        raise FolderError(message, where=loaded.folder, fix=fix)
    if "labels" in needed:
        label, count = max(Counter(loaded.labels).items(), key=lambda item: item[1])
        if count > 1:
            message = f"id2label gives the name {label!r} to {count} outputs, and the task "
            message += "distinguishes outputs by name"
            config = loaded.folder / "config.json"
            raise FolderError(message, where=config, fix="Give each output its own name there.")


class _UntrainedError(FolderError):
    """A model without a task."""


def _recorded_task(loaded: LoadedModel, kind: str | None) -> tuple[AnyTask, int | None]:
    """Return the task and the length that are recorded: in our file, in that of
    sentence-transformers, or by the heads. Of a kind that is not recorded: with its defaults.
    """
    fields = {name: loaded.extra[name] for name in ("length", "task") if name in loaded.extra}
    record = configs.read(FolderRecord, fields, where=RECORD)
    # Our own record is the most exact: it has the settings of the task.
    if record.task is not None and kind in (None, record.task.name):
        return record.task, record.length
    if kind in (None, "embed", "rerank"):
        match sentence_transformers.read_program_config(
            loaded.folder, loaded.model.config.max_positions
        ):
            case sentence_transformers.SentenceEncoderConfig() as encoder if kind != "rerank":
                return sentence_encoder(encoder), encoder.length
            case sentence_transformers.CrossEncoderConfig() as reranker if (
                kind != "embed" and len(loaded.labels) == 1
            ):
                return cross_encoder(reranker), reranker.length
    if kind is not None:
        return ALL_TASKS[kind]().fitted(loaded.model), record.length
    # A single output without a problem type is a score, as in transformers.
    problem = loaded.problem or ("regression" if len(loaded.labels) == 1 else None)
    for cls in TASKS.values():
        task = cls()
        needed = {head.kind for head in task.heads(loaded.labels, None)}
        fits = task.problem is None or problem in (None, task.problem)
        if needed and needed <= set(loaded.model.heads) and fits:
            return task, record.length
    message = "is not fine-tuned for a task: its heads are "
    untrained = ("likelihood", "fill", "embed") if "masked" in loaded.model.heads else ("embed",)
    tasks = " or ".join(argument(task=kind) for kind in untrained)
    fix = f"{_FINETUNE_FIRST} Or name a task that needs no training: {tasks}."
    message, fix = _lacking(message, loaded, fix)
    raise _UntrainedError(message, where=loaded.folder, fix=fix)


def _heads(loaded: LoadedModel) -> str:
    """List the model's heads, and the faults of those that its class should have."""
    faults = (f"; not the whole {kind}: {fault}" for kind, fault in loaded.faults.items())
    return (", ".join(loaded.model.heads) or "none") + "".join(faults)


def _lacking(message: str, loaded: LoadedModel, fix: str) -> tuple[str, str]:
    """Return the message and the advice for a model without a head that a task needs.

    Without "architectures" the file may hold a head that nothing names.
    """
    message += _heads(loaded)
    unread = [] if loaded.faults else loaded.report.unrequested
    if unread:
        message += f"; config.json names no class with {listed(unread, 3)}"
        fix = 'Set "architectures" there to the class that was saved, such as '
        fix += '["BertForSequenceClassification"].'
    return message, fix
