"""A request for the predictions of files, and the parts that their rows make.

Each part has the key by which it is known again.
"""

from __future__ import annotations

import collections
import dataclasses
import glob
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bothways.core.config.values import nest, require_at_least
from bothways.core.errors import BothwaysError, ConfigError, DataError, argument, optional
from bothways.core.files import is_url, local_path
from bothways.data.tables import HUB, RowError, without_revision
from bothways.data.text_io import file_at, is_stream, matching_files
from bothways.hub.provenance import digest_of_model
from bothways.prediction import engine
from bothways.prediction.predictor import Predictor, named_columns, open_task, open_task_model
from bothways.prediction.prepared_model import PredictPrecision
from bothways.prediction.session_model import Runtime
from bothways.tasks.base import Reading, Task
from bothways.tasks.columns import require_columns
from bothways.tasks.sentence_embedding.quantized import VectorType, quantize
from bothways.tasks.sentence_embedding.task import SentenceEmbeddingTask
from bothways.tasks.tagging.task import TaggingTask
from bothways.tasks.text_task import TextColumns

PartFormat = Literal["jsonl", "spans", "parquet", "npy"]

ROWS = 4096
"""Rows of a part by default: as many as the engine sorts by length together."""


@dataclass(frozen=True)
class BulkRequest:
    """Predictions for all rows of files.

    Attributes:
        model: a model folder, the folder of a run, or a Hub id; readable by every worker.
        files: names of files, or of Hub data sets.
        task, length, precision, device, runtime: as in `open_task`.
        settings: of the task, by dotted path.
        text, text_b: columns of the texts; None as in training.
        top: how many labels keep their probability; None for all.
        keep: columns that are copied from the input to the output; "old=new" renames one.
        form: of a part; None: .npy for vectors without columns to keep, Parquet if all files are,
            else JSON lines. "spans": JSON lines of texts with entities as character spans.
        rows: of a part; the last part of a file has fewer.
        vectors, ranges: the type of vectors, and the ranges of int8 and uint8; see `quantize`.
        rejects: whether rows that cannot be read or predicted are written to a file of their own;
            without it, the first one ends the work.
    """

    model: str
    files: tuple[str, ...]
    task: str | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
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
    vectors: VectorType = "float32"
    ranges: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        require_at_least(1, rows=self.rows, top=self.top)
        for name in self.files:
            if not name.startswith(HUB) and not is_stream(name):
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
            settings=nest(self.settings),
        )

    def finish(self, predictions: Many[Any]) -> list[Any]:
        """Return predictions with vectors of the type that is asked for."""
        if self.vectors == "float32":
            return [*predictions]
        ranges = None if self.ranges is None else np.array(self.ranges, np.float32)
        return [
            dataclasses.replace(one, vectors=quantize(one.vectors, self.vectors, ranges))
            for one in predictions
        ]

    def read_task(self) -> Task[Any, Any]:
        """Return the task alone, for a process that computes nothing."""
        if self.runtime != "torch":
            return self.open().task_model.task
        return open_task_model(
            self.model, self.task, length=self.length, device="cpu", settings=nest(self.settings)
        ).task

    def columns(self, task: Task[Any, Any]) -> Any:
        """Return the columns that are named, see `named_columns`."""
        return named_columns(task, text=self.text, text_b=self.text_b)

    def with_form(self, task: Task[Any, Any]) -> BulkRequest:
        """Return the request with the format of the parts, the usual one if none is named.

        Raises:
            ConfigError: .npy holds neither predictions other than vectors nor columns.
        """
        vectors = isinstance(task, SentenceEmbeddingTask)
        check_format(self.form, task)
        self.check_vectors(task)
        if self.form == "npy" and not vectors:
            message = f"npy holds vectors, and the task is {task.name!r}"
            raise ConfigError(message, where="format", fix="Choose jsonl or parquet.")
        if self.form == "npy" and self.keep:
            message = "npy holds no columns to keep"
            raise ConfigError(message, where="format", fix="Choose parquet or jsonl.")
        # Tables stay tables, vectors are an array unless columns are kept next to them.
        form: PartFormat = "npy" if vectors and not self.keep else "jsonl"
        if all(name.endswith(".parquet") for name in self.files) or (vectors and self.keep):
            form = "parquet"
        return dataclasses.replace(self, form=self.form or form)

    def check_vectors(self, task: Task[Any, Any]) -> None:
        """Raise ConfigError for a type of vectors without ranges, or of a task without vectors."""
        where, fix = "output_dtype", "Leave it out."
        if self.vectors != "float32" and not isinstance(task, SentenceEmbeddingTask):
            message = f"is for vectors, and the task is {task.name!r}"
            raise ConfigError(message, where=where, fix=fix)
        if (self.vectors in ("int8", "uint8")) != (self.ranges is not None):
            message = f"{self.vectors} takes no calibration"
            if self.ranges is None:
                message = f"{self.vectors} needs the range of each component"
                fix = f"Name vectors of some texts: {argument(calibration='vectors.npy')}."
            raise ConfigError(message, where=where, fix=fix)

    def record(self) -> dict[str, Any]:
        """Return the settings that decide the output, as plain values."""
        values = dataclasses.asdict(self)
        values["keep"] = [*self.keep]
        values["settings"] = json.loads(json.dumps(values["settings"], default=str))
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


