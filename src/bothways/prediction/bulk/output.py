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
    kept: dict[str, list[Any]],
    types: tuple[Any, ...] | None,
) -> bytes:
    """Return the bytes of a part's file; there is at least one prediction.

    Args:
        kept: columns that precede the prediction's own.
        types: their Arrow types, for Parquet.

    Raises:
        ConfigError: a kept column has the name of a field of the prediction.
        DataError: a kept value does not fit its type.
    """
    match form:
        case "npy":
            stream = io.BytesIO()
            np.save(stream, np.stack([each.vectors[0] for each in predictions]).astype("<f4"))
            return stream.getvalue()
        case "jsonl" | "spans":
            rows = [prediction_values(each, top, form) for each in predictions]
            lines = []
            for number, row in enumerate(rows):
                own = {name: values[number] for name, values in kept.items()}
                values = kept_values(own, row)
                lines.append(json.dumps(values, ensure_ascii=False, allow_nan=False))
            return ("\n".join(lines) + "\n").encode(errors="replace")
        case "parquet":
            return _parquet(predictions, top, kept, types or ())
        case _:
            assert_never(form)


def kept_values(kept: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """Return the values of kept columns, as JSON has them, followed by those of a prediction.

    Raises:
        ConfigError: a kept column has the name of a field of the prediction.
    """
    _check_names(kept, row)
    return {name: _plain(value) for name, value in kept.items()} | row


def _check_names(kept: dict[str, Any], row: dict[str, Any]) -> None:
    for name in kept:
        if name in row:
            what = f"{name!r} is also a field of the prediction"
            raise ConfigError(
                what, where="keep", fix=f"Rename it: {argument(keep=f'{name}=given_{name}')}"
            )


def _plain(value: Any) -> Any:
    """Return a value of a table as JSON has it: a date as text, a NaN as null."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case None | bool() | int() | str():
            return value
        case dict():
            return {str(name): _plain(each) for name, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
        case bytes():
            return value.hex()
        case _:
            return str(value)


def column_types(kept: Many[Many[Any]], names: Many[str], where: str) -> tuple[Any, ...]:
    """Return the Arrow types of columns, by the values of the first part.

    Raises:
        DataError: the values of a column have no type in common.
    """
    with optional("data", "writing Parquet files"):
        import pyarrow

    found = []
    for name, values in zip(names, zip(*kept, strict=True), strict=True):
        try:
            kind = pyarrow.array(values).type
        except (pyarrow.ArrowException, OverflowError, UnicodeEncodeError) as error:
            what = f"the values of {name!r} have no type of Parquet in common ({error})"
            raise DataError(what, where=where, fix=_AS_LINES) from error
        found.append(pyarrow.string() if pyarrow.types.is_null(kind) else kind)
    return tuple(found)


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
    predictions: Many[Any], top: int | None, kept: dict[str, list[Any]], types: tuple[Any, ...]
) -> bytes:
    with optional("data", "writing Parquet files"):
        import pyarrow
        from pyarrow import parquet

    arrays = {
        name: pyarrow.array(values, kind)
        for (name, values), kind in zip(kept.items(), types, strict=True)
    }
    if isinstance(predictions[0], VectorPrediction) and len(predictions[0].vectors) == 1:
        own = {"vector": _vectors(predictions)}
    else:
        rows = [prediction_values(each, top) for each in predictions]
        fields = _fields(type(predictions[0]))
        own = {
            name: pyarrow.array([_arrow_value(row.get(name), kind) for row in rows], kind)
            for name, kind in fields.items()
        }
    _check_names(kept, own)
    stream = io.BytesIO()
    parquet.write_table(pyarrow.table(arrays | own), stream)
    return stream.getvalue()


def _vectors(predictions: Many[VectorPrediction]) -> Any:
    import pyarrow

    rows = np.stack([each.vectors[0] for each in predictions])
    return pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(rows.reshape(-1)), rows.shape[1])


def _arrow_value(value: Any, kind: Any) -> Any:
    """Return a value of `to_json` as its Arrow type takes it."""
    import pyarrow

    if pyarrow.types.is_map(kind):
        return [*value.items()]
    if pyarrow.types.is_list(kind) and pyarrow.types.is_struct(kind.value_type):
        names = [kind.value_type.field(at).name for at in range(kind.value_type.num_fields)]
        return value and [
            each if isinstance(each, dict) else dict(zip(names, each, strict=True))
            for each in value
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
        what = f"Parquet has no columns for {prediction.__name__}"
        raise ConfigError(what, where="format", fix=_AS_LINES) from error
