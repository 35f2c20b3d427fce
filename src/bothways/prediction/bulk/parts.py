"""Parts: the rows of files in equal portions, each with the key by which it is known again."""

from __future__ import annotations

import collections
import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bothways.core.advice import argument
from bothways.core.errors import BothwaysError, ConfigError, DataError, optional
from bothways.data.hub_rows import HUB, without_revision
from bothways.data.tables import RowError
from bothways.data.text_io import file_at
from bothways.prediction import engine
from bothways.prediction.bulk.request import BulkRequest, kept_columns
from bothways.prediction.predictor import Predictor
from bothways.tasks.base import Reading, Task
from bothways.tasks.columns import require_columns
from bothways.tasks.text_examples import TextColumns

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
