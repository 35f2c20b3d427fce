"""Labelled texts and pairs of texts: from the columns of a table, or made in memory."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass

from bothways.core.advice import argument
from bothways.core.errors import ConfigError, DataError
from bothways.data.tables import Table, separator_advice
from bothways.tasks.base import Row
from bothways.tasks.columns import (
    Column,
    cell_of,
    describe_columns,
    label_of,
    open_columns,
    text_of,
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
            message = "is given without a first text"
            raise ConfigError(message, where="columns.text_b", fix="Name both columns.")

    @property
    def labels(self) -> tuple[str, ...]:
        """The columns that are named for labels: one, or one for each label."""
        return tuple(name.strip() for name in (self.label or "").split(",") if name.strip())

    def __str__(self) -> str:
        return describe_columns(**vars(self))


NOT_NAMED = TextColumns()


TEXT = Column("text", "text", TEXTS, companion="text_b", both="text_b", pairs=PAIRS)
LABEL = Column("label", "label", LABELS, answer=True)


def text_advice(names: Many[str], table: Many[Column] = ()) -> str:
    """Return advice on missing columns; a single column may be several with another separator."""
    several = any(column.several for column in table)
    return (separator_advice(names) or HOW) + (SEVERAL if several else "")


def open_examples(
    source: str,
    requested: TextColumns = NOT_NAMED,
    defaults: TextColumns = NOT_NAMED,
    labelled: bool = True,
    table: Many[Column] = (TEXT, LABEL),
) -> tuple[Table, TextColumns]:
    """Open a file, a Hub data set or the standard input, and choose its columns.

    Arguments and errors as `columns.open_columns`.
    """
    opened, columns = open_columns(
        source,
        table,
        requested,
        defaults,
        labelled,
        lambda names: text_advice(names, table),
        objects=False,
    )
    return _without_header(opened, columns), columns


def _without_header(table: Table, columns: TextColumns) -> Table:
    """Return the table unchanged.

    Raises:
        DataError: columns go by number and the first row is a header, which would be an example.
    """
    head_row = next(table.rows)
    roles = {"text": columns.text, "text-b": columns.text_b, "label": columns.label}
    names = {
        role: head_row.values.get(column)
        for role, column in roles.items()
        if column is not None and column.isdecimal()
    }
    if names and all(isinstance(name, str) and name in _KNOWN for name in names.values()):
        fix = f"Name the columns: {' '.join(f'--{role} {name}' for role, name in names.items())}."
        message = "is a header, but the columns are given by number"
        raise DataError(message, where=head_row.where, fix=fix)
    return dataclasses.replace(table, rows=itertools.chain([head_row], table.rows))


def read_examples(
    source: str, columns: TextColumns = NOT_NAMED
) -> tuple[list[TextExample], TextColumns]:
    """Return all examples of a source and the columns that were read; see `open_examples`."""
    table, selected = open_examples(source, columns)
    return [example_of(row.values, selected, row.where) for row in table.rows], selected


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