def expand_patterns(names: Iterable[str]) -> Iterator[str]:
    """Yield names of files; a glob in quotes yields the files that match."""
    for name in names:
        if not glob.has_magic(name) or is_url(name) or os.path.exists(local_path(name)):
            yield name
        else:
            yield from map(str, matching_files(name))


KEEP_FIX = f"Name columns of the input: {argument(keep='NAME')}."


@dataclass(frozen=True)
class BulkRow:
    """An example, with the values of the columns to keep."""

    example: Any
    kept: tuple[Any, ...] = ()


@dataclass(frozen=True)
class RejectedRow:
    """A row without a prediction: its place, and the error."""

    where: str
    error: str

    @classmethod
    def of(cls, error: BothwaysError, location: str) -> RejectedRow:
        """Return the row that has this error."""
        return cls(str(error.where or location), error.what)


@dataclass(frozen=True)
class PartJob:
    """A part to predict.

    Attributes:
        file, part: its numbers: of the file, and in the file.
        rows: up to `BulkRequest.rows` of them.
        rejected: those that could not be read.
        digest: of the rows and their kept values.
        share: of the file that it is.
        types: the Arrow types of the kept columns; None where no Parquet is written.
    """

    file: int
    part: int
    rows: tuple[BulkRow, ...]
    rejected: tuple[RejectedRow, ...]
    digest: str
    share: float
    types: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class PartMarker:
    """Record of a finished part.

    Attributes:
        digest, share: see `PartJob`.
        size: of the part's file in bytes; None without a row.
        rows, rejected: rows with and without a prediction.
        cut, blank: see `PredictionCounts`.
    """

    digest: str
    share: float
    size: int | None
    rows: int
    rejected: int
    cut: int
    blank: int


@dataclass(frozen=True)
class PartResult:
    """A computed part: its numbers, its record, the bytes of its file, and rows that it lacks."""

    file: int
    part: int
    marker: PartMarker
    content: bytes | None
    rejected: tuple[RejectedRow, ...]


