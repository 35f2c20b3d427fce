"""Checks of multiple-choice data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Many
from dataclasses import replace

from bothways.core.finding import Finding
from bothways.tasks import text_checks
from bothways.tasks.choice.examples import ChoiceExample


def check_choices(train: Many[ChoiceExample], dev: Many[ChoiceExample]) -> list[Finding]:
    """Return the problems of questions with endings; `dev` may be empty."""
    return [
        *_check_endings([*train, *dev]),
        *_check_labels([*train, *dev]),
        *_check_balance(train),
        *text_checks.check_overlap(train, dev, lambda example: (example.context, example.endings)),
    ]


def _check_endings(examples: Many[ChoiceExample]) -> list[Finding]:
    short = [e.where for e in examples if len(e.endings) < 2]
    empty = [e.where for e in examples if not all(text.strip() for text in (e.context, *e.endings))]
    double = [e.where for e in examples if len({*e.endings}) < len(e.endings)]
    return [
        *text_checks.report_rows(
            "rows", short, "example(s) has|have fewer than two endings", text_checks.COMPLETE
        ),
        *text_checks.report_rows(
            "rows",
            empty,
            "example(s) has|have an empty context or ending",
            text_checks.COMPLETE,
        ),
        *text_checks.report_rows(
            "rows", double, "example(s) has|have the same ending twice", severity="warning"
        ),
    ]


def _check_labels(examples: Many[ChoiceExample]) -> list[Finding]:
    outside = [
        f"{e.where} ({e.label} of {len(e.endings)})"
        for e in examples
        if e.label is not None and not 0 <= e.label < len(e.endings)
    ]
    fix = "A label is the place of the right ending, counted from 0."
    return [
        *text_checks.check_answered([e.where for e in examples if e.label is None], len(examples)),
        *text_checks.report_rows("labels", outside, "label(s) is|are out of range", fix),
    ]


def _check_balance(train: Many[ChoiceExample]) -> list[Finding]:
    counts = Counter(e.label for e in train if e.label is not None)
    if not counts:
        return []
    findings = text_checks.check_constant(counts)
    if len(counts) > 1:
        return findings
    fix = "Check the label column; are the endings shuffled?"
    return [replace(finding, severity="warning", fix=fix) for finding in findings]
