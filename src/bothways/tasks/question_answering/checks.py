"""Preflight of questions: texts, ids, answers, and what training and development data share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Many
from typing import Literal

from bothways.core.finding import Finding, places
from bothways.tasks.question_answering.examples import ANYWHERE, Question, located
from bothways.tasks.text_checks import check_overlap


def check_questions(
    train: Many[Question],
    dev: Many[Question],
    unfound: Literal["skip", "error"],
    threshold: float | None,
) -> list[Finding]:
    """Everything that questions can have wrong; `dev` may be empty. The last two are of the definition."""
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
    every, findings = [*train, *dev], []
    twice = [
        example.where
        for some in (train, dev)
        for counts in [Counter(example.id for example in some)]
        for example in some
        if counts[example.id] > 1
    ]
    faults = {
        "have an empty question": [
            example.where for example in every if not example.question.strip()
        ],
        "have an empty context": [
            example.where for example in every if not example.context.strip()
        ],
        "share their id with others": twice,
        "have no answer and are not said to be impossible": [
            example.where for example in every if not example.annotated
        ],
    }
    for fault, found in faults.items():
        if found:
            what = f"{len(found)} questions {fault}: {places(found)}"
            findings.append(
                Finding("rows", "error", what, fix="Mend these questions, or take them out.")
            )
    return findings


def _check_places(train: Many[Question], unfound: Literal["skip", "error"]) -> list[Finding]:
    """Whether the answers to learn stand in their contexts, and where they are said to."""
    absent, moved = list[str](), list[str]()
    for example in train:
        for text, start in example.answers[:1]:
            place = located(example.context, text.strip(), start + text.index(text.strip()))
            if place is None:
                absent.append(f"{example.where} ({text[:40]!r})")
            elif start != ANYWHERE and place != start + text.index(text.strip()):
                moved.append(f"{example.where} ({text[:40]!r})")
    findings = []
    if absent:
        what = f"{len(absent)} of {len(train)} training questions have an answer that does not stand in their context"
        nothing = len(absent) == len(train)
        what += (
            ", and are not learned from: " if unfound == "skip" and not nothing else ": "
        ) + places(absent)
        severity: Literal["error", "warning"] = (
            "error" if nothing or unfound == "error" else "warning"
        )
        fix = "Mend these answers" + (
            ", or set task.unfound=skip." if not nothing else ": there is nothing else to learn."
        )
        findings.append(Finding("labels", severity, what, fix=fix if severity == "error" else None))
    if moved:
        what = f"{len(moved)} training answers do not begin where it is said; the nearest occurrence is taken: {places(moved)}"
        findings.append(Finding("labels", "note", what))
    return findings


def _check_reachable(dev: Many[Question]) -> list[Finding]:
    """Dev questions of which no right answer stands in the context: no prediction is quite right there."""
    lost = [
        f"{example.where} ({example.answers[0][0][:40]!r})"
        for example in dev
        if example.answers
        and not any(text.strip() in example.context for text, _ in example.answers)
    ]
    if not lost:
        return []
    what = f"{len(lost)} of {len(dev)} dev questions have no answer that stands in their context, and count all the same: "
    return [Finding("labels", "warning", what + places(lost))]


def _check_impossible(
    train: Many[Question], dev: Many[Question], threshold: float | None
) -> list[Finding]:
    counts = [sum(example.impossible is True for example in some) for some in (train, dev)]
    findings = []
    if any(counts):
        shares = [
            f"{count / len(some):.1%} of the {name} questions"
            for name, some, count in zip(("training", "dev"), (train, dev), counts, strict=True)
            if some
        ]
        findings.append(
            Finding("balance", "note", f"no answer is right for {' and '.join(shares)}")
        )
    if counts[0] == len(train):
        findings.append(
            Finding(
                "labels",
                "error",
                "no training question has an answer",
                fix="Give questions that have one.",
            )
        )
    elif counts[0] and not counts[1] and threshold is None:
        what = "training questions without an answer, but no such dev questions: the threshold is not chosen, every question gets"
        fix = "Give dev data that has some, or set task.threshold=0."
        findings.append(Finding("labels", "warning", f"{what} an answer", "task.threshold", fix))
    if counts[1] and not counts[0]:
        what = "there are dev questions without an answer, but no training question is: that there is none is hardly learned"
        findings.append(Finding("labels", "warning", what))
    return findings
