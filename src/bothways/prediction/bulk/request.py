"""Requests for bulk prediction."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bothways.core.advice import argument
from bothways.core.config import reader as configs
from bothways.core.config.checks import require_at_least
from bothways.core.errors import ConfigError, DataError
from bothways.data.hub_rows import HUB, without_revision
from bothways.data.text_io import file_at, is_stream
from bothways.hub.provenance import digest_of_model
from bothways.prediction.predictor import Predictor, open_task, open_task_model
from bothways.prediction.prepared_model import PredictPrecision
from bothways.prediction.session_model import Runtime
from bothways.tasks.base import Task
from bothways.tasks.sentence_embedding.task import SentenceEmbeddingTask
from bothways.tasks.tagging.task import TaggingTask

PartFormat = Literal["jsonl", "spans", "parquet", "npy"]

ROWS = 4096
"""Rows of a part by default: as many as the engine sorts by length together."""


@dataclass(frozen=True)
class BulkRequest:
    """Predictions for all rows of files.

    Attributes:
        model: a model folder, the folder of a run, or a Hub id; readable by every worker.
        files: names of files, or of Hub data sets.
        task, settings, length, precision, device, runtime: as in `open_task`.
        text, text_b: columns of the texts; None as in training.
        top: how many labels keep their probability; None for all.
        keep: columns that are copied from the input to the output; "old=new" renames one.
        form: of a part; None: .npy for vectors without columns to keep, Parquet if all files are,
            else JSON lines. "spans": JSON lines of texts with entities as character spans.
        rows: of a part; the last part of a file has fewer.
        rejects: whether rows that cannot be read or predicted are written to a file of their own;
            without it, the first one ends the work.
    """

    model: str
    files: tuple[str, ...]
    task: str | None = None
    settings: tuple[str, ...] = ()
    length: int | None = None
    precision: PredictPrecision = "fp32"
    device: str = "auto"
    runtime: Runtime = "torch"
    text: str | None = None
    text_b: str | None = None
    top: int | None = None
    keep: tuple[str, ...] = ()
    form: PartFormat | None = None
    rows: int = ROWS
    rejects: bool = False

    def __post_init__(self) -> None:
        require_at_least(1, rows=self.rows, top=self.top)
        if not self.files:
            raise ConfigError("names no file", where="files", fix="Name one or more.")
        for name in self.files:
            if not name.startswith(HUB) and is_stream(name):
                fix = "Write it to a file first, or name one file for the output."
                raise ConfigError("parts are made of files, not of a pipe", where=name, fix=fix)
            if not name.startswith(HUB):
                file_at(name)
        kept_columns(self.keep)

    @property
    def kept(self) -> list[tuple[str, str]]:
        """The columns to copy: their names in the input and in the output."""
        return kept_columns(self.keep)

    def open(self, device: str | None = None) -> Predictor:
        """Open the model with its task; a row has the same prediction in every part."""
        return open_task(
            self.model,
            self.task,
            length=self.length,
            device=device or self.device,
            precision=self.precision,
            batch_invariant=True,
            runtime=self.runtime,
            settings=self.settings,
        )

    def read_task(self) -> Task[Any, Any]:
        """Return the task alone, for a process that computes nothing."""
        if self.runtime != "torch":
            return self.open().task_model.task
        return open_task_model(
            self.model, self.task, length=self.length, device="cpu", settings=self.settings
        ).task

    def columns(self, task: Task[Any, Any]) -> Any:
        """Return the named columns as the column type of the task; None if there are none.

        Raises:
            ConfigError: the task has no such column.
        """
        roles = {"text": self.text, "text_b": self.text_b}
        chosen_names = {role: name for role, name in roles.items() if name is not None}
        kind = type(task.columns)  # type: ignore[attr-defined]
        return configs.read(kind, chosen_names, where="columns") if chosen_names else None

    def with_form(self, task: Task[Any, Any]) -> BulkRequest:
        """Return the request with the format of the parts, the usual one if none is named.

        Raises:
            ConfigError: .npy holds neither predictions other than vectors nor columns.
        """
        vectors = isinstance(task, SentenceEmbeddingTask)
        check_format(self.form, task)
        if self.form == "npy" and not vectors:
            message = f"npy holds vectors, and the task is {task.name!r}"
            raise ConfigError(message, where="format", fix="Choose jsonl or parquet.")
        if self.form == "npy" and self.keep:
            message = "npy holds no columns to keep"
            raise ConfigError(message, where="format", fix="Choose parquet or jsonl.")
        form: PartFormat = "npy" if vectors and not self.keep else "jsonl"
        if all(name.endswith(".parquet") for name in self.files) or (vectors and self.keep):
            form = "parquet"
        return dataclasses.replace(self, form=self.form or form)

    def record(self) -> dict[str, Any]:
        """Return the settings that decide the output, as plain values."""
        values = dataclasses.asdict(self)
        values |= {"settings": [*self.settings], "keep": [*self.keep]}
        values["files"] = [*map(without_revision, self.files)]  # the commit is noted apart from it
        del values["device"]
        return values | {"sha256 of the model": digest_of_model(self.model)}


def check_format(form: PartFormat | None, task: Task[Any, Any]) -> None:
    """Raise ConfigError for spans of a task that does not tag words."""
    if form == "spans" and not isinstance(task, TaggingTask):
        message = f"spans are of the task 'tag', and the task is {task.name!r}"
        raise ConfigError(message, where="format", fix="Choose jsonl or parquet.")


def check_not_inside(out: Path, files: tuple[str, ...]) -> None:
    """Raise DataError if a file is in the folder that is written to."""
    for name in files:
        if not name.startswith(HUB) and file_at(name).parent.resolve() == out.resolve():
            message = "is in the folder of the output"
            raise DataError(
                message, where=name, fix=f"Choose another folder: {argument(out='FOLDER')}."
            )


def kept_columns(keep: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return columns to copy, "name" or "old=new", with their names in the input and the output.

    Raises:
        ConfigError: two have one name in the output.
    """
    pairs = [(old, new or old) for old, _, new in (name.partition("=") for name in keep)]
    new = [name for _, name in pairs]
    if len({*new}) < len(new):
        message = f"names a column twice: {', '.join(new)}"
        raise ConfigError(
            message, where="keep", fix=f"Rename one, such as {argument(keep='old=new')}."
        )
    return pairs
