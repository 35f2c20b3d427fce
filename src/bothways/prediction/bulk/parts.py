"""A request for the predictions of files, the parts that their rows make, and what computes one.

Each part has the key by which it is known again. Its file is JSON lines, a Parquet file or an array
of vectors. A worker opens the model once, and returns the files of parts as bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import hashlib
import io
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence as Many
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bothways.core.config.values import require_at_least, require_choice
from bothways.core.errors import BothwaysError, ConfigError, DataError, argument, call, optional
from bothways.core.files import is_url, local_path
from bothways.core.jobs.process_pool import NUMBER
from bothways.core.progress import Progress
from bothways.data.tables import HUB, RowError, without_revision
from bothways.data.text_io import file_at, is_stream, matching_files
from bothways.hub.provenance import digest_of_model
from bothways.prediction import PartFormat, PredictPrecision, Runtime, engine
from bothways.prediction.opening import open_task, open_task_model
from bothways.prediction.predictor import Predictor, named_columns
from bothways.tasks.base import EncodedExample, Reading, Task
from bothways.tasks.columns import guess_note, require_columns
from bothways.tasks.predictions import CUT_TO_TOP, VectorPrediction, arrow_fields, prediction_type
from bothways.tasks.sentence_embedding.vectors import VectorType, quantize
from bothways.tasks.tagging.task import TaggingTask
from bothways.tasks.text_task import TextColumns

TEXTS = f"texts that are no file go to {call('predict', 'MODEL')}."
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
        table = self.form in ("csv", "tsv")
        fix = f"Name a file instead: {argument(out=f'FILE.{self.form}')}" if table else None
        require_choice(PartFormat, "format", self.form, fix=fix)
        for name in self.files:
            if not name.startswith(HUB) and not is_stream(name):
                advice = "Check the name." if Path(name).suffix else f"Check the name; {TEXTS}"
                file_at(name, advice)
        new = [name for _, name in self.kept]
        if len({*new}) < len(new):
            message = f"names a column twice: {', '.join(new)}"
            fix = f"Rename one, such as {argument(keep='old=new')}."
            raise ConfigError(message, where="keep", fix=fix)

    @property
    def kept(self) -> list[tuple[str, str]]:
        """The columns to copy: their names in the input and in the output."""
        return [(old, new or old) for old, _, new in (name.partition("=") for name in self.keep)]

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
        """Return the columns that are named, see `named_columns`."""
        return named_columns(task, text=self.text, text_b=self.text_b)

    def with_form(self, task: Task[Any, Any]) -> BulkRequest:
        """Return the request with the format of the parts, the usual one if none is named.

        Raises:
            ConfigError: the task, or a column to keep, has no place in this format or this type of
                vectors; the task has no labels or documents of which the best could be kept.
        """
        vectors, ranged = task.name == "embed", self.vectors in ("int8", "uint8")
        choose, drop, dtype = "Choose jsonl or parquet.", "Leave it out.", "output_dtype"
        has = f"and the task is {task.name!r}"
        ranges = f"Name vectors of some texts: {argument(calibration='vectors.npy')}."
        for is_fault, where, message, fix in (
            (self.form == "spans" and not isinstance(task, TaggingTask),
             "format", f"spans are of the task 'tag', {has}", choose),
            (self.form == "npy" and not vectors, "format", f"npy holds vectors, {has}", choose),
            (self.form == "npy" and self.keep, "format", "npy holds no columns to keep", choose),
            (self.top is not None and not issubclass(prediction_type(task), CUT_TO_TOP),
             None, f"{argument(best=self.top or 0)} keeps the best labels or documents, {has}",
             "Write it as a setting, top=3." if hasattr(task, "top") else drop),
            (self.vectors != "float32" and not vectors, dtype, f"is for vectors, {has}", drop),
            (ranged and self.ranges is None,
             dtype, f"{self.vectors} needs the range of each component", ranges),
            (self.ranges and not ranged, dtype, f"{self.vectors} takes no calibration", drop),
        ):  # fmt: skip
            if is_fault:
                raise ConfigError(message, where=where, fix=fix)
        # Tables stay tables, vectors are an array unless columns are kept next to them.
        form: PartFormat = "npy" if vectors and not self.keep else "jsonl"
        if all(name.lower().endswith(".parquet") for name in self.files) or (vectors and self.keep):
            form = "parquet"
        return dataclasses.replace(self, form=self.form or form)

    def record(self) -> dict[str, Any]:
        """Return the settings that decide the output, as plain values."""
        values = dataclasses.asdict(self)
        values["files"] = [*map(without_revision, self.files)]  # the commit is noted apart from it
        del values["device"]
        values["sha256 of the model"] = digest_of_model(self.model)
        plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
        return plain


def expand_patterns(names: Iterable[str]) -> Iterator[str]:
    """Yield names of files; a glob in quotes yields the files that match."""
    for name in names:
        if not glob.has_magic(name) or is_url(name) or os.path.exists(local_path(name)):
            yield name
        else:
            try:
                yield from map(str, matching_files(name))
            except DataError as error:  # "Is it good?" looks like a pattern
                fix = f"Check the pattern, in which ** matches folders; {TEXTS}"
                raise DataError(error.what, where=name, fix=fix) from None


class BulkRow(NamedTuple):
    """An example, with the values of the columns to keep."""

    example: Any
    kept: tuple[Any, ...] = ()


class RejectedRow(NamedTuple):
    """A row without a prediction: its place, and the error."""

    where: str
    error: str


@dataclass
class Rejects:
    """Rows without a prediction, if they are allowed."""

    allowed: bool
    rows: list[RejectedRow] = field(default_factory=list)

    def add(self, error: BothwaysError, location: str) -> None:
        """Note a row, or raise its error if rejecting was not asked for."""
        if not self.allowed:
            raise error
        self.rows.append(RejectedRow(str(error.where or location), error.what))


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
    """A computed part: its numbers, its record, the bytes of its file, and rows that it lacks.

    `precision` is the one in which it was computed.
    """

    file: int
    part: int
    marker: PartMarker
    content: bytes | None
    rejected: tuple[RejectedRow, ...]
    precision: str


def read_parts(
    request: BulkRequest, task: Task[Any, Any], number: int, progress: Progress
) -> Iterator[PartJob]:
    """Yield the parts of a file in order, without types.

    Raises:
        DataError: the file cannot be read or changes meanwhile, or a row without `rejects`.
        ConfigError: a column to keep, of a file that has no columns.
    """
    name = request.files[number]
    status_before = status(name)
    empty = status_before is not None and status_before.st_size == 0
    if status_before is not None and name.lower().endswith(".parquet"):
        with optional("data", "reading Parquet files"):
            import pyarrow
            from pyarrow import parquet
        try:
            empty = not parquet.read_metadata(file_at(name)).num_rows
        except (pyarrow.ArrowException, OSError):  # reported when it is read
            empty = False
    if empty:  # as engines write for empty partitions
        return
    reading = task.read(name, request.columns(task), labelled=False)
    columns = reading.task.columns
    vectors = task.name == "embed" and request.form in ("npy", "parquet")
    if vectors and isinstance(columns, TextColumns) and columns.text_b is not None:
        # A row has room for one vector: the second would be lost.
        texts = f"{columns.text!r} and {columns.text_b!r}"
        message = f"has two texts a row, {texts}, and one is embedded"
        raise DataError(message, where=name, fix=f"Name one: {argument(text='NAME')}.")
    if note := guess_note(name, reading, task, request.columns(task)):
        progress.message(note)
    rejects, start = Rejects(request.rejects), 0.0
    rows = read_bulk_rows(request, reading, name, rejects)
    for part in itertools.count():
        chunk = tuple(itertools.islice(rows, request.rows))
        rejected, rejects.rows = tuple(rejects.rows), []
        if not chunk and not rejected:
            break
        end = 1.0 if reading.share is None else reading.share()
        # A data set may be named with its revision when the work is continued.
        text = repr((chunk, rejected)).replace(name, without_revision(name))
        key = hashlib.sha256(text.encode(errors="backslashreplace"))
        yield PartJob(number, part, chunk, rejected, key.hexdigest(), end - start)
        start = end
    status_after = status(name)
    # One that was replaced has another inode, and was read as it was.
    (old_inode, *old), (new_inode, *new) = (
        (stat.st_ino, stat.st_size, stat.st_mtime_ns) if stat else (None,)
        for stat in (status_before, status_after)
    )
    if old_inode == new_inode and old != new:
        message = "has changed while it was read"
        fix = "Run the same command again: rows that are the same are not predicted again."
        raise DataError(message, where=name, fix=fix)


def read_bulk_rows(
    request: BulkRequest, reading: Reading[Any], name: str, rejects: Rejects
) -> Iterator[BulkRow]:
    """Yield the examples of a source with the values of the columns to keep.

    Raises:
        DataError: a column to keep is missing, or a row cannot be read and rejects are refused.
        ConfigError: the source has no columns to keep.
    """
    old, table, parse = [column for column, _ in request.kept], reading.table, reading.parse
    if table is None or parse is None:
        if old or request.rejects:
            message = f"{name} is not a table with columns that can be read row by row"
            where = "keep" if old else "rejects"
            raise ConfigError(message, where=where, fix=f"Leave {where} out.")
        yield from map(BulkRow, reading.examples)
        return
    require_columns(old, table.names, name, f"Name columns of the input: {argument(keep='NAME')}.")
    with contextlib.closing(table):  # now, not when the traceback of an error is collected
        while True:
            try:
                row = next(table.rows, None)
            except RowError as error:  # any other error is one of the whole file
                rejects.add(error, name)
                continue
            if row is None:
                return
            try:
                example = parse(row)
            except DataError as error:
                rejects.add(error, row.where)
                continue
            yield BulkRow(example, tuple(row.values.get(column) for column in old))


def status(name: str) -> os.stat_result | None:
    """Return the status of a file; None for a pipe or a data set of the Hub."""
    return None if name.startswith(HUB) or is_stream(name) else file_at(name).stat()


_AS_LINES = f"Write JSON lines: {argument(format='jsonl')}"


def prediction_values(
    prediction: Any, top: int | None, form: PartFormat = "jsonl"
) -> dict[str, Any]:
    """Return a prediction as plain values, with the `top` best labels or documents alone.

    Raises:
        ConfigError: the format is "spans", and the tags of the model are not those of entities.
    """
    if form == "spans":
        spans: dict[str, Any] = prediction.to_spans()
        return spans
    values: dict[str, Any] = prediction.to_json()
    if top is not None and isinstance(values.get("probabilities"), dict):
        ranked = sorted(values["probabilities"].items(), key=lambda item: -item[1])
        values["probabilities"] = dict(ranked[:top])
    if "ranking" in values:
        values["ranking"] = values["ranking"][:top]
    return values


def part_content(
    form: PartFormat,
    predictions: Many[Any],
    top: int | None,
    columns: dict[str, list[Any]],
    types: tuple[Any, ...] | None,
) -> bytes:
    """Return the bytes of a part's file; there is at least one prediction.

    Args:
        columns: columns that precede the prediction's own.
        types: their Arrow types, for Parquet.

    Raises:
        ConfigError: a kept column has the name of a field of the prediction.
    """
    if form == "parquet":
        return _parquet(predictions, top, columns, types or ())
    if form == "npy":
        stream = io.BytesIO()
        np.save(stream, np.stack([prediction.vectors[0] for prediction in predictions]))
        return stream.getvalue()
    lines = list[str]()
    for number, prediction in enumerate(predictions):
        kept = {name: values[number] for name, values in columns.items()}
        row = kept_values(kept, prediction_values(prediction, top, form))
        lines.append(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
    return "".join(lines).encode(errors="replace")


def kept_values(columns: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """Return kept values, as JSON has them, and those of a prediction; errors as `part_content`."""
    _check_names(columns, row)
    return {name: _plain(value) for name, value in columns.items()} | row


def _check_names(columns: dict[str, Any], row: dict[str, Any]) -> None:
    for name in columns:
        if name in row:
            message = f"{name!r} is also a field of the prediction"
            fix = f"Rename it: {argument(keep=f'{name}=given_{name}')}"
            raise ConfigError(message, where="keep", fix=fix)


def _plain(value: Any) -> Any:
    """Return a value of a table as JSON has it: a date as text, a NaN as null."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case None | bool() | int() | str():
            return value
        case dict():
            return {str(name): _plain(item) for name, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case bytes():
            return value.hex()
        case _:
            return str(value)


def column_types(rows: Many[Many[Any]], names: Many[str], location: str) -> tuple[Any, ...]:
    """Return the Arrow types of columns, of a Parquet file or of values; DataError without any."""
    with optional("data", "writing Parquet files"):
        import pyarrow
        from pyarrow import parquet
    if location.lower().endswith(".parquet"):
        schema = parquet.read_schema(location)
        return tuple(schema.field(name).type for name in names)
    types = []
    for name, values in zip(names, zip(*rows, strict=True), strict=True):
        try:
            kind = pyarrow.array(values).type
        except (pyarrow.ArrowException, OverflowError, UnicodeEncodeError) as error:
            message = f"the values of {name!r} have no type of Parquet in common ({error})"
            raise DataError(message, where=location, fix=_AS_LINES) from error
        types.append(pyarrow.string() if pyarrow.types.is_null(kind) else kind)
    return tuple(types)


def _parquet(
    predictions: Many[Any], top: int | None, columns: dict[str, list[Any]], types: tuple[Any, ...]
) -> bytes:
    with optional("data", "writing Parquet files"):
        import pyarrow
        from pyarrow import parquet

    pairs = zip(columns.items(), types, strict=True)
    arrays = {name: pyarrow.array(values, kind) for (name, values), kind in pairs}
    if isinstance(predictions[0], VectorPrediction) and len(predictions[0].vectors) == 1:
        vectors = np.stack([prediction.vectors[0] for prediction in predictions])
        flat, width = pyarrow.array(vectors.reshape(-1)), vectors.shape[1]
        predicted = {"vector": pyarrow.FixedSizeListArray.from_arrays(flat, width)}
    else:
        rows = [prediction_values(prediction, top) for prediction in predictions]
        predicted = {}
        for name, kind in arrow_fields(type(predictions[0])).items():
            if name not in rows[0]:  # a field that a model does not have is absent from all rows
                continue
            values: list[Any] = [row.get(name) for row in rows]
            # Arrow takes maps as pairs, and structs as tuples.
            if pyarrow.types.is_map(kind):
                values = [[*mapping.items()] for mapping in values]
            elif pyarrow.types.is_list(kind) and pyarrow.types.is_struct(kind.value_type):
                values = [
                    items and [item if isinstance(item, dict) else tuple(item) for item in items]
                    for items in values
                ]
            predicted[name] = pyarrow.array(values, kind)
    _check_names(columns, predicted)
    stream = io.BytesIO()
    parquet.write_table(pyarrow.table(arrays | predicted), stream)
    return stream.getvalue()


@dataclass(frozen=True)
class PartWorker:
    """Predicts parts. It pickles as long as it has predicted none.

    Attributes:
        threads: of a process; None leaves them as they are.
        predictor: in a process that has opened it.
    """

    request: BulkRequest
    threads: int | None = None
    predictor: Predictor | None = None

    @functools.cached_property
    def opened(self) -> Predictor:
        """The predictor, opened at the first part; of several GPUs on the one with its number."""
        if self.predictor is not None:
            return self.predictor
        import torch

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        device, number = self.request.device, os.environ.get(NUMBER)
        if number is not None and device in ("auto", "cuda") and torch.cuda.device_count() > 1:
            device = f"cuda:{int(number) % torch.cuda.device_count()}"
        return self.request.open(device)

    def __call__(
        self, job: PartJob, on_share: Callable[[float], object] = lambda share: None
    ) -> PartResult | BothwaysError:
        """Return the part's content, or the error that ends the work.

        Args:
            on_share: called after each batch with the share of the part that is done.
        """
        request, rejects = self.request, Rejects(self.request.rejects)
        counts = engine.PredictionCounts(on_count=lambda count: on_share(count / len(job.rows)))
        try:
            rows = (row for row in job.rows if self._fits(row, job, rejects))
            pairs = [*predict_kept(self.opened, request, rows, counts, rejects)]
            content = None
            if pairs:
                names = enumerate(new for _, new in request.kept)
                columns = {name: [row.kept[at] for row, _ in pairs] for at, name in names}
                predictions = [prediction for _, prediction in pairs]
                form = request.form or "jsonl"
                content = part_content(form, predictions, request.top, columns, job.types)
        except BothwaysError as error:
            return error
        rejected = (*job.rejected, *rejects.rows)
        marker = PartMarker(
            job.digest, job.share, None if content is None else len(content),
            len(pairs), len(rejected), counts.cut, counts.blank,
        )  # fmt: skip
        precision = self.opened.precision
        return PartResult(job.file, job.part, marker, content, rejected, precision)

    def _fits(self, row: BulkRow, job: PartJob, rejects: Rejects) -> bool:
        """Return True if the kept values fit their columns; else reject the row."""
        if not job.types:
            return True
        import pyarrow

        for (name, _), value, kind in zip(self.request.kept, row.kept, job.types, strict=True):
            try:
                pyarrow.scalar(value, kind)
            # Half of a surrogate pair is the last of these.
            except (pyarrow.ArrowException, OverflowError, UnicodeEncodeError):
                message = f"{name!r} is {value!r}, not of the type {kind} of the first rows"
                fix = f"Write JSON lines ({argument(format='jsonl')}), or correct the row."
                where = _location(row.example)
                rejects.add(DataError(message, where=where, fix=fix), where)
                return False
        return True


def predict_kept(
    opened: Predictor,
    request: BulkRequest,
    rows: Iterable[BulkRow],
    counts: engine.PredictionCounts,
    rejects: Rejects,
    window: int = engine.WINDOW,
) -> Iterator[tuple[BulkRow, Any]]:
    """Yield the rows that can be encoded with their predictions, in order, window by window.

    Raises:
        DataError: a row cannot be encoded, and rejects are refused.
    """
    task_model, task = opened.task_model, opened.task_model.task
    ranges = None if request.ranges is None else np.array(request.ranges, np.float32)
    size = engine.window_size(task, task_model.labels, window)
    for group in engine.grouped(rows, size, lambda row: task.shared(row.example)):
        readable, encoded = group, list[EncodedExample]()
        try:
            encoded += task_model.encode([row.example for row in group])
        except DataError:
            if not rejects.allowed:
                raise
            readable = []
            for row in group:  # one by one shows which cannot be encoded
                try:
                    encoded += task_model.encode([row.example])
                    readable.append(row)
                except DataError as error:
                    rejects.add(error, _location(row.example))
        examples = [row.example for row in readable]
        counts.add(map(task.texts, examples), encoded)
        pairs = engine.predict_encoded(task_model, examples, encoded, counts.note)
        for row, (_, prediction) in zip(readable, pairs, strict=True):
            if request.vectors == "float32":
                yield row, prediction
            else:
                vectors = quantize(prediction.vectors, request.vectors, ranges)
                yield row, dataclasses.replace(prediction, vectors=vectors)


def _location(example: Any) -> str:
    """Return the place of an example, for messages."""
    return str(getattr(example, "where", "a row"))
