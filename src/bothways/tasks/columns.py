"""Columns of tables: which one holds what, and the values in them.

A label is a text, as in a Hugging Face folder: 1 and "1" are the same label. 1.0 is "1", since
tables may turn whole numbers into floats. A boolean is "True" or "False", as Python and pandas
write it to text files. A label that is absent (empty, null, NaN, or -1 in a Hub data set) is None;
whether others mark rows without a label depends on all of a column (`unlabelled_marks`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import fields, is_dataclass
from typing import Any

from bothways.core.advice import argument
from bothways.core.errors import DataError
from bothways.core.terminal import listed, surrogate_in
from bothways.data.given_rows import plain_value
from bothways.tasks.base import Row, did_you_mean

MOST = 30
"""Columns that a message lists."""


def require_columns(asked: Many[str | None], names: Many[str], where: str, fix: str) -> None:
    """Raise a DataError for the first column that is asked for and not among `names`."""
    for name in asked:
        if name is not None and name not in names:
            what = (
                f"has no column {name!r}; it has {listed(names, MOST)}{did_you_mean(name, names)}"
            )
            raise DataError(what, where=where, fix=fix)


def describe_columns(**columns: str | None) -> str:
    """Return the columns that are named, such as "text = 'review', label = 'stars'"."""
    named = ((role, name) for role, name in columns.items() if name is not None)
    return ", ".join(f"{role} = {name!r}" for role, name in named)


def usual_columns(known: Many[str], names: Many[str]) -> list[str]:
    """Return the columns with known names, as these are spelled or else in any case: "Text"."""
    spelled = {name.strip().lower(): name for name in reversed(names)}
    exact = [name for name in known if name in names]
    return exact or [spelled[name.lower()] for name in known if name.lower() in spelled]


def guess_column(role: str, known: Many[str], names: Many[str], where: str, fix: str) -> str:
    """Return the one column that has a known name.

    Args:
        role: the content of the column, for messages, such as "label".
        known: usual names of such a column.

    Raises:
        DataError: no column has a known name, or several do.
    """
    matching = usual_columns(known, names)
    if len(matching) == 1:
        return matching[0]
    what = "several columns may hold" if matching else "no column has a usual name for"
    raise DataError(f"{what} the {role}; it has {listed(names, MOST)}", where=where, fix=fix)


def cell_of(row: Row, column: str, where: str) -> Any:
    """Return the value in a column.

    Raises:
        DataError: the row lacks the column, or a text in it is not valid Unicode.
    """
    if column not in row:
        what = f"the row has no column {column!r}; it has {listed([*row], MOST)}"
        raise DataError(what, where=where, fix="Complete the row or remove it.")
    value = plain_value(row[column])
    for text in value if isinstance(value, list) else [value]:
        check_characters(text, column, where)
    return value


def check_characters(value: Any, column: str, where: str) -> None:
    """Raise a DataError for a text with half of a surrogate pair, which JSON can hold."""
    half = surrogate_in(value) if isinstance(value, str) else None
    if half is not None:
        what = f"column {column!r} holds {half}, not a character"
        raise DataError(what, where=where, fix="Write both halves or remove it.")


def text_of(row: Row, column: str, where: str, fix: str) -> str:
    """Return the text in a column; empty for null and NaN.

    Raises:
        DataError: the row lacks the column, or its value is not a text.
    """
    value = cell_of(row, column, where)
    if isinstance(value, float) and math.isnan(value):  # as pandas marks an absent text
        return ""
    if value is not None and not isinstance(value, str):
        what = f"column {column!r} holds {type(value).__name__}, not text"
        raise DataError(what, where=where, fix=fix)
    return value or ""


def label_of(value: Any, column: str, where: str) -> str | None:
    """Return a label as text; None for an absent one.

    Raises:
        DataError: the value cannot be a label, such as a list.
    """
    if is_absent(value):
        return None
    match value:
        case float():
            return f"{value:.0f}" if value.is_integer() else repr(value)
        case int():  # and booleans
            return str(value)
        case str():
            return value.strip() or None
        case _:
            raise DataError(
                f"column {column!r} holds {type(value).__name__}, not a label",
                where=where,
                fix="Give one label, or a list of labels for the task multilabel, or name another "
                f"column: {argument(label='NAME')}.",
            )


_DASHES = frozenset({"-", "--", "–", "—", "?", "_"})
_WORDS = frozenset({"n/a", "#n/a", "<na>", "null"})
_NEGATIVE = re.compile(r"-\d+")


def unlabelled_marks(labels: Iterable[str]) -> frozenset[str]:
    """Return the labels of a column that mark rows without a label, as data sets write them.

    They are "-" and "?" unless others are marks, too, such as "+"; "N/A" and "NULL"; -100; and -1,
    unless the others are 0 and 1 alone or have negative numbers: -1, 0, 1 may be a scale.

        "-", "entailment", "neutral" → "-"        "-", "+" → none
        "-1", "0", "1", "2" → "-1"                "-1", "0", "1" → none
    """
    distinct = {*labels}
    words = {label for label in distinct if label.casefold() in _WORDS}
    dashes = {label for label in distinct if label in _DASHES}
    others = distinct - words - dashes
    if any(not any(map(str.isalnum, label)) for label in others):
        dashes = set()
    numbers = {label for label in others if label in {"-1", "-100"}}
    others -= numbers
    if any(map(_NEGATIVE.fullmatch, others)):
        numbers = set()
    elif others and others <= {"0", "1"}:
        numbers -= {"-1"}
    return frozenset(words | dashes | numbers)


def is_absent(value: Any) -> bool:
    """Return whether a value is null or NaN; tables of numbers may write NaN as a text."""
    return value is None or (isinstance(value, float | str) and str(value).strip().lower() == "nan")


def asked_columns(columns: object) -> list[str]:
    """Return the names that differ from the defaults of their dataclass."""
    assert is_dataclass(columns)
    names: list[str] = []
    for each in fields(columns):
        value = getattr(columns, each.name)
        if value != each.default:
            names += [value] if isinstance(value, str) else value
    return names


def reads_as_trained(columns: object, trained: object) -> bool:
    """Return True if columns that are read are those of training, or absent."""
    named = vars(columns).items() if columns else ()
    return all(name is None or name == getattr(trained, role) for role, name in named)
