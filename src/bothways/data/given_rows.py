"""Data that is given in Python: tables of several libraries as rows with named columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from bothways.core.errors import DataError
from bothways.data.hub_rows import class_names, named_classes


@runtime_checkable
class ArrowTable(Protocol):
    """A table or an array of pyarrow, which is not an iterable of rows."""

    def to_pylist(self) -> list[Any]:
        """Return the rows as dicts, or the items."""


Given = Iterable[Any] | ArrowTable
"""Data as `given_rows` takes it."""
FORMS = "a DataFrame, a datasets.Dataset, or a list of dicts"


def given_rows(data: Any, where: str) -> Iterable[Any]:
    """Return the rows of a table as dicts, or the items of another iterable as they are.

    Iterating over a DataFrame or a mapping would give the names of its columns. Missing values
    become None, and the classes of a `datasets.Dataset` their names, as in a Hub data set.

    Args:
        data: a DataFrame of pandas or polars, a table or an array of pyarrow, a `datasets.Dataset`,
            a mapping from columns to their values, or any iterable.
        where: the name of the data, for messages.

    Raises:
        DataError: it is none of these, or its columns differ in length or share a name.
    """
    match data:
        case Mapping():
            return _rows_of_columns(data, where)
        case _ if hasattr(data, "to_dicts") or hasattr(data, "to_pylist"):  # polars, pyarrow
            rows: list[Any] = data.to_dicts() if hasattr(data, "to_dicts") else data.to_pylist()
            return rows
        case _ if hasattr(data, "to_dict") and hasattr(data, "columns"):
            return _rows_of_frame(data, where)
        case bytes() | str():
            pass
        case Iterable():
            features = getattr(data, "features", None)
            classes = class_names(features) if isinstance(features, Mapping) else {}
            return (named_classes(row, classes) for row in data) if classes else data
    fix = "Give a list, a DataFrame or a datasets.Dataset."
    raise DataError(f"is of type {type(data).__name__}, which has no rows", where=where, fix=fix)


def plain_value(value: Any) -> Any:
    """Return numbers and arrays of NumPy, PyTorch or pyarrow as values and lists of Python."""
    if isinstance(value, np.generic | np.ndarray) or hasattr(value, "tolist"):
        return value.tolist()
    return value.as_py() if hasattr(value, "as_py") else value


def _rows_of_columns(data: Mapping[str, Any], where: str) -> Iterable[dict[str, Any]]:
    columns = {str(name): plain_value(values) for name, values in data.items()}
    if not columns or not all(isinstance(values, list | tuple) for values in columns.values()):
        names = ", ".join(columns) or "nothing"
        message = f"is of type {type(data).__name__} of {names}, not of columns with their values"
        raise DataError(message, where=where, fix=f"Give one of its items, or {FORMS}.")
    sizes = {name: len(values) for name, values in columns.items()}
    if len({*sizes.values()}) > 1:
        counts = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
        raise DataError(f"has columns of different length: {counts}", where=where)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _rows_of_frame(frame: Any, where: str) -> Iterable[dict[str, Any]]:
    names = [str(name) for name in frame.columns]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"two columns are called {twice!r}", where=where, fix="Rename one.")
    values = frame.astype(object).where(frame.notna(), None)
    return [dict(zip(names, row, strict=True)) for row in values.itertuples(index=False, name=None)]


def listed_classes(data: Any) -> dict[str, list[str]]:
    """Return the classes that data lists for its columns, with or without rows of them.

    A `datasets.Dataset` lists them in its features, pandas in the categories of a column.
    """
    features, kinds = getattr(data, "features", None), getattr(data, "dtypes", ())
    if isinstance(features, Mapping):
        return class_names(features)
    pairs = kinds.items() if hasattr(kinds, "items") else ()
    listed = {str(name): getattr(kind, "categories", None) for name, kind in pairs}
    return {name: [*map(str, values)] for name, values in listed.items() if values is not None}


def is_example(value: Any) -> bool:
    """Return True for an example of a task: an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
