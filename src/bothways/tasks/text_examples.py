"""Labelled texts and pairs of texts: from the columns of a table, or made in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bothways.core.errors import ConfigError
from bothways.tasks.base import Row
from bothways.tasks.columns import Column, Columns, cell_of, label_of, text_of

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


@dataclass(frozen=True)
class Texts:
    """One text or two."""

    text: str
    text_b: str | None = None


@dataclass(frozen=True)
class TextExample(Texts):
    """One or two texts with an optional label and their source."""

    label: str | None = None
    where: str = "an example"


@dataclass(frozen=True)
class TextColumns(Columns):
    """The columns of texts; see `Columns`.

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


NOT_NAMED = TextColumns()


TEXT = Column("text", "text", TEXTS, companion="text_b", both=True, pairs=PAIRS)
LABEL = Column("label", "label", LABELS, answer=True)


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
    text = text_of(row, columns.text, where)
    return text, None if columns.text_b is None else text_of(row, columns.text_b, where)


def label_names(examples: Iterable[TextExample]) -> tuple[str, ...]:
    """Return the labels that occur, ordered as by `in_order`."""
    return in_order(example.label for example in examples if example.label is not None)


def in_order(labels: Iterable[str]) -> tuple[str, ...]:
    """Return each label once: whole numbers by value, then texts by their characters."""
    distinct = set(labels)
    numbers = {label for label in distinct if label.removeprefix("-").isdecimal()}
    return (*sorted(numbers, key=lambda label: (int(label), label)), *sorted(distinct - numbers))
