"""A worker: opens the model once and predicts parts, whose files it returns as bytes.

A part is JSON lines, a Parquet file or an array of vectors.
"""

from __future__ import annotations

import functools
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence as Many
from dataclasses import dataclass
from typing import Any

import numpy as np

from bothways.core.errors import BothwaysError, ConfigError, DataError, argument, optional
from bothways.core.jobs.process_pool import NUMBER
from bothways.prediction import engine
from bothways.prediction.bulk import parts
from bothways.prediction.predictor import Predictor
from bothways.tasks.base import EncodedExample
from bothways.tasks.predictions import VectorPrediction, arrow_fields

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
    """Return the Arrow types of columns: those of a Parquet file, or by the values of some rows.

    Raises:
        DataError: the values of a column have no type in common.
    """
    with optional("data", "writing Parquet files"):
        import pyarrow
        from pyarrow import parquet
    if location.endswith(".parquet"):
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
        try:
            fields = arrow_fields(type(predictions[0]))
        except TypeError as error:
            message = f"Parquet has no columns for {type(predictions[0]).__name__}"
            raise ConfigError(message, where="format", fix=_AS_LINES) from error
        predicted = {}
        for name, kind in fields.items():
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
        given: the predictor, in a process that has opened it.
    """

    request: parts.BulkRequest
    threads: int | None = None
    given: Predictor | None = None

    @functools.cached_property
    def opened(self) -> Predictor:
        """The predictor, opened at the first part; of several GPUs on the one with its number."""
        if self.given is not None:
            return self.given
        import torch

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        device, number = self.request.device, os.environ.get(NUMBER)
        if number is not None and device in ("auto", "cuda") and torch.cuda.device_count() > 1:
            device = f"cuda:{int(number) % torch.cuda.device_count()}"
        return self.request.open(device)

    def __call__(
        self, job: parts.PartJob, on_share: Callable[[float], object] = lambda share: None
    ) -> parts.PartResult | BothwaysError:
        """Return the part's content, or the error that ends the work.

        Args:
            on_share: called after each batch with the share of the part that is done.
        """
        request, rejects = self.request, parts.Rejects(self.request.rejects)
        counts = engine.PredictionCounts(on_count=lambda count: on_share(count / len(job.rows)))
        try:
            rows = (row for row in job.rows if self._fits(row, job, rejects))
            pairs = [*predict_kept(self.opened, request, rows, counts, rejects)]
            content = None
            if pairs:
                columns = {
                    new: [row.kept[at] for row, _ in pairs]
                    for at, (_, new) in enumerate(request.kept)
                }
                predictions = [prediction for _, prediction in pairs]
                content = part_content(
                    request.form or "jsonl", predictions, request.top, columns, job.types
                )
        except BothwaysError as error:
            return error
        rejected = (*job.rejected, *rejects.rows)
        marker = parts.PartMarker(
            job.digest, job.share, None if content is None else len(content),
            len(pairs), len(rejected), counts.cut, counts.blank,
        )  # fmt: skip
        return parts.PartResult(job.file, job.part, marker, content, rejected)

    def _fits(self, row: parts.BulkRow, job: parts.PartJob, rejects: parts.Rejects) -> bool:
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
    request: parts.BulkRequest,
    rows: Iterable[parts.BulkRow],
    counts: engine.PredictionCounts,
    rejects: parts.Rejects,
    config: engine.PredictConfig = engine.DEFAULT_PREDICT,
) -> Iterator[tuple[parts.BulkRow, Any]]:
    """Yield the rows that can be encoded with their predictions, in order, window by window.

    Raises:
        DataError: a row cannot be encoded, and rejects are refused.
    """
    task_model, task = opened.task_model, opened.task_model.task
    size = engine.window_size(task, task_model.labels, config)
    for window in engine.grouped(rows, size, lambda row: task.shared(row.example)):
        readable, encoded = window, list[EncodedExample]()
        try:
            encoded += task_model.encode([row.example for row in window])
        except DataError:
            if not rejects.allowed:
                raise
            readable = []
            for row in window:  # one by one shows which cannot be encoded
                try:
                    encoded += task_model.encode([row.example])
                    readable.append(row)
                except DataError as error:
                    rejects.add(error, _location(row.example))
        examples = [row.example for row in readable]
        counts.add(map(task.texts, examples), encoded)
        pairs = engine.predict_encoded(task_model, examples, encoded, config, counts.note)
        predictions = request.finish([prediction for _, prediction in pairs])
        yield from zip(readable, predictions, strict=True)


def _location(example: Any) -> str:
    """Return the place of an example, for messages."""
    return str(getattr(example, "where", "a row"))
