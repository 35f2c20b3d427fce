"""A model folder at work: scored on data, or predicting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from bothways.core.config import reader as configs
from bothways.core.config.tree import Tree
from bothways.core.errors import FolderError
from bothways.core.finding import report_findings
from bothways.hub.hf_config import RECORD
from bothways.hub.load_report import listed
from bothways.hub.model_folder import LoadedModel, load_model
from bothways.hub.resolve import resolve_run
from bothways.prediction.engine import (
    DEFAULT_PREDICT,
    PredictConfig,
    PredictionCounts,
    evaluate_task,
    predict,
)
from bothways.preflight.model import check_model
from bothways.runtime.devices import choose_device
from bothways.tasks.catalogue import TASKS, AnyDefinition
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.sentence_embedding.folder import read_sentence_encoder
from bothways.tasks.task import Metrics, Reading
from bothways.tasks.task_learner import TaskLearner


@dataclass(frozen=True)
class Predictor:
    """A model folder that can do a task.

    Attributes:
        task: in evaluation mode, on its device; its definition names the columns that it was trained on, if it is known.
    """

    task: TaskLearner[Any, Any]

    def read(self, source: str, columns: Any = None, *, labelled: bool) -> Reading[Any]:
        """The examples of a file, a Hub data set or ("-") the standard input; arguments and errors as `Definition.read`."""
        return self.task.definition.read(source, columns, labelled=labelled)

    def evaluate(
        self,
        reading: Reading[Any],
        pace: PredictConfig = DEFAULT_PREDICT,
        tally: PredictionCounts | None = None,
    ) -> Metrics:
        """The metrics on examples with what the task is scored by, in constant memory.

        Raises:
            DataError: an example without a label, or with one that is none of the model's.
        """
        return evaluate_task(self.task, reading.examples, pace, tally)

    def predict(
        self,
        reading: Reading[Any],
        pace: PredictConfig = DEFAULT_PREDICT,
        tally: PredictionCounts | None = None,
    ) -> Iterator[tuple[Any, Any]]:
        """Examples with their predictions, in their order, in constant memory."""
        return predict(self.task, reading.examples, pace, tally)


class Record(NamedTuple):
    """What a folder is for, and the longest text that it was made for, in tokens, if that is known."""

    task: AnyDefinition
    length: int | None


@dataclass(frozen=True)
class _Said:
    """What `bothways.json` says that predictions need."""

    length: int | None = None
    task: AnyDefinition | None = None


_HOW = "Fine-tune it first: bothways finetune MODEL TRAIN --task …"
_MASKED = "Choose a model that kept its masked head, such as a BertForMaskedLM or the folder of bothways pretrain."

_OTHER = "Choose another task, or another model."


def open_task(
    folder: str,
    task: str | None = None,
    *,
    length: int | None = None,
    device: str = "auto",
    settings: Tree | Iterable[str] = (),
) -> Predictor:
    """A model folder, the folder of a fine-tuning run, or a Hub id, ready for a task.

    Args:
        task: its kind, as in `tasks.catalogue`; none means what the folder was trained for.
        length: the longest text in tokens; none means as in training, else all of the model's positions.
        settings: of the task, other than the folder's own: {"pooling": "max"}, or texts such as "pooling=max".

    Raises:
        FolderError: it cannot be read, has not the heads that the task needs, has them with other outputs, or gives
            two of these one name.
        TokenizerError: its tokenizer cannot be read.
        BothwaysError: the tokenizer has more ids than the model.
        ConfigError: the length is beyond the model's positions, or there is no such device, task or setting.
    """
    loaded = load_model(resolve_run(folder), whole=False)
    record = _record(loaded, task)
    definition = configs.load(type(record.task), base=record.task, overrides=settings)
    _check(definition, loaded)
    longest = next(
        most
        for most in (length, record.length, loaded.model.config.max_positions)
        if most is not None
    )
    tokenizer = loaded.tokenizer()
    report_findings(check_model(loaded.model.config, tokenizer, longest))
    opened = definition.task(loaded.model, tokenizer, loaded.labels, longest).to(
        choose_device(device)
    )
    return Predictor(opened.eval())


def _check(definition: AnyDefinition, loaded: LoadedModel) -> None:
    """FolderError: the model has not the heads that the task needs, or what they give is not what the task reads."""
    needed = {head.kind for head in definition.heads(loaded.labels, None)}
    if not needed <= set(loaded.model.heads):
        what = f"cannot {definition.name}: that needs {' and '.join(sorted(needed))}, and it holds {_heads(loaded)}"
        raise FolderError(
            what, where=loaded.folder, fix=_HOW if definition.name in TASKS else _MASKED
        )
    if definition.problem is not None and loaded.problem not in (None, definition.problem):
        what = f"its label head is for {loaded.problem}, not for {definition.problem}"
        raise FolderError(what, where=loaded.folder, fix=_OTHER)
    if definition.problem == "regression" and len(loaded.labels) > 1:
        what = f"its label head has {len(loaded.labels)} outputs ({listed(loaded.labels)}), and {definition.name} takes one"
        raise FolderError(what, where=loaded.folder, fix=_OTHER)
    if "labels" in needed:
        _check_names(loaded)


def _check_names(loaded: LoadedModel) -> None:
    """FolderError: two outputs have one name, under which only one of their probabilities could be told."""
    name, count = max(Counter(loaded.labels).items(), key=lambda item: item[1])
    if count > 1:
        what = f"id2label gives the name {name!r} to {count} outputs, and this task tells outputs apart by their names"
        raise FolderError(
            what,
            where=loaded.folder / "config.json",
            fix="Give each output a name of its own there.",
        )


def _record(loaded: LoadedModel, task: str | None) -> Record:
    """What the folder says of this task: our record, else the files of sentence-transformers, else what its heads tell."""
    said = {name: loaded.extra[name] for name in ("length", "task") if name in loaded.extra}
    ours = configs.read(_Said, said, where=RECORD)
    if ours.task is not None and task in (None, ours.task.name):
        return Record(ours.task, ours.length)
    theirs = (
        read_sentence_encoder(loaded.folder, loaded.model.config.max_positions)
        if task in (None, "embed")
        else None
    )
    if theirs is not None:
        return Record(*theirs)
    return Record(_definition(loaded, task), ours.length)


def _definition(loaded: LoadedModel, task: str | None) -> AnyDefinition:
    """The definition of this kind with its defaults, or the first trainable one for the folder's heads and problem."""
    if task is not None:
        return configs.read(_Said, {"task": {"kind": task}}).task or ClassificationTask()
    held = set(loaded.model.heads)
    # A single output without a word about it is a score, as in transformers.
    problem = loaded.problem or ("regression" if len(loaded.labels) == 1 else None)
    for cls in TASKS.values():
        definition = cls()
        own = {head.kind for head in definition.heads(loaded.labels, None)}
        if own <= held and (definition.problem is None or problem in (None, definition.problem)):
            return definition
    what = f"is for no task that is known: its heads are {_heads(loaded)}"
    fix = f"{_HOW} Or name a task that needs no training, such as --task embed."
    raise FolderError(what, where=loaded.folder, fix=fix)


def _heads(loaded: LoadedModel) -> str:
    """Those that it holds, and why not the others of its class."""
    lacking = (f"; not the whole {kind}: {fault}" for kind, fault in loaded.faults.items())
    return (", ".join(loaded.model.heads) or "none") + "".join(lacking)
