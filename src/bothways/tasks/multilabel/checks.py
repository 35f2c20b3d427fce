"""Checks of texts with several labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Many

from bothways.core.finding import Finding, places
from bothways.tasks.multilabel.examples import MultilabelExample
from bothways.tasks.text_checks import (
    check_answered,
    check_overlap,
    check_rare,
    check_texts,
    text_key,
)
from bothways.tasks.text_examples import in_order


def check_label_sets(train: Many[MultilabelExample], dev: Many[MultilabelExample]) -> list[Finding]:
    """Return the problems of texts with any number of labels; `dev` may be empty."""
    return [
        *check_texts([*train, *dev]),
        *check_answered([e.where for e in (*train, *dev) if e.labels is None]),
        *_check_names(train, dev),
        *_check_balance(train),
        *check_overlap(train, dev, text_key),
    ]


def _check_names(train: Many[MultilabelExample], dev: Many[MultilabelExample]) -> list[Finding]:
    names, seen = (
        in_order(label for e in examples for label in e.labels or ()) for examples in (train, dev)
    )
    findings = []
    if not names:
        fix = "Name another label column, or give more data."
        findings.append(Finding("labels", "error", "no training example has a label", fix=fix))
    unknown = [
        f"{e.where} ({label!r})" for e in dev for label in e.labels or () if label not in names
    ]
    if unknown and names:
        what = f"{len(unknown)} labels of dev examples have no training example: {places(unknown)}"
        fix = f"The labels of the training data are {places(names)}."
        findings.append(Finding("labels", "error", what, fix=fix))
    absent = [name for name in names if dev and name not in seen]
    if absent:
        what = (
            f"no dev example has one of the labels {places(absent)}: their thresholds stay at 0.5"
        )
        findings.append(Finding("labels", "warning", what))
    return findings


def _check_balance(train: Many[MultilabelExample]) -> list[Finding]:
    known = [e.labels for e in train if e.labels is not None]
    counts = Counter(label for labels in known for label in {*labels})
    if not counts:
        return []
    mean, none = counts.total() / len(known), sum(not labels for labels in known)
    what = f"a training example has {mean:.2f} of {len(counts)} labels on average; {none} have none"
    findings = [Finding("balance", "note", what), *check_rare(counts, len(known), "labels")]
    always = [label for label, count in counts.items() if count == len(known)]
    if always:
        what = f"all training examples have these labels, which teaches nothing: {places(always)}"
        findings.append(Finding("balance", "warning", what))
    return findings
