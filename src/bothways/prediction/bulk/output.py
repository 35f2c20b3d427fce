"""The content of a part: JSON lines, a Parquet file or an array of vectors, as bytes."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
from typing_extensions import assert_never

from bothways.core.advice import argument
from bothways.core.errors import ConfigError, DataError, optional
from bothways.prediction.bulk.request import PartFormat
from bothways.tasks.predictions import VectorPrediction
from bothways.tasks.schemas import arrow_fields

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
        DataError: a kept value does not fit its type.
    """
    match form:
        case "npy":
            stream = io.BytesIO()
            np.save(
                stream,
                np.stack([prediction.vectors[0] for prediction in predictions]).astype("<f4"),
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
