"""Texts with any number of labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bothways.tasks.columns import is_absent, label_of
from bothways.tasks.text_examples import in_order


@dataclass(frozen=True)
class MultilabelExample:
    """One or two texts and their labels, possibly none; `labels` is None where they are unknown."""

    text: str
    text_b: str | None = None
    labels: tuple[str, ...] | None = None
    where: str = "an example"


def parse_labels(value: Any, separator: str, column: str, where: str) -> tuple[str, ...] | None:
    """Return the labels in a cell: a list, or a text with separators.

    An empty list or text means that the example has no label; null and NaN that it is unknown.

    Raises:
        DataError: an item cannot be a label.
    """
    if is_absent(value):
        return None
    if isinstance(value, str):
        value = value.split(separator)
    if isinstance(value, list | tuple):
        names = (label_of(item, column, where) for item in value)
        return in_order(name for name in names if name is not None)
    one = label_of(value, column, where)
    return None if one is None else (one,)
