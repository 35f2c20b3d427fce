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
from bothways.data.tables import Table, open_table
from bothways.data.text_io import is_stream
from bothways.tasks.base import Row
from bothways.tasks.columns import cell_of, describe_columns, guess_column, require_columns, text_of

CONTEXTS = ("context", "sent1", "startphrase", "ctx", "premise", "prompt", "question")
LISTS = ("endings", "choices", "options", "candidate_answers")
LABELS = ("label", "answer", "gold", "target", "correct_answer_idx")
NUMBERED = re.compile(r"(?:ending|choice|option|answer)_?\d+")

_HOW = (
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
        named = {"context": self.context, "continuation": self.continuation, "label": self.label}
        return f"{describe_columns(**named)}, endings = {', '.join(map(repr, self.endings))}"

    def named(self, labelled: bool) -> list[str]:
        """Return the names that are given."""
        label = self.label if labelled else None
        every = (self.context, self.continuation, *self.endings, label)
        return [name for name in every if name is not None]


NO_COLUMNS = ChoiceColumns()


def open_choices(
    source: str, asked: ChoiceColumns, usual: ChoiceColumns, labelled: bool
) -> tuple[Table, ChoiceColumns]:
    """Open a table and choose its columns; arguments and errors as `open_examples`."""
    hints = asked.named(labelled)
    if not hints:
        default = CONTEXTS[0] if is_stream(source) else None
        hints = [name for name in (usual.context or default,) if name is not None]
    table = open_table(source, hints)
    return table, choose_columns(table.names, table.where, asked, usual, labelled)


def choose_columns(
    names: Many[str], where: str, asked: ChoiceColumns, usual: ChoiceColumns, labelled: bool | None
) -> ChoiceColumns:
    """Return the columns to read from a table; see `text_examples.choose_columns`."""
    require_columns(asked.named(labelled is not False), names, where, _HOW)
    context, continuation = _context(asked, usual, names, where)
    endings = next(
        (c.endings for c in (asked, usual) if c.endings and {*c.endings} <= {*names}), ()
    )
    label = None
    if labelled is not False:
        label = next((c.label for c in (asked, usual) if c.label in names), None)
        if label is None and (labelled or any(name in names for name in LABELS)):
            label = guess_column("label", LABELS, names, where, _HOW)
    return ChoiceColumns(context, continuation, endings or _guess_endings(names, where), label)


def _context(
    asked: ChoiceColumns, usual: ChoiceColumns, names: Many[str], where: str
) -> tuple[str, str | None]:
    for known in (asked, usual):
        if known.context in names and (known.continuation is None or known.continuation in names):
            assert known.context is not None
            return known.context, known.continuation
    if {"sent1", "sent2"} <= {*names}:  # SWAG, where "startphrase" holds both
        return "sent1", asked.continuation or "sent2"
    return guess_column("context", CONTEXTS, names, where, _HOW), asked.continuation


def _guess_endings(names: Many[str], where: str) -> tuple[str, ...]:
    lists = [name for name in LISTS if name in names]
    # By number: sorted as texts, "ending10" would come before "ending2".
    matching = [name for name in names if NUMBERED.fullmatch(name)]
    numbered = tuple(sorted(matching, key=lambda name: int(re.sub(r"\D", "", name))))
    if numbered and not lists:
        return numbered
    return (guess_column("endings", [*lists, *numbered], names, where, _HOW),)


def example_of(row: Row, columns: ChoiceColumns, where: str) -> ChoiceExample:
    """Return the example in a row.

    Raises:
        DataError: a column is missing, or its value is not a text, a list or a whole number.
    """
    assert columns.context is not None
    begin = ""
    if columns.continuation is not None:
        begin = text_of(row, columns.continuation, where, _HOW).strip()
    endings = tuple(f"{begin} {text}".strip() for text in _endings(row, columns.endings, where))
    label = None
    if columns.label is not None:
        label = _place(cell_of(row, columns.label, where), columns.label, where)
    return ChoiceExample(text_of(row, columns.context, where, _HOW), endings, label, where)


def _endings(row: Row, columns: Many[str], where: str) -> list[str]:
    if len(columns) > 1:
        return [text_of(row, column, where, _HOW) for column in columns]
    value = cell_of(row, columns[0], where)
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        what = f"column {columns[0]!r} holds {type(value).__name__}, not a list of texts"
        raise DataError(what, where=where, fix=_HOW)
    return list(value)


def _place(value: Any, column: str, where: str) -> int | None:
    """Return a whole number; None for an absent one."""
    text = "" if value is None else str(value).strip().removesuffix(".0")
    if text.lower() in {"", "nan"}:
        return None
    if not text.removeprefix("-").isdecimal():
        what = f"column {column!r} holds {value!r}, which is not the place of an ending"
        fix = "Write the place of the right ending, counted from 0."
        raise DataError(what, where=where, fix=fix)
    return int(text)
