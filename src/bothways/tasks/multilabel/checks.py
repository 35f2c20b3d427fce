"""Preflight of texts with several labels, and of questions with choices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

from bothways.core.finding import Finding, places
from bothways.tasks.text_checks import RARE, check_answered, check_overlap, check_texts, texts_of
from bothways.tasks.text_examples import in_order

if TYPE_CHECKING:
    from bothways.tasks.choice.examples import ChoiceExample
    from bothways.tasks.multilabel.task import MultilabelExample


def check_several(train: Many[MultilabelExample], dev: Many[MultilabelExample]) -> list[Finding]:
    """Everything that texts with any number of labels can have wrong; `dev` may be empty."""
    return [
        *check_texts([*train, *dev]),
        *check_answered([e.where for e in (*train, *dev) if e.labels is None]),
        *_check_names(train, dev),
        *_check_counts(train),
        *check_overlap(train, dev, texts_of),
    ]


def _check_names(train: Many[MultilabelExample], dev: Many[MultilabelExample]) -> list[Finding]:
    names, seen = (
        in_order(label for e in examples for label in e.labels or ()) for examples in (train, dev)
    )
    findings = []
    if not names:
        what = "no training example has a label"
        findings.append(
            Finding("labels", "error", what, fix="Name another label column, or give more data.")
        )
    strange = [
        f"{e.where} ({label!r})" for e in dev for label in e.labels or () if label not in names
    ]
    if strange and names:
        what = f"{len(strange)} labels of dev examples are those of no training example: {places(strange)}"
        findings.append(
            Finding(
                "labels", "error", what, fix=f"The labels of the training data are {places(names)}."
            )
        )
    absent = [name for name in names if dev and name not in seen]
    if absent:
        what = f"no dev example has one of the labels {places(absent)}: their thresholds stay at one half"
        findings.append(Finding("labels", "warning", what))
    return findings


def _check_counts(train: Many[MultilabelExample]) -> list[Finding]:
    known = [e.labels for e in train if e.labels is not None]
    counts = Counter(label for labels in known for label in {*labels})
    if not counts:
        return []
    none = sum(not labels for labels in known)
    what = f"{counts.total() / len(known):.2f} of {len(counts)} labels hold in a training example, none at all in {none}"
    findings = [Finding("balance", "note", what)]
    rare = [f"{label} ({count})" for label, count in counts.items() if count / len(known) < RARE]
    if rare:
        what = f"labels of less than {RARE:.0%} of the training examples, which are hardly learned: {places(rare)}"
        findings.append(Finding("balance", "warning", what))
    always = [label for label, count in counts.items() if count == len(known)]
    if always:
        what = f"labels that all training examples have, of which nothing can be learned: {places(always)}"
        findings.append(Finding("balance", "warning", what))
    return findings


def _check_endings(examples: Many[ChoiceExample]) -> list[Finding]:
    findings = []
    few = [e.where for e in examples if len(e.endings) < 2]
    if few:
        what = f"{len(few)} examples have less than two endings to choose from: {places(few)}"
        findings.append(
            Finding("rows", "error", what, fix="Complete these rows, or take them out.")
        )
    empty = [
        e.where
        for e in examples
        if not e.context.strip() or not all(ending.strip() for ending in e.endings)
    ]
    if empty:
        what = f"{len(empty)} examples have an empty context or ending: {places(empty)}"
        findings.append(
            Finding("rows", "error", what, fix="Complete these rows, or take them out.")
        )
    double = [e.where for e in examples if len({*e.endings}) < len(e.endings)]
    if double:
        what = f"{len(double)} examples have the same ending twice, so that there are two answers: {places(double)}"
        findings.append(Finding("rows", "warning", what))
    return findings


def _check_answers(examples: Many[ChoiceExample]) -> list[Finding]:
    outside = [
        f"{e.where} ({e.label} of {len(e.endings)})"
        for e in examples
        if e.label is not None and not 0 <= e.label < len(e.endings)
    ]
    findings = check_answered([e.where for e in examples if e.label is None])
    if outside:
        what = f"{len(outside)} labels are the place of no ending: {places(outside)}"
        fix = "A label is the place of the right ending, counted from 0."
        findings.append(Finding("labels", "error", what, fix=fix))
    return findings


def _check_positions(train: Many[ChoiceExample]) -> list[Finding]:
    counts = Counter(e.label for e in train if e.label is not None)
    if not counts:
        return []
    (top, most), total = counts.most_common(1)[0], counts.total()
    what = f"always answering {top} would be right on {most / total:.1%} of the training data"
    if most < total:
        return [Finding("balance", "note", what)]
    fix = "Check the label column; are the endings shuffled?"
    return [Finding("balance", "warning", what, fix=fix)]
