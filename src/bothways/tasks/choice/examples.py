"""Questions with choices: from the columns of a table, or made in memory.

SWAG's files, as its authors and as the Hub have them, HellaSwag's, and JSON lines with "context", "endings" and "label" are
read without naming columns. CODAH's have no header: context=1, endings=2,3,4,5, label=6.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

from bothways.core.errors import DataError
from bothways.data.tables import Table, TableRow, open_table
from bothways.data.text_io import STDIN
from bothways.tasks.text_examples import cell_of, text_of

CONTEXTS = ("context", "sent1", "startphrase", "ctx", "premise", "prompt", "question")
LISTS = ("endings", "choices", "options", "candidate_answers")
LABELS = ("label", "answer", "gold", "target", "correct_answer_idx")
NUMBERED = re.compile(r"(?:ending|choice|option|answer)_?\d+")

_HOW = (
    "Name the columns: task.columns.context=NAME task.columns.endings=NAME,NAME,… (or the name of one list) "
    "task.columns.label=NAME (in predict and evaluate without task.; in a file without a header by number, from 0)."
)


@dataclass(frozen=True)
class ChoiceExample:
    """A context, what may follow it, the place of what does (none where it is not known), and where the example comes from."""

    context: str
    endings: tuple[str, ...]
    label: int | None = None
    where: str = "an example"


@dataclass(frozen=True)
class ChoiceColumns:
    """Which columns hold what, by name; or by number from 0, in a file without a header. None: guess, if it is clear.

    Attributes:
        context: the text that goes before.
        continuation: the beginning of every ending, such as SWAG's "sent2"; stays absent if `context` is given alone.
        endings: a column for each ending, or one column that holds a list of them.
        label: the place of the right ending, from 0.
    """

    context: str | None = None
    continuation: str | None = None
    endings: tuple[str, ...] = ()
    label: str | None = None

    def __str__(self) -> str:
        named = {"context": self.context, "continuation": self.continuation, "label": self.label}
        said = [f"{role} = {name!r}" for role, name in named.items() if name is not None]
        return ", ".join([*said, f"endings = {', '.join(map(repr, self.endings))}"])


NO_COLUMNS = ChoiceColumns()


def open_choices(
    source: str, asked: ChoiceColumns, usual: ChoiceColumns, labelled: bool
) -> tuple[Table, ChoiceColumns]:
    """A table and which of its columns hold what; arguments and errors as `examples.open_examples`."""
    named = _names(asked, labelled)
    hints = (
        named
        or ([] if usual.context is None else [usual.context])
        or ([CONTEXTS[0]] if source == STDIN else [])
    )
    table = open_table(source, hints)
    for name in named:
        if name not in table.names:
            raise DataError(
                f"has no column {name!r}; it has {', '.join(table.names)}",
                where=table.where,
                fix=_HOW,
            )
    context, continuation = _context(asked, usual, table)
    endings = next(
        (c.endings for c in (asked, usual) if c.endings and {*c.endings} <= {*table.names}), ()
    )
    label = next((c.label for c in (asked, usual) if c.label in table.names), None)
    return table, ChoiceColumns(
        context,
        continuation,
        endings or _guess_endings(table),
        (label or _guess("label", LABELS, table)) if labelled else None,
    )


def _names(columns: ChoiceColumns, labelled: bool) -> list[str]:
    named = (
        columns.context,
        columns.continuation,
        *columns.endings,
        columns.label if labelled else None,
    )
    return [name for name in named if name is not None]


def _context(asked: ChoiceColumns, usual: ChoiceColumns, table: Table) -> tuple[str, str | None]:
    for known in (asked, usual):
        if known.context in table.names and (
            known.continuation is None or known.continuation in table.names
        ):
            assert known.context is not None
            return known.context, known.continuation
    if {"sent1", "sent2"} <= {*table.names}:  # SWAG, where "startphrase" is both in one
        return "sent1", asked.continuation or "sent2"
    return _guess("context", CONTEXTS, table), asked.continuation


def _guess(role: str, names: Many[str], table: Table) -> str:
    found = [name for name in names if name in table.names]
    if len(found) == 1:
        return found[0]
    many = f"several columns may hold the {role}" if found else f"no column is called like a {role}"
    raise DataError(f"{many}; there are {', '.join(table.names)}", where=table.where, fix=_HOW)


def _guess_endings(table: Table) -> tuple[str, ...]:
    lists = [name for name in LISTS if name in table.names]
    numbered = tuple(name for name in table.names if NUMBERED.fullmatch(name))
    if len(lists) == 1 and not numbered:
        return (lists[0],)
    if numbered and not lists:
        return numbered
    many = "several columns may hold the endings" if lists else "no column is called like an ending"
    raise DataError(f"{many}; there are {', '.join(table.names)}", where=table.where, fix=_HOW)


def read_choices(table: Table, columns: ChoiceColumns) -> Iterator[ChoiceExample]:
    """The examples of a table. DataError for a row without a column, or with what is no text, no list or no whole number."""
    return (_example(row, columns) for row in table.rows)


def _example(row: TableRow, columns: ChoiceColumns) -> ChoiceExample:
    assert columns.context is not None
    begin = "" if columns.continuation is None else text_of(row, columns.continuation).strip()
    endings = tuple(f"{begin} {ending}".strip() for ending in _endings(row, columns.endings))
    label = (
        None
        if columns.label is None
        else _place(cell_of(row, columns.label), columns.label, row.where)
    )
    return ChoiceExample(text_of(row, columns.context), endings, label, row.where)


def _endings(row: TableRow, columns: Many[str]) -> list[str]:
    if len(columns) > 1:
        return [text_of(row, column) for column in columns]
    value = cell_of(row, columns[0])
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        what = f"column {columns[0]!r} holds {type(value).__name__}, not a list of texts"
        raise DataError(what, where=row.where, fix=_HOW)
    return list(value)


def _place(value: Any, column: str, where: str) -> int | None:
    """A whole number; none for an absent one."""
    text = "" if value is None else str(value).strip().removesuffix(".0")
    if text.lower() in {"", "nan"}:
        return None
    if not text.removeprefix("-").isdecimal():
        what = f"column {column!r} holds {value!r}, which is no place of an ending"
        raise DataError(
            what, where=where, fix="Write the place of the right ending, counted from 0."
        )
    return int(text)