@dataclass
class FileReader:
    """Reads the parts of a file.

    Attributes:
        columns: what is read, once the file is open.
        parts: those read so far.
    """

    request: BulkRequest
    task: Task[Any, Any]
    number: int
    columns: object = None
    parts: int = 0
    _rejected: list[RejectedRow] = field(default_factory=list)

    def read(self) -> Iterator[PartJob]:
        """Yield the parts in order, without types.

        Raises:
            DataError: the file cannot be read, or a row without `rejects`.
            ConfigError: a column to keep, of a file that has no columns.
        """
        request, name = self.request, self.request.files[self.number]
        if _is_empty(name):
            return
        reading = self.task.read(name, request.columns(self.task), labelled=False)
        self.columns = getattr(reading.task, "columns", None)
        self._check_one_text(name)
        rows, start = self._rows(reading, name), 0.0
        while True:
            chunk = tuple(itertools.islice(rows, request.rows))
            if not chunk and not self._rejected:
                return
            end = 1.0 if reading.share is None else reading.share()
            rejected, self._rejected = tuple(self._rejected), []
            # A data set may be named with its revision when the work is continued.
            text = repr((chunk, rejected)).replace(name, without_revision(name))
            key = hashlib.sha256(text.encode(errors="backslashreplace"))
            self.parts += 1
            yield PartJob(
                self.number, self.parts - 1, chunk, rejected, key.hexdigest(), end - start
            )
            start = end

    def _check_one_text(self, name: str) -> None:
        """Refuse pairs of texts where a row has room for one vector: the second would be lost."""
        columns = self.columns
        vectors = self.request.form in ("npy", "parquet") and self.task.name == "embed"
        if vectors and isinstance(columns, TextColumns) and columns.text_b is not None:
            texts = f"{columns.text!r} and {columns.text_b!r}"
            message = f"has two texts a row, {texts}, and one is embedded"
            raise DataError(message, where=name, fix=f"Name one: {argument(text='NAME')}.")

    def _rows(self, reading: Reading[Any], name: str) -> Iterator[BulkRow]:
        old = [column for column, _ in self.request.kept]
        table, parse = reading.table, reading.parse
        if table is None or parse is None:
            if old or self.request.rejects:
                raise _no_table("keep" if old else "rejects", name)
            yield from (BulkRow(example) for example in reading.examples)
            return
        require_columns(old, table.names, name, KEEP_FIX)
        while True:
            try:
                row = next(table.rows, None)
            except RowError as error:  # any other error is one of the whole file
                self._reject(error, name)
                continue
            if row is None:
                return
            try:
                example = parse(row)
            except DataError as error:
                self._reject(error, row.where)
                continue
            yield BulkRow(example, tuple(row.values.get(column) for column in old))

    def _reject(self, error: DataError, location: str) -> None:
        if not self.request.rejects:
            raise error
        self._rejected.append(RejectedRow.of(error, location))


def _is_empty(name: str) -> bool:
    """Return True for a file without a row, as engines write for empty partitions."""
    if name.startswith(HUB):
        return False
    path = file_at(name)
    if path.suffix != ".parquet":
        return path.is_file() and path.stat().st_size == 0
    with optional("data", "reading Parquet files"):
        import pyarrow
        from pyarrow import parquet
    try:
        return not parquet.read_metadata(path).num_rows
    except (pyarrow.ArrowException, OSError):  # reported when it is read
        return False


def _no_table(option: str, name: str) -> ConfigError:
    message = f"{name} is not a table with columns that can be read row by row"
    return ConfigError(message, where=option, fix=f"Leave {option} out.")


def predict_kept(
    opened: Predictor,
    reading: Reading[Any],
    keep: tuple[str, ...],
    config: engine.PredictConfig = engine.DEFAULT_PREDICT,
    counts: engine.PredictionCounts | None = None,
) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield the values of columns to keep and the prediction of each row, in order.

    Args:
        keep: columns as `BulkRequest.keep`.

    Raises:
        ConfigError: the reading has no columns.
        DataError: it lacks one, or a row cannot be read.
    """
    if not keep:
        pairs = opened.predict_examples(reading, config, counts)
        yield from (({}, prediction) for _, prediction in pairs)
        return
    columns, table, parse = kept_columns(keep), reading.table, reading.parse
    if table is None or parse is None:
        raise _no_table("keep", "the input")
    require_columns([old for old, _ in columns], table.names, table.where, KEEP_FIX)
    waiting = collections.deque[dict[str, Any]]()  # of rows that are read, a window ahead

    def examples() -> Iterator[Any]:
        for row in table.rows:
            waiting.append({new: row.values.get(old) for old, new in columns})
            yield parse(row)

    for _, prediction in engine.predict(opened.task_model, examples(), config, counts):
        yield waiting.popleft(), prediction
