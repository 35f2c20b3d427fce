"""Checks of queries with documents."""

from __future__ import annotations

from collections.abc import Sequence as Many

from bothways.core.finding import Finding
from bothways.tasks.reranking.examples import RankExample
from bothways.tasks.text_checks import COMPLETE, check_answered, check_overlap, report_rows


def check_rankings(train: Many[RankExample], dev: Many[RankExample]) -> list[Finding]:
    """Return the problems of queries with documents; `dev` may be empty."""
    every = (*train, *dev)
    empty = [e.where for e in every if not all(text.strip() for text in (e.query, *e.documents))]
    without = [e.where for e in every if not e.documents]
    high = [e.where for e in train if any(label > 1 for label in e.labels or ())]
    fix = "Divide them by the highest grade; dev data may keep its grades."
    return [
        *report_rows("rows", without, "examples have no document", COMPLETE),
        *report_rows("rows", empty, "examples have an empty query or document", COMPLETE),
        *check_answered([e.where for e in every if e.labels is None]),
        *report_rows("labels", high, "training examples have labels above 1", fix),
        *_check_balance(train, dev),
        *check_overlap(train, dev, lambda example: example.query, "queries"),
    ]


def _check_balance(train: Many[RankExample], dev: Many[RankExample]) -> list[Finding]:
    labels = {label for e in train for label in e.labels or ()}
    findings = []
    if len(labels) == 1:
        what = f"all training documents have the label {labels.pop():g}: there is nothing to learn"
        fix = "Add documents that are not relevant (0), or relevant ones."
        findings.append(Finding("balance", "error", what, fix=fix))
    relevant = {e.query for e in dev if any(label > 0 for label in e.labels or ())}
    without = list({e.query: e.where for e in dev if e.query not in relevant}.values())
    fault = "dev queries have no relevant document, and count 0 in each metric"
    return findings + report_rows("balance", without, fault, severity="warning")
