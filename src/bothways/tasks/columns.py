"""Columns of tables: which one holds what, the values in them, and tasks with an example a row.

A label is a text, as in a Hugging Face folder: 1 and "1" are the same label. 1.0 is "1", since
tables may turn whole numbers into floats. A boolean is "True" or "False", as Python and pandas
write it to text files. A label that is absent (empty, null, NaN, or -1 in a Hub data set) is None;
whether others mark rows without a label depends on all of a column (`unlabelled_marks`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence as Many
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from bothways.core.errors import DataError, argument
from bothways.core.files import surrogate_in
from bothways.core.terminal import listed
from bothways.data import tables
from bothways.data.text_io import is_stream, suffix_of
from bothways.tasks.base import E, P, Reading, Row, Task, did_you_mean, names_in

MOST = 30
"""Columns that a message lists."""
C = TypeVar("C")
_OPTIONS = ("text", "text_b", "label")
"""Roles that are options of the commands; others are settings."""


class UnclearColumnError(DataError):
    """A column that is not named and cannot be guessed, or is not the model's.

    Attributes:
        unnamed: the error without advice to name the column, for an input whose columns cannot be.
    """

    unnamed: DataError


@dataclass(frozen=True)
class Column:
    """A column that a task reads from a table.

    Attributes:
        role: its field in the task's type of columns.
        noun: its content, for messages.
        names: common names of such a column.
        others: names that count where none of these is there: with a label, a topic is none.
        companion: role of a second column, which is read only with this one.
        both: whether the companion is required where the task has one.
        pairs: common names of both columns.
        shadows: common names that a pair hides, because they hold the content of both columns.
        numbered: pattern of the names of several columns; None where there is one.
        answer: whether it is read from labelled data only.
        several: whether "a,b" names a column for each label.
        replaced_by: role of a column in whose presence it is not read.
        optional: whether it is read only where it is named or one column has a common name.
    """

    role: str
    noun: str
    names: Many[str] = ()
    others: Many[str] = ()
    companion: str = ""
    both: bool = False
    pairs: Many[Many[str]] = ()
    shadows: Many[str] = ()
    numbered: re.Pattern[str] | None = None
    answer: bool = False
    several: bool = False
    replaced_by: str = ""
    optional: bool = False

    def chosen(self, columns: Any, names: Many[str]) -> dict[str, Any]:
        """Return the columns of this role and its companion, if the table has them."""
        value, second = getattr(columns, self.role), getattr(columns, self.companion, None)
        requested = split_names(value, names) if self.several else names_in(value)
        if not requested or not {*requested, *names_in(second)} <= {*names}:
            return {}
        return {self.role: value} | ({self.companion: second} if self.companion else {})

    def trained(self, columns: Any, names: Many[str]) -> dict[str, Any]:
        """Return the columns of training, as `chosen`; none if the table has more numbered ones.

        A question may have more endings than those of training.
        """
        selected, pattern = self.chosen(columns, names), self.numbered
        numbered = names_in(selected.get(self.role))
        if pattern is None or not all(map(pattern.fullmatch, numbered)):
            return selected
        return {} if any(map(pattern.fullmatch, {*names} - {*numbered})) else selected

    def is_clear(self, free: Many[str]) -> bool:
        """Return True if one column has a common name, two those of a pair, or several numbers."""
        numbered = self.numbered is not None and any(map(self.numbered.fullmatch, free))
        paired = any(len(usual_columns(aliases, free)) > 1 for aliases in self.pairs)
        return len(usual_columns(self._aliases(free), free)) == 1 or paired or numbered

    def _aliases(self, free: Many[str]) -> Many[str]:
        return self.names if usual_columns(self.names, free) else self.others

    def guessed(
        self, names: Many[str], where: str, taken: Many[str], unclear: Many[str] = ()
    ) -> dict[str, Any]:
        """Return the columns with common names.

        Args:
            taken: the columns of other roles.
            unclear: other roles whose columns have no common name, for the message.

        Raises:
            DataError: no column has a common name, or several do.
        """
        free = [name for name in names if name not in taken]
        pairs = [pair for aliases in self.pairs if len(pair := usual_columns(aliases, free)) > 1]
        singles = {*usual_columns(self.names, free)} - {*self.shadows}
        if len(pairs) == 1 and singles <= {*pairs[0]}:
            return {self.role: pairs[0][0], self.companion: pairs[0][1]}
        # Several pairs, or one and another name, are not clear, which `guess_column` reports.
        paired = pairs[0] if self.both and pairs else ()
        candidates = [*dict.fromkeys([*paired, *self._aliases(free)])]
        if self.numbered is None:
            return {self.role: guess_column(self, candidates, names, where, free, unclear)}
        # By number: sorted as texts, "ending10" would come before "ending2".
        numbered = sorted(
            filter(self.numbered.fullmatch, free), key=lambda name: int(re.sub(r"\D", "", name))
        )
        if numbered and not usual_columns(candidates, free):
            return {self.role: tuple(numbered)}
        candidates += numbered
        return {self.role: (guess_column(self, candidates, names, where, free, unclear),)}


def choose_columns(
    table: Many[Column],
    names: Many[str],
    where: str,
    requested: C,
    defaults: C,
    labelled: bool | None,
) -> C:
    """Return the columns to read from a table.

    Args:
        table: the columns that the task reads.
        names: the columns of the table.
        requested: columns that the user names.
        defaults: columns to read where none are named, if the table has them; else they are
            guessed.
        labelled: whether answers are read; None: if their column is clear.

    Raises:
        DataError: a column is missing or cannot be guessed.
    """
    advice = columns_advice(table, names, where)
    chosen_columns = asked_columns(requested, table, names, labelled is not False)
    require_columns(chosen_columns, names, where, advice)
    # Fields that are no column of the table of columns, such as the id of a question, stay.
    roles = {**vars(defaults), **_changed(requested)}
    roles |= {role: None for column in table for role in (column.role, column.companion) if role}
    taken = list[str]()
    for column in table:
        if (column.answer and labelled is False) or roles.get(column.replaced_by) is not None:
            continue
        selected = column.chosen(requested, names) or column.trained(defaults, names)
        clear = column.is_clear([name for name in names if name not in taken])
        if not selected and (
            clear or not (column.optional or (column.answer and labelled is None))
        ):
            unclear = [
                other.role
                for other in table
                if other is not column
                and not (other.optional or other.replaced_by or (other.answer and not labelled))
                and not (other.chosen(requested, names) or other.is_clear(names))
            ]
            selected = column.guessed(names, where, taken, unclear)
            if second := getattr(requested, column.companion, None):
                selected[column.companion] = second
            trained = getattr(defaults, column.companion, None)
            if column.both and trained and not selected.get(column.companion):
                pair = f"{getattr(defaults, column.role)!r} and {trained!r}"
                message = f"two {column.noun}s are read, {pair}; it has {listed(names, MOST)}"
                raise DataError(message, where=where, fix=advice)
        roles |= selected
        names_of_role = [name for value in selected.values() for name in names_in(value)]
        if column.answer and (twice := [name for name in names_of_role if name in taken]):
            message = f"column {twice[0]!r} is named as the {column.noun} and as what is read"
            raise DataError(message, where=where, fix="Name another column for one of them.")
        taken += names_of_role
    return type(requested)(**roles)


def columns_advice(table: Many[Column], names: Many[str] = (), where: str = "") -> str:
    """Return advice on missing columns; a single column may be several with another separator."""
    roles = [role for column in table for role in (column.role, column.companion) if role]
    words = _spelled(dict.fromkeys(roles, "NAME"))
    by_number = " (without a header by number, from 0)" if _may_lack_header(where) else ""
    advice = f"Name the columns: {words}{by_number}."
    if any(column.several for column in table):
        advice += f" For a column of 0 and 1 for each label: {argument(label='NAME,NAME')}."
    return tables.separator_advice(names) or advice


def _may_lack_header(where: str) -> bool:
    """Return True for a file whose first line may be a row; rows in memory have names."""
    return suffix_of(where) in (".csv", ".tsv")


def _spelled(names: Mapping[str, str]) -> str:
    """Return columns by role, as an interface spells them; other roles are settings."""
    return argument(**{f"columns.{r}" if r not in _OPTIONS else r: n for r, n in names.items()})


class TableTask(Task[E, P]):
    """A task whose examples are the rows of a table, or made of them.

    Class attributes:
        column_table: the columns that are read.
        objects: whether the standard input holds JSON objects, even if no column is named.
    """

    column_table: ClassVar[Many[Column]]
    objects: ClassVar[bool] = True
    columns: Any

    def open(self, source: str, columns: Any, labelled: bool) -> tuple[tables.Table, Any]:
        requested, defaults = columns or type(self.columns)(), self.usual_columns(labelled)
        text: str | None = getattr(defaults, self.column_table[0].role)
        if is_stream(source):
            text = (text or self.column_table[0].names[0]) if self.objects else None
        needed = asked_columns(requested, self.column_table, (), labelled) or names_in(text)
        table = tables.open_table(source, needed)
        with tables.closed_on_error(table.close):
            arguments = (table.names, table.where, requested, defaults, labelled)
            selected = choose_columns(self.column_table, *arguments)
            self.check_columns(selected, table.where)
            roles = {role: names_in(value) for role, value in vars(selected).items()}
            numbers = {role: n for role, n in roles.items() if n and all(map(str.isdecimal, n))}
            if not numbers:
                return table, selected
            # Where columns go by number, a header would be an example.
            head_row = next(table.rows)
            names = {r: [str(head_row.values.get(at)) for at in n] for r, n in numbers.items()}
            if all(map(self._is_column_name, itertools.chain(*names.values()))):
                fix = f"Name the columns: {_spelled({r: ','.join(n) for r, n in names.items()})}."
                message = "is a header, but the columns are given by number"
                raise DataError(message, where=head_row.where, fix=fix)
            rows = itertools.chain([head_row], table.rows)
            return dataclasses.replace(table, rows=rows), selected

    def _is_column_name(self, value: str) -> bool:
        """Return True for a customary name of any column, or of one that this task reads."""
        name = value.strip().lower()
        return name in tables.COLUMN_NAMES or any(
            name in map(str.lower, (*c.names, *c.others, *itertools.chain(*c.pairs)))
            or (c.numbered is not None and c.numbered.fullmatch(name) is not None)
            for c in self.column_table
        )

    def read(self, source: str, columns: Any = None, *, labelled: bool = True) -> Reading[E]:
        table, selected = self.open(source, columns, labelled)
        parse = lambda row: self.parse(row.values, selected, row.where)  # noqa: E731
        return Reading.of_table(self.with_columns(selected), table, parse)

    def example(
        self, row: Row, columns: Any = None, labelled: bool | None = None, *,
        where: str = "an example",
    ) -> E:  # fmt: skip
        return self.parse(row, self.row_columns(row, columns, labelled, where=where), where)

    def row_columns(
        self, row: Row, columns: Any = None, labelled: bool | None = None, *,
        where: str = "an example",
    ) -> Any:  # fmt: skip
        """Return the columns that `example` reads in a row; arguments and errors are the same."""
        if not isinstance(row, Mapping):
            message = f"is of type {type(row).__name__}, not a dict by column"
            raise DataError(message, where=where, fix="Give a dict with the columns of a row.")
        defaults = self.usual_columns(labelled=True)
        if getattr(defaults, self.column_table[0].role) not in row:
            defaults = self.columns
        requested = columns or type(self.columns)()
        names = tuple(row)
        columns = choose_columns(self.column_table, names, where, requested, defaults, labelled)
        self.check_columns(columns, where)
        return columns

    def usual_columns(self, labelled: bool) -> Any:
        return self.columns

    def check_columns(self, columns: Any, where: str) -> None:
        """Raise a DataError for columns that the task does not take."""

    def parse(self, row: Row, columns: Any, where: str) -> E:
        raise NotImplementedError


def split_names(value: str | None, names: Container[str] = ()) -> list[str]:
    """Return the columns of labels: "a,b" names two, unless the table has a column "a,b"."""
    if value is None or value in names:
        return names_in(value)
    return [name.strip() for name in value.split(",") if name.strip()]


def require_columns(requested: Many[str | None], names: Many[str], location: str, fix: str) -> None:
    """Raise a DataError for the first column that is asked for and not among `names`."""
    for name in requested:
        if name is not None and name not in names:
            near = "" if tables.separator_advice(names) else did_you_mean(name, names)
            if name.isdecimal() and suffix_of(location) == ".txt":  # tabs included
                fix = "A .txt has one text per line: give columns the suffix .tsv or .csv."
            message = f"has no column {name!r}; it has {listed(names, MOST)}{near}"
            raise DataError(message, where=location, fix=None if near else fix)


def usual_columns(aliases: Many[str], names: Many[str]) -> list[str]:
    """Return the columns with known names, as these are spelled or else in any case: "Text"."""
    spelled = {name.strip().lower(): name for name in reversed(names)}
    # A name as it is spelled wins over one in another case: "text" over "Text"
    exact = [name for name in aliases if name in names]
    return exact or [spelled[name.lower()] for name in aliases if name.lower() in spelled]


def guess_column(
    column: Column,
    aliases: Many[str],
    names: Many[str],
    location: str,
    free: Many[str] | None = None,
    unclear: Many[str] = (),
) -> str:
    """Return the one column that has a known name.

    Args:
        column: its role and noun are for messages.
        free: the columns that it may be; None for all.
        unclear: other roles that have to be named as well.

    Raises:
        DataError: no column has a known name, or several do.
    """
    matching = usual_columns(aliases, names if free is None else free)
    if len(matching) == 1:
        return matching[0]
    verb = "has" if column.noun.endswith("s") else "is"
    listing = listed(matching or names, MOST)
    message = f"cannot tell which column {verb} the {column.noun} ({listing})"
    usual = (*column.names, *aliases, column.role)[0]
    advice = "Give one of them." if matching else f"Call it {usual!r}."
    unnamed = DataError(message, where=location, fix=advice)
    fix = tables.separator_advice(names)
    if not fix and column.answer and len(names) == 1:
        message = f"has one column, {listing}, and no {column.noun}"
        fix = "Give rows with both" + (", such as a .csv." if suffix_of(location) else ".")
    elif not fix:
        numbered = [*names] == [*map(str, range(len(names)))]
        value = "NUMBER" if numbered else "NAME"
        message += f"; use {_spelled(dict.fromkeys([column.role, *unclear], value))}"
        if numbered:
            message += f", such as {_spelled({column.role: '0'})}"  # in Python a text, not a number
            fix = "The first line looks like a row. Or put a line with the names above it."
        elif aliases and not matching:
            fix = f"Or rename it to {usual!r}."
            if len(names) == 1 and _may_lack_header(location):  # perhaps the first of many texts
                fix += f" Without a header it goes by number: {_spelled({column.role: '0'})}."
        fix = columns_advice([column]) if column.several else fix
    error = UnclearColumnError(message, where=location, fix=fix or None)
    error.unnamed = unnamed
    raise error


def cell_of(row: Row, column: str, location: str) -> Any:
    """Return the value in a column; arrays and tuples as lists.

    Raises:
        DataError: the row lacks the column, or its value has half of a surrogate pair, which JSON
            can hold, or a huge number.
    """
    if column not in row:
        message = f"the row has no column {column!r}; it has {listed([*row], MOST)}"
        raise DataError(message, where=location, fix="Complete the row or remove it.")
    value = row[column] if type(row[column]) is str else tables.plain_value(row[column])
    value = [*value] if isinstance(value, tuple) else value
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, int) and item.bit_length() > 14_000:  # `str` converts 4,300 digits
            message = f"column {column!r} holds a number with too many digits"
            raise DataError(message, where=location, fix="Remove it.")
        half = surrogate_in(item) if isinstance(item, str) and not item.isascii() else None
        if half is not None:
            message = f"column {column!r} holds {half}, not a character"
            raise DataError(message, where=location, fix="Write both halves or remove it.")
    return value


def text_of(row: Row, column: str, location: str) -> str:
    """Return the text in a column; empty for null and NaN.

    Raises:
        DataError: the row lacks the column, or its value is not a text.
    """
    value = cell_of(row, column, location)
    if isinstance(value, float) and math.isnan(value):  # as pandas marks an absent text
        return ""
    if value is not None and not isinstance(value, str):
        message = f"column {column!r} holds {type(value).__name__}, not text"
        raise DataError(message, where=location, fix="Write a text, or name another column.")
    return value or ""


def label_of(value: Any, column: str, location: str) -> str | None:
    """Return a label as text; None for an absent one.

    Raises:
        DataError: the value cannot be a label, such as a list.
    """
    if is_absent(value):
        return None
    match value:
        case float():
            return f"{value + 0:.0f}" if value.is_integer() else repr(value)  # -0.0 is "0"
        case int():  # and booleans
            return str(value)
        case str():
            return value.strip() or None
        case _:
            fix = "Give one label, or a list of labels for the task multilabel, or name another "
            fix += f"column: {argument(label='NAME')}."
            message = f"column {column!r} holds {type(value).__name__}, not a label"
            raise DataError(message, where=location, fix=fix)


def number_of(label: str | None) -> float:
    """Return a label as a number; NaN if it is absent or not a finite number."""
    try:
        # float() takes "1_0" for 10.
        value = math.nan if label is None or "_" in label else float(label)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


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
    """
    roles, result = {column.role: column for column in table}, list[str]()
    for name, value in _changed(columns).items():
        column = roles.get(name)
        if column is None or labelled or not column.answer:
            several = column is not None and column.several
            result += split_names(value, names) if several else names_in(value)
    return result


def _changed(columns: Any) -> dict[str, Any]:
    """Return the fields that differ from the defaults of their dataclass."""
    fields = dataclasses.fields(columns)
    return {f.name: value for f in fields if (value := getattr(columns, f.name)) != f.default}


def guess_note(source: str, reading: Reading[Any], task: Any, requested: Any) -> str | None:
    """Return the note on columns of a file that were guessed, if they differ from training."""
    columns = reading.task.columns
    if is_stream(source) or suffix_of(source) == ".txt":
        return None
    known = [vars(requested or type(columns)()), vars(task.columns)]
    names = {role: name for role, name in vars(columns).items() if name}
    if all(any(name == roles[role] for roles in known) for role, name in names.items()):
        return None
    return f"note: {source}: the columns are guessed: {columns}"
