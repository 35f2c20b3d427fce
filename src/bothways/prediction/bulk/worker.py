"""A worker: opens the model once and predicts parts, whose files it returns as bytes.

A part is JSON lines, a Parquet file or an array of vectors.
"""

from __future__ import annotations

import functools
import io
import json
import math
import os
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from typing_extensions import assert_never

from bothways.core.errors import BothwaysError, ConfigError, DataError, argument, optional
from bothways.core.jobs.process_pool import NUMBER
from bothways.prediction import engine
from bothways.prediction.bulk import parts
from bothways.prediction.predictor import Predictor
from bothways.tasks.base import EncodedExample, TaskModel
from bothways.tasks.predictions import VectorPrediction
from bothways.tasks.schemas import arrow_fields

_AS_LINES = f"Write JSON lines: {argument(format='jsonl')}"


def prediction_values(
    prediction: Any, top: int | None, form: parts.PartFormat = "jsonl"
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
    form: parts.PartFormat,
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
        DataError: a kept value does not fit its type.
    """
    match form:
        case "npy":
            stream = io.BytesIO()
            np.save(
                stream,
                np.stack([prediction.vectors[0] for prediction in predictions]),
            )
            return stream.getvalue()
        case "jsonl" | "spans":
            rows = [prediction_values(prediction, top, form) for prediction in predictions]
            lines = []
            for number, row in enumerate(rows):
                row_columns = {name: values[number] for name, values in columns.items()}
                values = kept_values(row_columns, row)
                lines.append(json.dumps(values, ensure_ascii=False, allow_nan=False))
            return ("\n".join(lines) + "\n").encode(errors="replace")
        case "parquet":
            return _parquet(predictions, top, columns, types or ())
        case _:
            assert_never(form)


def kept_values(columns: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """Return the values of kept columns, as JSON has them, followed by those of a prediction.

    Raises:
        ConfigError: a kept column has the name of a field of the prediction.
    """
    _check_names(columns, row)
    return {name: _plain(value) for name, value in columns.items()} | row


def _check_names(columns: dict[str, Any], row: dict[str, Any]) -> None:
    for name in columns:
        if name in row:
            message = f"{name!r} is also a field of the prediction"
            raise ConfigError(
                message, where="keep", fix=f"Rename it: {argument(keep=f'{name}=given_{name}')}"
            )


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
    """Return the Arrow types of columns, by the values of the first part.

    Raises:
        DataError: the values of a column have no type in common.
    """
    with optional("data", "writing Parquet files"):
        import pyarrow

    types = []
    for name, values in zip(names, zip(*rows, strict=True), strict=True):
        try:
            kind = pyarrow.array(values).type
        except (pyarrow.ArrowException, OverflowError, UnicodeEncodeError) as error:
            message = f"the values of {name!r} have no type of Parquet in common ({error})"
            raise DataError(message, where=location, fix=_AS_LINES) from error
        types.append(pyarrow.string() if pyarrow.types.is_null(kind) else kind)
    return tuple(types)


def file_types(name: str, columns: Many[str]) -> tuple[Any, ...]:
    """Return the Arrow types of columns of a Parquet file."""
    from pyarrow import parquet

    schema = parquet.read_schema(name)
    return tuple(schema.field(column).type for column in columns)


def fits_type(value: Any, kind: Any) -> bool:
    """Return True if a value can be written as this Arrow type."""
    import pyarrow

    try:
        pyarrow.scalar(value, kind)
    except (pyarrow.ArrowException, OverflowError, UnicodeEncodeError):  # half of a surrogate pair
        return False
    return True


def _parquet(
    predictions: Many[Any], top: int | None, columns: dict[str, list[Any]], types: tuple[Any, ...]
) -> bytes:
    with optional("data", "writing Parquet files"):
        import pyarrow
        from pyarrow import parquet

    arrays = {
        name: pyarrow.array(values, kind)
        for (name, values), kind in zip(columns.items(), types, strict=True)
    }
    if isinstance(predictions[0], VectorPrediction) and len(predictions[0].vectors) == 1:
        vectors = np.stack([prediction.vectors[0] for prediction in predictions])
        flat, width = pyarrow.array(vectors.reshape(-1)), vectors.shape[1]
        predicted = {"vector": pyarrow.FixedSizeListArray.from_arrays(flat, width)}
    else:
        rows = [prediction_values(prediction, top) for prediction in predictions]
        fields = _fields(type(predictions[0]))
        predicted = {
            name: pyarrow.array([_arrow_value(row.get(name), kind) for row in rows], kind)
            for name, kind in fields.items()
            if name in rows[0]  # a field that a model does not have is absent from all its rows
        }
    _check_names(columns, predicted)
    stream = io.BytesIO()
    parquet.write_table(pyarrow.table(arrays | predicted), stream)
    return stream.getvalue()


def _arrow_value(value: Any, kind: Any) -> Any:
    """Return a value of `to_json` as its Arrow type takes it."""
    import pyarrow

    if pyarrow.types.is_map(kind):
        return [*value.items()]
    if pyarrow.types.is_list(kind) and pyarrow.types.is_struct(kind.value_type):
        names = [kind.value_type.field(at).name for at in range(kind.value_type.num_fields)]
        return value and [
            item if isinstance(item, dict) else dict(zip(names, item, strict=True))
            for item in value
        ]
    return value


def _fields(prediction: type) -> dict[str, Any]:
    """Return the Arrow types of a prediction's fields: the same in every part.

    Raises:
        ConfigError: it has none, such as that of two vectors.
    """
    try:
        return arrow_fields(prediction)
    except TypeError as error:
        message = f"Parquet has no columns for {prediction.__name__}"
        raise ConfigError(message, where="format", fix=_AS_LINES) from error


@dataclass(frozen=True)
class PartWorker:
    """Predicts parts. It pickles as long as it has predicted none.

    Attributes:
        threads: of a process; None leaves them as they are.
        given: the predictor, in a process that has opened it.
    """

    request: parts.BulkRequest
    threads: int | None = None
    given: Predictor | None = None

    @functools.cached_property
    def opened(self) -> Predictor:
        """The predictor, opened at the first part."""
        if self.given is not None:
            return self.given
        import torch

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return self.request.open(_device(self.request.device))

    def __call__(
        self, job: parts.PartJob, on_share: Callable[[float], object] = lambda share: None
    ) -> parts.PartResult | BothwaysError:
        """Return the part's content, or the error that ends the work.

        Args:
            on_share: called after each batch with the share of the part that is done.
        """
        try:
            return self._predict(job, on_share)
        except BothwaysError as error:
            return error

    def _predict(self, job: parts.PartJob, on_share: Callable[[float], object]) -> parts.PartResult:
        task_model, rejects, done = self.opened.task_model, _Rejects(self.request.rejects), 0
        rows = [row for row in job.rows if self._fits(row, job, rejects)]
        counts, predictions = engine.PredictionCounts(), list[Any]()
        columns_by_row: list[tuple[Any, ...]] = []
        size = min(engine.DEFAULT_PREDICT.window, task_model.task.window)
        for window in engine.grouped(rows, size, lambda row: task_model.task.shared(row.example)):
            readable, encoded = _encode(task_model, window, rejects)
            examples = [row.example for row in readable]
            counts.add(map(task_model.task.texts, examples), encoded)
            offset, size_share = done / len(rows), len(window) / len(rows)
            pairs = engine.predict_encoded(
                task_model, examples, encoded,
                on_share=lambda share, a=offset, b=size_share: on_share(a + share * b),
            )  # fmt: skip
            predictions += self.request.finish([prediction for _, prediction in pairs])
            columns_by_row += [row.kept for row in readable]
            done += len(window)
        content = None
        if predictions:
            names = [new for _, new in self.request.kept]
            columns = {
                name: [values[at] for values in columns_by_row] for at, name in enumerate(names)
            }
            content = part_content(
                self.request.form or "jsonl", predictions, self.request.top, columns, job.types
            )
        rejected = (*job.rejected, *rejects.rows)
        marker = parts.PartMarker(
            job.digest, job.share, None if content is None else len(content),
            len(predictions), len(rejected), counts.cut, counts.blank,
        )  # fmt: skip
        return parts.PartResult(job.file, job.part, marker, content, rejected)

    def _fits(self, row: parts.BulkRow, job: parts.PartJob, rejects: _Rejects) -> bool:
        """Return True if the kept values fit their columns; else reject the row."""
        if not job.types:
            return True
        for (name, _), value, kind in zip(self.request.kept, row.kept, job.types, strict=True):
            if not fits_type(value, kind):
                message = f"{name!r} is {value!r}, not of the type {kind} of the first rows"
                where = str(getattr(row.example, "where", "a row"))
                fix = f"Write JSON lines ({argument(format='jsonl')}), or correct the row."
                rejects.add(DataError(message, where=where, fix=fix), row)
                return False
        return True


@dataclass
class _Rejects:
    allowed: bool
    rows: list[parts.RejectedRow] = field(default_factory=list)

    def add(self, error: BothwaysError, row: parts.BulkRow) -> None:
        """Note a row, or raise its error if rejecting was not asked for."""
        if not self.allowed:
            raise error
        self.rows.append(parts.RejectedRow.of(error, str(getattr(row.example, "where", "a row"))))


def _encode(
    task_model: TaskModel[Any, Any], rows: list[parts.BulkRow], rejects: _Rejects
) -> tuple[list[parts.BulkRow], list[EncodedExample]]:
    """Return the rows that can be encoded, and their encoded forms."""
    try:
        return rows, [*task_model.encode([row.example for row in rows])]
    except DataError:
        if not rejects.allowed:
            raise
    # One of the rows cannot be encoded: one by one shows which.
    readable, encoded = list[parts.BulkRow](), list[EncodedExample]()
    for row in rows:
        try:
            encoded += task_model.encode([row.example])
            readable.append(row)
        except DataError as error:
            rejects.add(error, row)
    return readable, encoded


def _device(name: str) -> str:
    """Return the device of this worker: of several GPUs, the one with its number."""
    import torch

    number, devices = os.environ.get(NUMBER), torch.cuda.device_count()
    if number is None or devices < 2 or name not in ("auto", "cuda"):
        return name
    return f"cuda:{int(number) % devices}"
