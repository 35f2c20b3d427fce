"""Labelled texts: from the columns of a table, or made in memory.

A label is a text, as a Hugging Face folder has it: 1 and "1" are one label, so are true and "true", so is 1.0 where a file
turned whole numbers into floats. A label that is absent (empty, null, NaN, or the -1 of a Hub data set) is None; whether that
may be is for the reader of the examples to say.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

from bothways.core.errors import ConfigError, DataError
from bothways.data.tables import Table, TableRow, open_table
from bothways.data.text_io import STDIN

TEXTS = (
    "text",
    "sentence",
    "review",
    "content",
    "premise",
    "question",
    "query",
    "sentence1",
    "text_a",
    "tweet",
    "document",
)
PAIRS = (
    ("text", "text_b"), ("text_a", "text_b"), ("text1", "text2"), ("sentence1", "sentence2"), ("sentence_A", "sentence_B"),
    ("premise", "hypothesis"), ("question1", "question2"), ("question", "sentence"), ("query", "document"),
)  # fmt: skip
LABELS = ("label", "labels", "class", "target", "gold_label", "category")
_KNOWN = {*TEXTS, *itertools.chain(*PAIRS), *LABELS}


@dataclass(frozen=True)
class TextExample:
    """One or two texts, their label if there is one, and where they come from."""

    text: str
    text_b: str | None = None
    label: str | None = None
    where: str = "an example"


@dataclass(frozen=True)
class TextColumns:
    """Which columns hold what, by name; or by number from 0, in a file without a header. None: guess, if it is clear.

    Attributes:
        text: the text, or the first of two.
        text_b: the second text; stays absent if `text` is given alone.
        label: the label.
    """

    text: str | None = None
    text_b: str | None = None
    label: str | None = None

    def __post_init__(self) -> None:
        if self.text_b is not None and self.text is None:
            raise ConfigError(
                "is given without a first text", where="columns.text_b", fix="Name both columns."
            )

    def __str__(self) -> str:
        named = {"text": self.text, "text_b": self.text_b, "label": self.label}
        return ", ".join(f"{role} = {name!r}" for role, name in named.items() if name is not None)


NOT_NAMED = TextColumns()


def open_examples(
    source: str,
    columns: TextColumns = NOT_NAMED,
    *,
    usual: TextColumns = NOT_NAMED,
    labelled: bool = True,
    guesses: Many[str] = LABELS,
) -> tuple[Table, TextColumns]:
    """A file, a Hub data set or the standard input, and which of its columns hold the texts and the labels.

    Args:
        source: as for `tables.open_table`.
        columns: those that are asked for.
        usual: what those that are not asked for are called, if the table has them; else they are guessed.
        labelled: whether labels are wanted; without, a label column is left alone.
        guesses: what a label column may be called where nobody names it.

    Raises:
        DataError: the file cannot be read as a table; a column that is not there, with those that are; a column that cannot be
            guessed.
        ResourceError: a file that may not be read.
    """
    named = [
        name
        for name in (columns.text, columns.text_b, columns.label if labelled else None)
        if name is not None
    ]
    table = open_table(
        source, named or ([] if source == STDIN or usual.text is None else [usual.text])
    )
    for name in named:
        if name not in table.names:
            raise DataError(
                f"has no column {name!r}; it has {', '.join(table.names)}",
                where=table.where,
                fix=_HOW,
            )
    text, text_b = _texts(columns, usual, table)
    chosen = TextColumns(
        text, text_b, _label_column(columns, usual, table, guesses) if labelled else None
    )
    return _without_header(table, chosen), chosen


def _without_header(table: Table, columns: TextColumns) -> Table:
    """The table as it is. DataError: columns go by number, and the first row is a header, which would be an example."""
    first = next(table.rows)
    roles = {"text": columns.text, "text-b": columns.text_b, "label": columns.label}
    names = {
        role: first.values.get(column)
        for role, column in roles.items()
        if column is not None and column.isdecimal()
    }
    if names and all(isinstance(name, str) and name in _KNOWN for name in names.values()):
        fix = f"Name the columns: {' '.join(f'--{role} {name}' for role, name in names.items())}."
        raise DataError("is a header, where columns go by number", where=first.where, fix=fix)
    return dataclasses.replace(table, rows=itertools.chain([first], table.rows))


def read_examples(
    source: str, columns: TextColumns = NOT_NAMED
) -> tuple[list[TextExample], TextColumns]:
    """All examples of a file, and the columns that were read; arguments and errors as `open_examples`."""
    table, chosen = open_examples(source, columns)
    return [example_of(row, chosen) for row in table.rows], chosen


def _texts(columns: TextColumns, usual: TextColumns, table: Table) -> tuple[str, str | None]:
    for known in (columns, usual):
        if known.text in table.names and (known.text_b is None or known.text_b in table.names):
            assert known.text is not None
            return known.text, known.text_b
    found = _guess_texts(table.names, table.where)
    if usual.text_b is not None and found[1] is None:
        what = f"two texts are read, {usual.text!r} and {usual.text_b!r}, and there are only {', '.join(table.names)}"
        raise DataError(what, where=table.where, fix=_HOW)
    return found


def _label_column(
    columns: TextColumns, usual: TextColumns, table: Table, guesses: Many[str]
) -> str:
    known = next((name for name in (columns.label, usual.label) if name in table.names), None)
    return known or _guess_label(table.names, table.where, guesses)


_HOW = "Name the columns: --text NAME --text-b NAME --label NAME (in a file without a header by number, from 0)."


def _how(names: tuple[str, ...]) -> str:
    """What to do where columns are not clear: a single one may be several, with another separator between."""
    other = next(
        (
            said
            for mark, said in ((";", "semicolons"), ("\t", "tabs"))
            if len(names) == 1 and mark in names[0]
        ),
        None,
    )
    return (
        _HOW
        if other is None
        else f"Its columns seem to have {other} between them: write commas in a .csv, tabs in a .tsv."
    )


def _guess_texts(names: tuple[str, ...], where: str) -> tuple[str, str | None]:
    pairs = [pair for pair in PAIRS if set(pair) <= set(names)]
    singles = [name for name in TEXTS if name in names]
    if len(pairs) == 1 and set(singles) <= set(pairs[0]):
        return pairs[0]
    if not pairs and len(singles) == 1:
        return singles[0], None
    found = (
        "several columns may hold the text"
        if pairs or singles
        else "no column is called like a text"
    )
    raise DataError(f"{found}; there are {', '.join(names)}", where=where, fix=_how(names))


def _guess_label(names: tuple[str, ...], where: str, guesses: Many[str]) -> str:
    found = [name for name in guesses if name in names]
    if len(found) == 1:
        return found[0]
    many = "several columns may hold the label" if found else "no column is called like a label"
    raise DataError(f"{many}; there are {', '.join(names)}", where=where, fix=_how(names))


def example_of(row: TableRow, columns: TextColumns) -> TextExample:
    """The example in a row. DataError for a row without a column, a text that is no text, or a label that is none."""
    assert columns.text is not None
    text_b = None if columns.text_b is None else text_of(row, columns.text_b)
    label = (
        None
        if columns.label is None
        else label_of(cell_of(row, columns.label), columns.label, row.where)
    )
    return TextExample(text_of(row, columns.text), text_b, label, row.where)


def cell_of(row: TableRow, column: str) -> Any:
    """The value in a column. DataError for a row without it, or with a text that is not made of characters."""
    if column not in row.values:
        what = f"the row has no column {column!r}; it has {', '.join(row.values)}"
        raise DataError(what, where=row.where, fix="Complete the row, or take it out.")
    value = row.values[column]
    for text in value if isinstance(value, list) else [value]:
        check_characters(text, column, row.where)
    return value


def check_characters(text: Any, column: str, where: str) -> None:
    """DataError: a text with half of a surrogate pair, which JSON can hold. Anything but a text passes."""
    try:
        if isinstance(text, str):
            text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"U+{ord(error.object[error.start]):04X} at character {error.start}"
        what = f"column {column!r} holds {half}, half of a surrogate pair, which is no character"
        raise DataError(what, where=where, fix="Write both halves, or take it out.") from error


def text_of(row: TableRow, column: str) -> str:
    """The text in a column, empty for null. DataError for a row without it, or with what is no text."""
    value = cell_of(row, column)
    if value is not None and not isinstance(value, str):
        raise DataError(
            f"column {column!r} holds {type(value).__name__}, not text", where=row.where, fix=_HOW
        )
    return value or ""


def label_of(value: Any, column: str, where: str) -> str | None:
    """The text of a label; none for an absent one. DataError for what can be none, such as a list."""
    if is_absent(value):
        return None
    match value:
        case bool():
            return str(value).lower()
        case float():
            return f"{value:.0f}" if value.is_integer() else repr(value)
        case int():
            return str(value)
        case str():
            return value.strip() or None
        case _:
            fix = "Give one label, for the task multilabel a list of labels, or name another column: --label NAME."
            raise DataError(
                f"column {column!r} holds {type(value).__name__}, not a label", where=where, fix=fix
            )


def is_absent(value: Any) -> bool:
    """Whether a value says nothing: null, NaN, or NaN as tables of numbers write it in a text."""
    return value is None or (isinstance(value, float | str) and str(value).strip().lower() == "nan")


def label_names(examples: Iterable[TextExample]) -> tuple[str, ...]:
    """The labels that occur, in order: whole numbers by value, then texts by their characters."""
    return in_order(example.label for example in examples if example.label is not None)


def in_order(labels: Iterable[str]) -> tuple[str, ...]:
    """Each label once: whole numbers by value (of equals by their characters), then texts by their characters."""
    found = set(labels)
    numbers = {label for label in found if label.removeprefix("-").isdecimal()}
    return (*sorted(numbers, key=lambda label: (int(label), label)), *sorted(found - numbers))
