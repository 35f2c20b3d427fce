"""Questions with choices: from the columns of a table, or made in memory.

Files of SWAG (from its authors or from the Hub), of HellaSwag, and JSON lines with "context",
"endings" and "label" are read without naming columns. CODAH's have no header: context=1,
endings=2,3,4,5, label=6.
"""

from __future__ import annotations

import re
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

from bothways.core.errors import DataError
from bothways.tasks.base import Row
from bothways.tasks.columns import Column, cell_of, describe_columns, text_of

CONTEXTS = ("context", "sent1", "startphrase", "ctx", "premise", "prompt", "question")
LISTS = ("endings", "choices", "options", "candidate_answers")
LABELS = ("label", "answer", "gold", "target", "correct_answer_idx")
NUMBERED = re.compile(r"(?:ending|choice|option|answer)_?\d+")

HOW = (
    "Name the columns: task.columns.context=NAME task.columns.endings=NAME,NAME,… (or the name of "
    "one list) task.columns.label=NAME (in predict and evaluate without task.; in a file without a "
    "header by number, from 0)."
)


@dataclass(frozen=True)
class ChoiceExample:
    """A context, its possible endings, the place of the right one if known, and its source."""

    context: str
    endings: tuple[str, ...]
    label: int | None = None
    where: str = "an example"


@dataclass(frozen=True)
class ChoiceColumns:
    """Names of columns; numbers from 0 in a file without a header. None: guess, if it is clear.

    Attributes:
        context: the text before the endings.
        continuation: the beginning of every ending, such as SWAG's "sent2"; absent if `context` is
            given alone.
        endings: a column for each ending, or one column with lists of them.
        label: the place of the right ending, from 0.
    """

    context: str | None = None
    continuation: str | None = None
    endings: tuple[str, ...] = ()
    label: str | None = None

    def __str__(self) -> str:
        return describe_columns(**vars(self))


NO_COLUMNS = ChoiceColumns()

TABLE = (
    # SWAG's "startphrase" is "sent1" and "sent2".
    Column(
        "context", "context", CONTEXTS, companion="continuation", pairs=[("sent1", "sent2")],
        shadows=("startphrase",),
    ),
    Column("endings", "endings", LISTS, numbered=NUMBERED),
    Column("label", "label", LABELS, answer=True),
)  # fmt: skip


def example_of(row: Row, columns: ChoiceColumns, where: str) -> ChoiceExample:
    """Return the example in a row.

    Raises:
        DataError: a column is missing, or its value is not a text, a list or a whole number.
    """
    assert columns.context is not None
    begin = ""
    if columns.continuation is not None:
        begin = text_of(row, columns.continuation, where, HOW).strip()
    endings = tuple(f"{begin} {text}".strip() for text in _endings(row, columns.endings, where))
    label = None
    if columns.label is not None:
        label = _place(cell_of(row, columns.label, where), columns.label, where)
    return ChoiceExample(text_of(row, columns.context, where, HOW), endings, label, where)


def _endings(row: Row, columns: Many[str], where: str) -> list[str]:
    if len(columns) > 1:
        return [text_of(row, column, where, HOW) for column in columns]
    value = cell_of(row, columns[0], where)
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        message = f"column {columns[0]!r} holds {type(value).__name__}, not a list of texts"
        raise DataError(message, where=where, fix=HOW)
    return list(value)


def _place(value: Any, column: str, where: str) -> int | None:
    """Return a whole number; None for an absent one."""
    text = "" if value is None else str(value).strip().removesuffix(".0")
    if text.lower() in {"", "nan"}:
        return None
    if not text.removeprefix("-").isdecimal():
        message = f"column {column!r} holds {value!r}, which is not the place of an ending"
        fix = "Write the place of the right ending, counted from 0."
        raise DataError(message, where=where, fix=fix)
    return int(text)
