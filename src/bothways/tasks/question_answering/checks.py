"""Checks of questions: texts, ids, answers, and overlap of train and dev."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Many
from typing import Literal

from bothways.core.finding import Finding, places
from bothways.tasks.question_answering.examples import ANYWHERE, Question, located
from bothways.tasks.text_checks import check_overlap, report_rows


def check_questions(
    train: Many[Question],
    dev: Many[Question],
    unfound: Literal["skip", "error"],
    threshold: float | None,
) -> list[Finding]:
    """Return the problems of questions; `dev` may be empty."""
    return [
        *_check_rows(train, dev),
        *_check_places(train, unfound),
        *_check_reachable(dev),
        *_check_impossible(train, dev, threshold),
        *check_overlap(
            train, dev, lambda example: (example.question, example.context), "questions"
        ),
    ]


def _check_rows(train: Many[Question], dev: Many[Question]) -> list[Finding]:
    examples, twice = [*train, *dev], list[str]()
    for some in (train, dev):
        counts = Counter(example.id for example in some)
        twice += [example.where for example in some if counts[example.id] > 1]
    faults = {
        "has|have an empty question": [e.where for e in examples if not e.question.strip()],
        "has|have an empty context": [e.where for e in examples if not e.context.strip()],
        "shares|share their id with others": twice,
        "has|have no answer and is|are not marked as impossible": [
            e.where for e in examples if not e.annotated
        ],
    }
    fix = "Fix these questions or remove them."
    rows = (
        report_rows("rows", where, f"question(s) {fault}", fix) for fault, where in faults.items()
    )
    return [finding for found in rows for finding in found]


def _check_places(train: Many[Question], unfound: Literal["skip", "error"]) -> list[Finding]:
    """Report answers that are not in their context, or not where the data places them."""
    absent, moved = list[str](), list[str]()
    for example in train:
        for text, start in example.answers[:1]:
            expected = start + text.index(text.strip())
            position = located(example.context, text.strip(), expected)
            if position is None:
                absent.append(f"{example.where} ({text[:40]!r})")
            elif start != ANYWHERE and position != expected:
                moved.append(f"{example.where} ({text[:40]!r})")
    findings = []
    if absent:
        all_absent = len(absent) == len(train)
        skipped = unfound == "skip" and not all_absent
        message = f"{len(absent)} of {len(train)} training questions have an answer that is not in "
        message += f"their context{' and are skipped' * skipped}: {places(absent)}"
        fix = "Fix these answers" + (
            "; there is nothing else to learn." if all_absent else ", or set task.unfound=skip."
        )
        severity: Literal["error", "warning"] = "warning" if skipped else "error"
        findings.append(Finding("labels", severity, message, fix=None if skipped else fix))
    fault = "training answer(s) does|do not begin at the given character; "
    fault += "the nearest occurrence is used"
    return findings + report_rows("labels", moved, fault, severity="note")


def _check_reachable(dev: Many[Question]) -> list[Finding]:
    """Report dev questions without a right answer in the context: no prediction can be exact."""
    lost = [
        f"{example.where} ({example.answers[0][0][:40]!r})"
        for example in dev
        if example.answers
        and not any(text.strip() in example.context for text, _ in example.answers)
    ]
    fault = f"of {len(dev)} dev questions has|have no answer in their context, but count"
    return report_rows("labels", lost, fault, severity="warning")


def _check_impossible(
    train: Many[Question], dev: Many[Question], threshold: float | None
) -> list[Finding]:
    in_train, in_dev = (sum(e.impossible is True for e in some) for some in (train, dev))
    findings = []
    if in_train or in_dev:
        shares = [
            f"{count / len(some):.1%} of the {name} questions"
            for name, some, count in (("training", train, in_train), ("dev", dev, in_dev))
            if some
        ]
        message = f"no answer is right for {' and '.join(shares)}"
        findings.append(Finding("balance", "note", message))
    if in_train == len(train):
        message, fix = "no training question has an answer", "Give questions that have one."
        findings.append(Finding("labels", "error", message, fix=fix))
    elif in_train and not in_dev and threshold is None:
        message = (
            "there are training questions without an answer, but no such dev questions: the "
            "threshold is not chosen, and every question gets an answer"
        )
        fix = "Give dev data that has some, or set task.threshold=0."
        findings.append(Finding("labels", "warning", message, "task.threshold", fix))
    if in_dev and not in_train:
        message = (
            "there are dev questions without an answer, but no such training questions: a model "
            "hardly learns to give none"
        )
        findings.append(Finding("labels", "warning", message))
    return findings
