"""Labelled texts and pairs of texts: from the columns of a table, or made in memory."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass

from bothways.core.advice import argument
from bothways.core.errors import ConfigError, DataError
from bothways.core.terminal import listed
from bothways.data.tables import Table, open_table, separator_advice
from bothways.data.text_io import is_stream
from bothways.tasks.base import Row
from bothways.tasks.columns import (
    MOST,
    cell_of,
    describe_columns,
    guess_column,
    label_of,
    require_columns,
    text_of,
    usual_columns,
)

TEXTS = (
    "text", "sentence", "review", "content", "premise", "question", "query", "sentence1", "text_a",
    "tweet", "document",
)  # fmt: skip
PAIRS = (
    ("text", "text_b"), ("text_a", "text_b"), ("text1", "text2"), ("sentence1", "sentence2"),
    ("sentence_A", "sentence_B"), ("premise", "hypothesis"), ("question1", "question2"),
    ("question", "sentence"), ("query", "document"), ("sentence_good", "sentence_bad"),
)  # fmt: skip
LABELS = ("label", "labels", "class", "target", "gold_label", "category")
_KNOWN = {*TEXTS, *itertools.chain(*PAIRS), *LABELS}

HOW = (
    f"Name the columns: {argument(text='NAME', text_b='NAME', label='NAME')} "
    "(in a file without a header by number, from 0)."
)

SEVERAL = f" For a column of 0 and 1 for each label: {argument(label='NAME,NAME')}."


@dataclass(frozen=True)
class TextExample:
    """One or two texts with an optional label and their source."""

    text: str
    text_b: str | None = None
    label: str | None = None
    where: str = "an example"


@dataclass(frozen=True)
class TextColumns:
    """Names of columns; numbers from 0 in a file without a header. None: guess, if it is clear.

    Attributes:
        text: the text, or the first of two.
        text_b: the second text; absent if `text` is given alone.
        label: the label; "a,b,c" for a column for each label, where a task has several.
    """

    text: str | None = None
    text_b: str | None = None
    label: str | None = None

    def __post_init__(self) -> None:
        if self.text_b is not None and self.text is None:
            what = "is given without a first text"
            raise ConfigError(what, where="columns.text_b", fix="Name both columns.")

    @property
    def labels(self) -> tuple[str, ...]:
        """The columns that are named for labels: one, or one for each label."""
        return tuple(name.strip() for name in (self.label or "").split(",") if name.strip())

    def __str__(self) -> str:
        return describe_columns(**vars(self))


NOT_NAMED = TextColumns()


def choose_columns(
    names: Many[str],
    where: str,
    asked: TextColumns,
    usual: TextColumns,
    labelled: bool | None,
    guesses: Many[str] = LABELS,
    several: bool = False,
) -> TextColumns:
    """Return the columns to read from a table.

    Args:
        names: columns of the table.
        where: the table, for messages.
        asked: columns that the user asks for.
        usual: columns to read where none are asked for, if the table has them; else they are
            guessed.
        labelled: whether labels are read; None: if their column is clear.
        guesses: usual names of a label column.
        several: whether there may be a column for each label.

    Raises:
        DataError: a column is missing or cannot be guessed.
    """
    fix = _fix(names) + (SEVERAL if several else "")
    require_columns(named_columns(asked, labelled is not False, names, several), names, where, fix)
    text, text_b = _texts(asked, usual, names, where)
    if several and labelled is not False:
        for known in (asked, usual):
            if known.label not in names and known.labels and {*known.labels} <= {*names}:
                return TextColumns(text, text_b, ",".join(known.labels))
    label = _label(asked, usual, names, where, labelled, guesses, fix)
    return TextColumns(text, text_b, label)


def named_columns(
    columns: TextColumns, labelled: bool, names: Many[str] | None = None, several: bool = False
) -> list[str]:
    """Return the names that are given; without the names of a table, as they are written."""
    labels = [columns.label] if labelled else []
    if several and columns.label not in (names or ()):
        labels = list(columns.labels) if labelled else []
    return [name for name in (columns.text, columns.text_b, *labels) if name is not None]


def _texts(
    asked: TextColumns, usual: TextColumns, names: Many[str], where: str
) -> tuple[str, str | None]:
    for known in (asked, usual):
        if known.text in names and (known.text_b is None or known.text_b in names):
            assert known.text is not None
            return known.text, known.text_b
    text, text_b = _guess_texts(names, where)
    if usual.text_b is not None and text_b is None:
        what = f"two texts are read, {usual.text!r} and {usual.text_b!r}; it has "
        raise DataError(what + listed(names, MOST), where=where, fix=HOW)
    return text, text_b


def _guess_texts(names: Many[str], where: str) -> tuple[str, str | None]:
    found = (usual_columns(pair, names) for pair in PAIRS)
    pairs = [(pair[0], pair[1]) for pair in found if len(pair) > 1]
    singles = {*usual_columns(TEXTS, names)}
    if len(pairs) == 1 and singles <= {*pairs[0]}:
        return pairs[0]
    # Any pair leaves several names open, of which `guess_column` reports that they are not clear.
    either = TEXTS if not pairs else [*pairs[0], *TEXTS]
    return guess_column("text", list(dict.fromkeys(either)), names, where, _fix(names)), None


def _label(
    asked: TextColumns,
    usual: TextColumns,
    names: Many[str],
    where: str,
    labelled: bool | None,
    guesses: Many[str],
    fix: str,
) -> str | None:
    if labelled is False:
        return None
    known = next((name for name in (asked.label, usual.label) if name in names), None)
    if known is not None:
        return known
    matching = usual_columns(guesses, names)
    if labelled is None:
        return matching[0] if len(matching) == 1 else None
    return guess_column("label", guesses, names, where, fix)


def _fix(names: Many[str]) -> str:
    """Return advice; a single column may be several with another separator."""
    return separator_advice(names) or HOW


def open_examples(
    source: str,
    asked: TextColumns = NOT_NAMED,
    usual: TextColumns = NOT_NAMED,
    labelled: bool = True,
    guesses: Many[str] = LABELS,
    several: bool = False,
) -> tuple[Table, TextColumns]:
    """Open a file, a Hub data set or the standard input, and choose its columns.

    Args:
        source: as in `open_table`; the other arguments are those of `choose_columns`.

    Raises:
        DataError: the file cannot be read as a table, or a column is missing or cannot be guessed.
        ResourceError: no permission to read the file.
    """
    hints = named_columns(asked, labelled, several=several)
    if not hints and not is_stream(source) and usual.text is not None:
        hints = [usual.text]
    table = open_table(source, hints)
    columns = choose_columns(table.names, table.where, asked, usual, labelled, guesses, several)
    return _without_header(table, columns), columns


def _without_header(table: Table, columns: TextColumns) -> Table:
    """Return the table unchanged.

    Raises:
        DataError: columns go by number and the first row is a header, which would be an example.
    """
    first = next(table.rows)
    roles = {"text": columns.text, "text-b": columns.text_b, "label": columns.label}
    names = {
        role: first.values.get(column)
        for role, column in roles.items()
        if column is not None and column.isdecimal()
    }
    if names and all(isinstance(name, str) and name in _KNOWN for name in names.values()):
        fix = f"Name the columns: {' '.join(f'--{role} {name}' for role, name in names.items())}."
        what = "is a header, but the columns are given by number"
        raise DataError(what, where=first.where, fix=fix)
    return dataclasses.replace(table, rows=itertools.chain([first], table.rows))


def read_examples(
    source: str, columns: TextColumns = NOT_NAMED
) -> tuple[list[TextExample], TextColumns]:
    """Return all examples of a source and the columns that were read; see `open_examples`."""
    table, chosen = open_examples(source, columns)
    return [example_of(row.values, chosen, row.where) for row in table.rows], chosen


def example_of(row: Row, columns: TextColumns, where: str) -> TextExample:
    """Return the example in a row.

    Raises:
        DataError: a column is missing, a text is not a text, or a label cannot be one.
    """
    text, text_b = texts_of_row(row, columns, where)
    label = None
    if columns.label is not None:
        label = label_of(cell_of(row, columns.label, where), columns.label, where)
    return TextExample(text, text_b, label, where)


def texts_of_row(row: Row, columns: TextColumns, where: str) -> tuple[str, str | None]:
    """Return the text or the two texts in a row; errors as `example_of`."""
    assert columns.text is not None
    text = text_of(row, columns.text, where, HOW)
    return text, None if columns.text_b is None else text_of(row, columns.text_b, where, HOW)


def label_names(examples: Iterable[TextExample]) -> tuple[str, ...]:
    """Return the labels that occur, ordered as by `in_order`."""
    return in_order(example.label for example in examples if example.label is not None)


def in_order(labels: Iterable[str]) -> tuple[str, ...]:
    """Return each label once: whole numbers by value, then texts by their characters."""
    distinct = set(labels)
    numbers = {label for label in distinct if label.removeprefix("-").isdecimal()}
    return (*sorted(numbers, key=lambda label: (int(label), label)), *sorted(distinct - numbers))
