"""Checks of multiple-choice data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Many

from bothways.core.finding import Finding, places
from bothways.tasks.choice.examples import ChoiceExample
from bothways.tasks.text_checks import check_answered, check_overlap

_COMPLETE = "Complete these rows or remove them."


def check_choices(train: Many[ChoiceExample], dev: Many[ChoiceExample]) -> list[Finding]:
    """Return the problems of questions with endings; `dev` may be empty."""
    return [
        *_check_endings([*train, *dev]),
        *_check_labels([*train, *dev]),
        *_check_balance(train),
        *check_overlap(train, dev, lambda example: (example.context, example.endings)),
    ]


def _check_endings(examples: Many[ChoiceExample]) -> list[Finding]:
    findings = []
    few = [e.where for e in examples if len(e.endings) < 2]
    if few:
        what = f"{len(few)} examples have fewer than two endings: {places(few)}"
        findings.append(Finding("rows", "error", what, fix=_COMPLETE))
    empty = [e.where for e in examples if not all(text.strip() for text in (e.context, *e.endings))]
    if empty:
        what = f"{len(empty)} examples have an empty context or ending: {places(empty)}"
        findings.append(Finding("rows", "error", what, fix=_COMPLETE))
    double = [e.where for e in examples if len({*e.endings}) < len(e.endings)]
    if double:
        what = f"{len(double)} examples have the same ending twice: {places(double)}"
        findings.append(Finding("rows", "warning", what))
    return findings


def _check_labels(examples: Many[ChoiceExample]) -> list[Finding]:
    findings = check_answered([e.where for e in examples if e.label is None])
    outside = [
        f"{e.where} ({e.label} of {len(e.endings)})"
        for e in examples
        if e.label is not None and not 0 <= e.label < len(e.endings)
    ]
    if outside:
        what = f"{len(outside)} labels are out of range: {places(outside)}"
        fix = "A label is the place of the right ending, counted from 0."
        findings.append(Finding("labels", "error", what, fix=fix))
    return findings


def _check_balance(train: Many[ChoiceExample]) -> list[Finding]:
    counts = Counter(e.label for e in train if e.label is not None)
    if not counts:
        return []
    (top, most), total = counts.most_common(1)[0], counts.total()
    what = f"always answering {top} would be right for {most / total:.1%} of the training data"
    if most < total:
        return [Finding("balance", "note", what)]
    fix = "Check the label column; are the endings shuffled?"
    return [Finding("balance", "warning", what, fix=fix)]
