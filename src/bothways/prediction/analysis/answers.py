"""Analysis of answers from a text: kinds of errors and calibration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Many
from typing import Literal

from bothways.core.report import sections as s
from bothways.prediction.analysis.base import GUESSES, SURE, TaskAnalysis, clip_text, reliability
from bothways.prediction.analysis.calibration import Calibration
from bothways.tasks.base import Metrics
from bothways.tasks.predictions import AnswerPrediction
from bothways.tasks.question_answering.examples import Question
from bothways.tasks.question_answering.metrics import Grade, grade_answer

QuestionKind = Literal[
    "right",
    "right to give none",
    "boundary wrong",
    "another place",
    "no answer given",
    "answer though there is none",
]
KINDS: dict[QuestionKind, str] = {
    "right": "exactly a right answer",
    "right to give none": "there is no answer, and none was given",
    "boundary wrong": "shares words with a right answer",
    "another place": "shares no word with a right answer",
    "no answer given": "there is an answer",
    "answer though there is none": "there is no answer",
}
NONE = "(no answer)"
AROUND = 200
"""Number of characters of the context that are shown on each side of an answer."""


def kind_of(example: Question, prediction: AnswerPrediction) -> QuestionKind:
    """Return the kind of a prediction; the question is annotated."""
    grade = grade_answer(prediction.text, example)
    if not example.answers:
        return "right to give none" if not prediction.text else "answer though there is none"
    if grade.exact:
        return "right"
    if not prediction.text:
        return "no answer given"
    return "boundary wrong" if grade.f1 else "another place"


class AnswerAnalysis(TaskAnalysis[Question, AnswerPrediction]):
    """Kinds of errors and calibration."""

    grade_name, cost_name = "F1", "confidence × (1 − F1)"

    def __init__(self) -> None:
        self.kinds: Counter[QuestionKind] = Counter()
        self.calibration = Calibration()

    def add(self, example: Question, prediction: AnswerPrediction) -> None:
        """Count a prediction."""
        self.kinds[kind_of(example, prediction)] += 1
        self.calibration.add(prediction.confidence, bool(_grade(example, prediction).exact))

    def cost(self, example: Question, prediction: AnswerPrediction) -> float:
        """Return the confidence in an answer times 1 − F1."""
        return prediction.confidence * (1 - _grade(example, prediction).f1)

    def doubt(self, example: Question, prediction: AnswerPrediction) -> float | None:
        """Return the confidence of a sure answer that shares no word with a right one."""
        sure = prediction.confidence >= SURE and not _grade(example, prediction).f1
        return prediction.confidence if sure else None

    def show(self, example: Question, prediction: AnswerPrediction) -> s.ReportExample:
        """Return the question, the context around the answer, the right answers and best spans."""
        right = bool(_grade(example, prediction).exact)
        given = s.ReportGuess(prediction.text or NONE, prediction.confidence, right)
        others = [
            s.ReportGuess(span.text, span.probability, bool(grade_answer(span.text, example).exact))
            for span in prediction.spans
        ]
        best = [given, *(guess for guess in others if guess.answer != given.answer)][:GUESSES]
        truth = " / ".join(sorted({text for text, _ in example.answers})) or NONE
        parts = [f"{example.question} ‖ ", *_context(example.context, prediction)]
        return s.ReportExample(parts, truth, best, example.where)

    def baseline(self) -> Metrics:
        """Return the share of questions without an answer, for which giving none is right."""
        none = self.kinds["right to give none"] + self.kinds["answer though there is none"]
        share = none / max(1, self.kinds.total())
        return {"em": share, "f1": share, "f1_best": share} if 0 < share < 1 else {}

    def sections(self) -> list[s.Section]:
        """Return the sections of a report."""
        total = max(1, self.kinds.total())
        rows: list[Many[s.Cell]] = [
            [kind, meaning, self.kinds[kind], s.percentage(self.kinds[kind] / total)]
            for kind, meaning in KINDS.items()
        ]
        columns = ["kind", "", "questions", "share"]
        table = s.TableSection("Answers by kind", columns, rows)
        return [table, *reliability(self.calibration)]


def _grade(example: Question, prediction: AnswerPrediction) -> Grade:
    return grade_answer(prediction.text, example)


def _context(context: str, prediction: AnswerPrediction) -> list[str | s.Marked]:
    """Return the context with the answer marked, clipped to its surroundings."""
    if prediction.start is None or prediction.end is None:
        return [clip_text(context)]
    first, last = max(0, prediction.start - AROUND), prediction.end + AROUND
    before, after = context[first : prediction.start], context[prediction.end : last]
    return [
        ("… " if first else "") + before,
        s.Marked(context[prediction.start : prediction.end]),
        after + (" …" if last < len(context) else ""),
    ]
