"""A fine-tuned model folder at work: scored on labelled data, or predicting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bothways.core import config as configs
from bothways.core.errors import FolderError
from bothways.core.hardware import choose_device
from bothways.interop.folder import RECORD, Loaded, load_model
from bothways.recipes.finetune_setup import model_folder
from bothways.tasks.catalogue import DEFINITIONS, AnyDefinition
from bothways.tasks.classify import Classification
from bothways.tasks.definition import Metrics, Reading
from bothways.tasks.preflight import check_model, settle
from bothways.tasks.task import PACE, Pace, Tally, Task, evaluate, predict
from bothways.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Opened:
    """A model folder that can do a task.

    Attributes:
        task: in evaluation mode, on its device; its definition names the columns that it was trained on, if it is known.
    """

    task: Task[Any, Any]

    def read(self, source: str, columns: Any = None, *, labelled: bool) -> Reading[Any]:
        """The examples of a file, a Hub data set or ("-") the standard input; arguments and errors as `Definition.read`."""
        return self.task.definition.read(source, columns, labelled=labelled)

    def evaluate(self, reading: Reading[Any], pace: Pace = PACE, tally: Tally | None = None) -> Metrics:
        """The metrics on labelled examples, in constant memory.

        Raises:
            DataError: an example without a label, or with one that is none of the model's.
        """
        return evaluate(self.task, reading.examples, pace, tally)

    def predict(self, reading: Reading[Any], pace: Pace = PACE, tally: Tally | None = None) -> Iterator[tuple[Any, Any]]:
        """Examples with their predictions, in their order, in constant memory."""
        return predict(self.task, reading.examples, pace, tally)


@dataclass(frozen=True)
class _Record:
    """What `bothways.json` says that predictions need."""

    length: int | None = None
    task: AnyDefinition | None = None


def open_task(folder: str, task: str | None = None, *, length: int | None = None, device: str = "auto") -> Opened:
    """A model folder, the folder of a fine-tuning run, or a Hub id, ready for a task.

    Args:
        task: its kind, as in `tasks.catalogue`; none means what the folder was trained for.
        length: the longest text in tokens; none means as in training, else all of the model's positions.

    Raises:
        FolderError: it cannot be read, or has not the heads that the task needs.
        TokenizerError: its tokenizer cannot be read.
        BothwaysError: the tokenizer has more ids than the model.
        ConfigError: the length is beyond the model's positions, or there is no such device or task.
    """
    loaded = load_model(model_folder(folder))
    said = {name: loaded.extra[name] for name in ("length", "task") if name in loaded.extra}
    record = configs.read(_Record, said, where=RECORD)
    definition = record.task if record.task is not None and task in (None, record.task.name) else _definition(loaded, task)
    needed = {head.kind for head in definition.heads(loaded.labels, None)}
    if not needed <= set(loaded.model.heads):
        what = f"cannot {definition.name}: that needs {' and '.join(sorted(needed))}, and it holds {_heads(loaded)}"
        raise FolderError(what, where=loaded.folder, fix="Fine-tune it first: bothways finetune MODEL TRAIN --task …")
    if definition.problem is not None and loaded.problem not in (None, definition.problem):
        what = f"its label head is for {loaded.problem}, not for {definition.problem}"
        raise FolderError(what, where=loaded.folder, fix="Choose another task, or another model.")
    longest = length or record.length or loaded.model.config.position.most
    tokenizer = Tokenizer.load(loaded.folder)
    settle(check_model(loaded.model.config, tokenizer, longest))
    opened = definition.task(loaded.model, tokenizer, loaded.labels, longest).to(choose_device(device))
    return Opened(opened.eval())


def _definition(loaded: Loaded, task: str | None) -> AnyDefinition:
    """The definition of this kind with its defaults, or the first one that the folder's heads and problem can serve."""
    if task is not None:
        return configs.read(_Record, {"task": {"kind": task}}).task or Classification()
    held = set(loaded.model.heads)
    for cls in DEFINITIONS:
        definition = cls()
        own = {head.kind for head in definition.heads(loaded.labels, None)}
        if own <= held and (definition.problem is None or loaded.problem in (None, definition.problem)):
            return definition
    what = f"is for no task that is known: its heads are {_heads(loaded)}"
    raise FolderError(what, where=loaded.folder, fix="Fine-tune it first: bothways finetune MODEL TRAIN --task …")


def _heads(loaded: Loaded) -> str:
    return ", ".join(loaded.model.heads) or "none"
