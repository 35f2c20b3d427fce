"""Columns of tables: which one holds what, and the values in them.

A label is a text, as in a Hugging Face folder: 1 and "1" are the same label. 1.0 is "1", since
tables may turn whole numbers into floats. A boolean is "True" or "False", as Python and pandas
write it to text files. A label that is absent (empty, null, NaN, or -1 in a Hub data set) is None;
whether others mark rows without a label depends on all of a column (`unlabelled_marks`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from bothways.core.advice import argument
from bothways.core.errors import DataError
from bothways.core.terminal import listed, surrogate_in
from bothways.data.given_rows import plain_value
from bothways.data.tables import Table, open_table
from bothways.data.text_io import is_stream
from bothways.tasks.base import Row, did_you_mean

MOST = 30
"""Columns that a message lists."""
C = TypeVar("C")


@dataclass(frozen=True)
class Column:
    """A column that a task reads from a table.

    Attributes:
        role: its field in the task's type of columns.
        noun: its content, for messages.
        names: common names of such a column.
        companion: role of a second column, which is read only with this one.
        both: role of the companion, if it is required where the task has one.
        pairs: common names of both columns.
        shadows: common names that a pair hides, because they hold the content of both columns.
        numbered: pattern of the names of several columns; None where there is one.
        answer: whether it is read from labelled data only.
        several: whether "a,b" names a column for each label.
        replaced_by: role of a column in whose presence it is not read.
    """

    role: str
    noun: str
    names: Many[str] = ()
    companion: str | None = None
    both: str = ""
    pairs: Many[Many[str]] = ()
    shadows: Many[str] = ()
    numbered: re.Pattern[str] | None = None
    answer: bool = False
    several: bool = False
    replaced_by: str | None = None

    def chosen(self, columns: Any, names: Many[str]) -> dict[str, Any]:
        """Return the columns of this role and its companion, if the table has them."""
        value = getattr(columns, self.role)
        second = None if self.companion is None else getattr(columns, self.companion)
        requested = _split(value, names) if self.several else _listed(value)
        if not requested or not {*requested, *_listed(second)} <= {*names}:
            return {}
        return {self.role: value} | ({} if self.companion is None else {self.companion: second})

    def guessed(self, names: Many[str], where: str, fix: str, taken: Many[str]) -> dict[str, Any]:
        """Return the columns with common names.

        Args:
            taken: columns of other roles.

        Raises:
            DataError: no column has a common name, or several do.
        """
        free = [name for name in names if name not in taken]
        pairs = [pair for aliases in self.pairs if len(pair := usual_columns(aliases, free)) > 1]
        singles = {*usual_columns(self.names, free)} - {*self.shadows}
        if self.companion is not None and len(pairs) == 1 and singles <= {*pairs[0]}:
            return {self.role: pairs[0][0], self.companion: pairs[0][1]}
        # Several pairs, or one and another name, are not clear, which `guess_column` reports.
        candidates = [*dict.fromkeys([*(pairs[0] if self.both and pairs else ()), *self.names])]
        if self.numbered is None:
            return {self.role: guess_column(self.noun, candidates, names, where, fix, free)}
        # By number: sorted as texts, "ending10" would come before "ending2".
        numbered = sorted(
            filter(self.numbered.fullmatch, free), key=lambda name: int(re.sub(r"\D", "", name))
        )
        if numbered and not usual_columns(candidates, free):
            return {self.role: tuple(numbered)}
        return {self.role: (guess_column(self.noun, [*candidates, *numbered], names, where, fix),)}


def choose_columns(
    table: Many[Column],
    names: Many[str],
    where: str,
    requested: C,
    defaults: C,
    labelled: bool | None,
    fix: str,
) -> C:
    """Return the columns to read from a table.

    Args:
        table: the columns that the task reads.
        names: the columns of the table.
        where: the table, for messages.
        requested: columns that the user names.
        defaults: columns to read where none are named, if the table has them; else they are
            guessed.
        labelled: whether answers are read; None: if their column is clear.
        fix: advice on missing columns.

    Raises:
        DataError: a column is missing or cannot be guessed.
    """
    require_columns(
        asked_columns(requested, table, names, labelled is not False), names, where, fix
    )
    roles = dict[str, Any]()
    for column in table:
        if (column.answer and labelled is False) or roles.get(column.replaced_by or "") is not None:
            continue
        taken = [name for value in roles.values() for name in _listed(value)]
        selected = column.chosen(requested, names) or column.chosen(defaults, names)
        clear = len(usual_columns(column.names, [n for n in names if n not in taken])) == 1
        if not selected and not (column.answer and labelled is None and not clear):
            selected = column.guessed(names, where, fix, taken)
            if column.companion is not None and (second := getattr(requested, column.companion)):
                selected[column.companion] = second
            if column.both and getattr(defaults, column.both) and not selected.get(column.both):
                pair = f"{getattr(defaults, column.role)!r} and {getattr(defaults, column.both)!r}"
                message = f"two {column.noun}s are read, {pair}; it has {listed(names, MOST)}"
                raise DataError(message, where=where, fix=fix)
        roles |= selected
    return type(requested)(**roles)


def open_columns(
    source: str,
    table: Many[Column],
    requested: C,
    defaults: C,
    labelled: bool,
    fix: Callable[[Many[str]], str],
    *,
    objects: bool = True,
) -> tuple[Table, C]:
    """Open a file, a Hub data set or the standard input, and choose its columns.

    Args:
        source: as in `open_table`.
        table, asked, usual, labelled: as in `choose_columns`.
        fix: returns the advice, given the columns of the source.
        objects: whether the standard input holds JSON objects, even if no column is named.

    Raises:
        DataError: the file cannot be read as a table, or a column is missing or cannot be guessed.
        ResourceError: no permission to read the file.
    """
    text_column: str | None = getattr(defaults, table[0].role)
    if is_stream(source):
        text_column = (text_column or table[0].names[0]) if objects else None
    opened = open_table(
        source, asked_columns(requested, table, (), labelled) or _listed(text_column)
    )
    names, where = opened.names, opened.where
    return opened, choose_columns(table, names, where, requested, defaults, labelled, fix(names))


def _listed(value: str | Many[str] | None) -> list[str]:
    """Return the names in a field of columns."""
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)


def _split(value: str | None, names: Many[str]) -> list[str]:
    """Return the columns of labels: "a,b" names two, unless the table has a column "a,b"."""
    if value is None or value in names:
        return _listed(value)
    return [name.strip() for name in value.split(",") if name.strip()]


def require_columns(requested: Many[str | None], names: Many[str], where: str, fix: str) -> None:
    """Raise a DataError for the first column that is asked for and not among `names`."""
    for name in requested:
        if name is not None and name not in names:
            message = (
                f"has no column {name!r}; it has {listed(names, MOST)}{did_you_mean(name, names)}"
            )
            raise DataError(message, where=where, fix=fix)


def describe_columns(**columns: str | Many[str] | None) -> str:
    """Return the columns that are named, such as "text = 'review', label = 'stars'"."""
    entries = ((role, ", ".join(map(repr, _listed(value)))) for role, value in columns.items())
    return ", ".join(f"{role} = {names}" for role, names in entries if names)


def usual_columns(aliases: Many[str], names: Many[str]) -> list[str]:
    """Return the columns with known names, as these are spelled or else in any case: "Text"."""
    spelled = {name.strip().lower(): name for name in reversed(names)}
    exact = [name for name in aliases if name in names]
    return exact or [spelled[name.lower()] for name in aliases if name.lower() in spelled]


def guess_column(
    role: str,
    aliases: Many[str],
    names: Many[str],
    where: str,
    fix: str,
    free: Many[str] | None = None,
) -> str:
    """Return the one column that has a known name.

    Args:
        role: the content of the column, for messages, such as "label".
        aliases: common aliases of such a column.
        free: the columns that it may be; None for all.

    Raises:
        DataError: no column has a known name, or several do.
    """
    matching = usual_columns(aliases, names if free is None else free)
    if len(matching) == 1:
        return matching[0]
    message = "several columns may hold" if matching else "no column has a common alias of"
    raise DataError(f"{message} the {role}; it has {listed(names, MOST)}", where=where, fix=fix)


def cell_of(row: Row, column: str, where: str) -> Any:
    """Return the value in a column.

    Raises:
        DataError: the row lacks the column, or a text in it is not valid Unicode.
    """
    if column not in row:
        message = f"the row has no column {column!r}; it has {listed([*row], MOST)}"
        raise DataError(message, where=where, fix="Complete the row or remove it.")
    value = plain_value(row[column])
    for text in value if isinstance(value, list) else [value]:
        check_characters(text, column, where)
    return value


def check_characters(value: Any, column: str, where: str) -> None:
    """Raise a DataError for a text with half of a surrogate pair, which JSON can hold."""
    half = surrogate_in(value) if isinstance(value, str) else None
    if half is not None:
        message = f"column {column!r} holds {half}, not a character"
        raise DataError(message, where=where, fix="Write both halves or remove it.")


def text_of(row: Row, column: str, where: str, fix: str) -> str:
    """Return the text in a column; empty for null and NaN.

    Raises:
        DataError: the row lacks the column, or its value is not a text.
    """
    value = cell_of(row, column, where)
    if isinstance(value, float) and math.isnan(value):  # as pandas marks an absent text
        return ""
    if value is not None and not isinstance(value, str):
        message = f"column {column!r} holds {type(value).__name__}, not text"
        raise DataError(message, where=where, fix=fix)
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
    remaining = distinct - words - dashes
    if any(not any(map(str.isalnum, label)) for label in remaining):
        dashes = set()
    numbers = {label for label in remaining if label in {"-1", "-100"}}
    remaining -= numbers
    if any(map(_NEGATIVE.fullmatch, remaining)):
        numbers = set()
    elif remaining and remaining <= {"0", "1"}:
        numbers -= {"-1"}
    return frozenset(words | dashes | numbers)


def is_absent(value: Any) -> bool:
    """Return True if a value is null or NaN; tables of numbers may write NaN as a text."""
    return value is None or (isinstance(value, float | str) and str(value).strip().lower() == "nan")


def asked_columns(
    columns: Any, table: Many[Column] = (), names: Many[str] = (), labelled: bool = True
) -> list[str]:
    """Return the names of columns that differ from the defaults of their dataclass.

    Args:
        table: the columns that the task reads.
        names: the columns of the table, which decide whether "a,b" names two.
        labelled: whether answers are read.
    """
    roles, result = {column.role: column for column in table}, list[str]()
    for field in fields(columns):
        column, value = roles.get(field.name), getattr(columns, field.name)
        if value == field.default or (column is not None and column.answer and not labelled):
            continue
        several = column is not None and column.several
        result += _split(value, names) if several else _listed(value)
    return result


def unused_columns(names: Many[str], used: Many[str]) -> list[str]:
    """Return the columns of a table that are not read; those without a name do not count."""
    return [name for name in names if name and name not in used]


def reads_as_trained(columns: object, trained: object) -> bool:
    """Return True if columns that are read are those of training, or absent."""
    entries = vars(columns).items() if columns else ()
    return all(name is None or name == getattr(trained, role) for role, name in entries)
