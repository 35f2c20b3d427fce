"""Texts with any number of labels, and their checks."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

from bothways.core.advice import argument
from bothways.core.errors import DataError
from bothways.core.finding import Finding, places
from bothways.tasks import text_checks
from bothways.tasks.base import Row
from bothways.tasks.columns import cell_of, is_absent, label_of, unlabelled_marks
from bothways.tasks.text_examples import in_order

_NAME_IN_BRACKETS = re.compile(r"\s*\[[^\[\]'\"]+\]\s*")
_VALUES = {"true", "false", "none", "null", "nan"}


@dataclass(frozen=True)
class MultilabelExample:
    """One or two texts and their labels, possibly none; `labels` is None where they are unknown."""

    text: str
    text_b: str | None = None
    labels: tuple[str, ...] | None = None
    where: str = "an example"


def labels_of_columns(row: Row, columns: Many[str], where: str) -> tuple[str, ...] | None:
    """Return the labels in a row with a column of 0 and 1 for each label.

    They are unknown (None) if a column is empty or -1, as in the test data of Jigsaw.

    Raises:
        DataError: a column is missing, or its value is neither.
    """
    flags = {column: _flag(cell_of(row, column, where), column, where) for column in columns}
    if None in flags.values():
        return None
    return tuple(column for column in columns if flags[column])


def _flag(value: Any, column: str, where: str) -> bool | None:
    if is_absent(value):
        return None
    text = str(value).strip().lower()
    flags = {"": None, "-1": None, "0": False, "1": True, "false": False, "true": True}
    flag = text.removesuffix(".0")
    if flag not in flags:
        message = f"column {column!r} holds {value!r:.80}, not 0 or 1"
        fix = "Write 1 in each column whose label the text has, else 0."
        raise DataError(message, where=where, fix=fix)
    return flags[flag]


def parse_labels(value: Any, separator: str, column: str, where: str) -> tuple[str, ...] | None:
    """Return the labels in a cell: a list, also as JSON, or a text with separators.

    An empty list or text means that the example has no label; null and NaN that it is unknown.

    Raises:
        DataError: an item cannot be a label, or a text is a list in another form than JSON.
    """
    if is_absent(value):
        return None
    if isinstance(value, str):
        value = _labels_in(value, separator, column, where)
    if isinstance(value, list | tuple):
        _check_names_of(value, column, where)
        names = (label_of(item, column, where) for item in value)
        return in_order(name for name in names if name is not None)
    label = label_of(value, column, where)
    return None if label is None else (label,)


def _labels_in(text: str, separator: str, column: str, where: str) -> list[Any]:
    """Return the labels in a text: a JSON list, or labels with separators.

    A list as Python or NumPy prints it, such as pandas writes to .csv files, is refused: cut at
    separators it would give labels with brackets and quotation marks.

    Example: "[red], [green]" → the labels "[red]" and "[green]"; "[red, green]" is refused.
    """
    if re.fullmatch(r"\{.*[,:'\"].*\}|\(.*,.*\)", text.strip()):
        message = f"column {column!r} holds {text[:60]!r}, a printed set, dict or tuple"
        fix = "Join the labels before the file is written, or write a .jsonl or .parquet file."
        raise DataError(message, where=where, fix=fix)
    if not (text.strip().startswith("[") and text.strip().endswith("]")):
        return text.split(separator)
    try:
        labels = json.loads(text)
    except (ValueError, RecursionError):
        names = text.split(separator)
        if all(map(_is_name_in_brackets, names)):
            return list(names)
        message = f"column {column!r} holds {text[:60]!r}, a printed list that is not JSON"
        fix = "Join the labels before the file is written, or write a .jsonl or .parquet file."
        raise DataError(message, where=where, fix=fix) from None
    return list(labels)


def _is_name_in_brackets(text: str) -> bool:
    """Return True for "[spam]"; False for a printed list, such as "['spam']", "[0 1]", "[nan]"."""
    words = text.strip().strip("[]").lower().split()
    has_name = any(word not in _VALUES and any(map(str.isalpha, word)) for word in words)
    return has_name and _NAME_IN_BRACKETS.fullmatch(text) is not None


def _check_names_of(labels: Many[Any], column: str, where: str) -> None:
    """Raise a DataError for one 0 or 1 per label, which would be read as the labels 0 and 1."""
    flags = all(isinstance(label, bool | int | float) and label in (0, 1) for label in labels)
    if flags and len(labels) > len({*labels}):
        message = f"column {column!r} holds {len(labels)} numbers 0 and 1, not labels"
        fix = f"Give the labels of the text, or a column for each: {argument(label='NAME,NAME')}."
        raise DataError(message, where=where, fix=fix)


def check_label_sets(train: Many[MultilabelExample], dev: Many[MultilabelExample]) -> list[Finding]:
    """Return the problems of texts with any number of labels; `dev` may be empty."""
    examples = [*train, *dev]
    if marks := unlabelled_marks(label for e in examples for label in e.labels or ()):
        train, dev = _without(train, marks), _without(dev, marks)
        examples = [*train, *dev]
    return [
        *text_checks.check_texts(examples),
        *text_checks.check_answered(
            [e.where for e in examples if e.labels is None], len(examples), marks
        ),
        *_check_names(train, dev),
        *_check_balance(train),
        *text_checks.check_overlap(train, dev, text_checks.text_key),
    ]


def _without(examples: Many[MultilabelExample], marks: frozenset[str]) -> list[MultilabelExample]:
    """Return the examples with None for labels among which one marks rows without labels."""
    return [
        dataclasses.replace(e, labels=None) if marks.intersection(e.labels or ()) else e
        for e in examples
    ]


def _check_names(train: Many[MultilabelExample], dev: Many[MultilabelExample]) -> list[Finding]:
    names = in_order(label for e in train for label in e.labels or ())
    if not names:
        fix = "Name another label column, or give more data."
        return [Finding("labels", "error", "no training example has a label", fix=fix)]
    labels = ((label, e.where) for e in dev for label in e.labels or ())
    return text_checks.check_known(names, labels, ": their thresholds stay at 0.5")


def _check_balance(train: Many[MultilabelExample]) -> list[Finding]:
    label_sets = [e.labels for e in train if e.labels is not None]
    counts = Counter(label for labels in label_sets for label in {*labels})
    if not counts:
        return []
    mean, none = counts.total() / len(label_sets), sum(not labels for labels in label_sets)
    message = (
        f"a training example has {mean:.2f} of {len(counts)} labels on average; {none} have none"
    )
    findings = [
        Finding("balance", "note", message),
        *text_checks.check_rare(counts, len(label_sets), "labels"),
    ]
    always = [label for label, count in counts.items() if count == len(label_sets)]
    if always:
        message = (
            f"all training examples have these labels, which teaches nothing: {places(always)}"
        )
        findings.append(Finding("balance", "warning", message))
    return findings
