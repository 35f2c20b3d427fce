"""Checks of classification data: rows, labels, their balance, and overlap of train and dev."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as Many

from bothways.core.advice import argument
from bothways.core.finding import Finding, places
from bothways.tasks import text_checks
from bothways.tasks.columns import unlabelled_marks
from bothways.tasks.text_examples import TextExample, label_names

MANY = 20
"""Number of classes from which labels that are fractions look like scores."""


def check_examples(train: Many[TextExample], dev: Many[TextExample]) -> list[Finding]:
    """Return the problems of labelled texts; `dev` may be empty."""
    examples = [*train, *dev]
    labels = [e.label for e in examples if e.label is not None]
    if marks := unlabelled_marks(labels):
        train, dev = _without(train, marks), _without(dev, marks)
        examples = [*train, *dev]
    return [
        *text_checks.check_texts(examples),
        *text_checks.check_answered(
            [e.where for e in examples if e.label is None], len(examples), marks
        ),
        *text_checks.check_minus_one({*labels} - marks),
        *_check_labels(train, dev),
        *_check_balance(train),
        *text_checks.check_overlap(train, dev, text_checks.text_key),
    ]


def _without(examples: Many[TextExample], marks: Collection[str]) -> list[TextExample]:
    """Return the examples with None for labels that mark rows without one."""
    return [dataclasses.replace(e, label=None) if e.label in marks else e for e in examples]


def _check_labels(train: Many[TextExample], dev: Many[TextExample]) -> list[Finding]:
    labels, findings = label_names(train), list[Finding]()
    if len(labels) == 1:
        message = f"training needs at least two classes, and the only label is {labels[0]!r}"
        fix = "Name another label column, or give more data."
        findings.append(Finding("labels", "error", message, fix=fix))
    findings += text_checks.check_known(
        labels, ((e.label, e.where) for e in dev if e.label is not None)
    )
    if len(labels) > MANY and sum(map(_is_fraction, labels)) > len(labels) / 2:
        message = (
            f"the {len(labels)} labels look like scores ({places(labels)}); each is a class here"
        )
        fix = f"To learn them as scores, set {argument(task='regress')}."
        findings.append(Finding("labels", "warning", message, fix=fix))
    return findings


def _is_fraction(label: str) -> bool:
    integer, point, decimals = label.removeprefix("-").partition(".")
    return bool(point) and integer.isdecimal() and decimals.isdecimal()


def _check_balance(train: Many[TextExample]) -> list[Finding]:
    counts = Counter(e.label for e in train if e.label is not None)
    if len(counts) < 2:
        return []
    (top, top_count), total = counts.most_common(1)[0], counts.total()
    findings = text_checks.check_constant(counts)
    if top_count / total > text_checks.COMMON:
        message = (
            f"{top_count / total:.1%} of the training examples are {top!r}: "
            "accuracy says little here"
        )
        fix = "Choose the best checkpoint by another metric, such as metric=f1_macro."
        findings.append(Finding("balance", "warning", message, fix=fix))
    return findings + text_checks.check_rare(counts, total, "classes")
