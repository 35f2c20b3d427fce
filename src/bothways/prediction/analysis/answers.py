"""Analysis of answers from a text: kinds of errors and calibration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from bothways.core.report import sections as s
from bothways.prediction.analysis.base import GUESSES, SURE, Judgement, TaskAnalysis, clip
from bothways.tasks.base import Metrics
from bothways.tasks.predictions import AnswerPrediction
from bothways.tasks.question_answering.examples import Question
from bothways.tasks.question_answering.metrics import grade_answer

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


def classify_answer(example: Question, prediction: AnswerPrediction) -> QuestionKind:
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
        super().__init__()
        self.kinds: Counter[QuestionKind] = Counter()

    def add(self, example: Question, prediction: AnswerPrediction) -> None:
        self.kinds[classify_answer(example, prediction)] += 1
        exact = bool(grade_answer(prediction.text, example).exact)
        self.calibration.add(prediction.confidence, exact)

    def judge(self, example: Question, prediction: AnswerPrediction) -> Judgement:
        """Doubt the label where a sure answer shares no word with a right one."""
        f1, confidence = grade_answer(prediction.text, example).f1, prediction.confidence
        sure = confidence >= SURE and not f1
        return Judgement(confidence * (1 - f1), confidence if sure else None)

    def show(self, example: Question, prediction: AnswerPrediction) -> s.ReportExample:
        exact = bool(grade_answer(prediction.text, example).exact)
        answer = s.ReportGuess(prediction.text or NONE, prediction.confidence, exact)
        spans = [
            s.ReportGuess(span.text, span.probability, bool(grade_answer(span.text, example).exact))
            for span in prediction.spans
        ]
        best = [answer, *(guess for guess in spans if guess.answer != answer.answer)][:GUESSES]
        truth = " / ".join(sorted({text for text, _ in example.answers})) or NONE
        pieces = [f"{example.question} ‖ ", *_context(example.context, prediction)]
        return s.ReportExample(pieces, truth, best, example.where)

    def baseline(self) -> Metrics:
        """Return the share of questions without an answer, for which giving none is right."""
        none = self.kinds["right to give none"] + self.kinds["answer though there is none"]
        share = none / max(1, self.kinds.total())
        return {"em": share, "f1": share, "f1_best": share} if 0 < share < 1 else {}

    def sections(self) -> list[s.Section]:
        total = max(1, self.kinds.total())
        rows: list[Sequence[s.Cell]] = [
            [kind, meaning, self.kinds[kind], s.percentage(self.kinds[kind] / total)]
            for kind, meaning in KINDS.items()
        ]
        columns = ["kind", "", "questions", "share"]
        return [s.TableSection("Answers by kind", columns, rows), *self.reliability()]


def _context(context: str, prediction: AnswerPrediction) -> list[str | s.Marked]:
    """Return the context with the answer marked, clipped to its surroundings."""
    start, end = prediction.start, prediction.end
    if start is None or end is None:
        return [clip(context)]
    begin, stop = max(0, start - AROUND), end + AROUND
    return [
        ("… " if begin else "") + context[begin:start],
        s.Marked(context[start:end]),
        context[end:stop] + (" …" if stop < len(context) else ""),
    ]
