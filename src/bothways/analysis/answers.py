"""Analysis of answers from a text: errors by kind, and whether confidence holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Many
from typing import Literal

from bothways.analysis.base import GUESSES, SURE, Analyst, clip_text, reliability
from bothways.analysis.calibration import Calibration
from bothways.report import sections as s
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


def kind_of(example: Question, prediction: AnswerPrediction) -> QuestionKind:
    """What a prediction is; the question is annotated."""
    result = grade_answer(prediction.text, example)
    if not example.answers:
        return "right to give none" if not prediction.text else "answer though there is none"
    if result.exact:
        return "right"
    if not prediction.text:
        return "no answer given"
    return "boundary wrong" if result.f1 else "another place"


class AnswerAnalysis(Analyst[Question, AnswerPrediction]):
    """Kinds of errors and calibration."""

    grade, loss = "F1", "confidence × (1 − F1)"

    def __init__(self) -> None:
        self.kinds: Counter[QuestionKind] = Counter()
        self.calibration = Calibration()

    def see(self, example: Question, prediction: AnswerPrediction) -> None:
        """Count it; it is annotated."""
        self.kinds[kind_of(example, prediction)] += 1
        self.calibration.add(
            prediction.confidence, bool(grade_answer(prediction.text, example).exact)
        )

    def cost(self, example: Question, prediction: AnswerPrediction) -> float:
        """How sure it is, times how wrong."""
        return prediction.confidence * (1 - grade_answer(prediction.text, example).f1)

    def doubt(self, example: Question, prediction: AnswerPrediction) -> float | None:
        """The confidence of a sure answer that shares no word with a right one."""
        return (
            prediction.confidence
            if prediction.confidence >= SURE and not grade_answer(prediction.text, example).f1
            else None
        )

    def shown(self, example: Question, prediction: AnswerPrediction) -> s.ReportExample:
        """The question, the context around the answer, the right answers and the best spans."""
        right = {text for text, _ in example.answers}
        given = s.ReportGuess(
            prediction.text or NONE,
            prediction.confidence,
            bool(grade_answer(prediction.text, example).exact),
        )
        others = [
            s.ReportGuess(span.text, span.probability, bool(grade_answer(span.text, example).exact))
            for span in prediction.spans
        ]
        guesses = [given, *(guess for guess in others if guess.answer != given.answer)][:GUESSES]
        return s.ReportExample(
            [f"{example.question} ‖ ", *_context(example.context, prediction)],
            " / ".join(sorted(right)) or NONE,
            guesses,
            example.where,
        )

    def sections(self) -> list[s.Section]:
        """Kinds, calibration."""
        total = self.kinds.total()
        rows: list[Many[s.Cell]] = [
            [kind, said, self.kinds[kind], s.percentage(self.kinds[kind] / max(1, total))]
            for kind, said in KINDS.items()
        ]
        return [
            s.TableSection("What becomes of questions", ["kind", "", "questions", "share"], rows),
            *reliability(self.calibration),
        ]


def _context(context: str, prediction: AnswerPrediction) -> list[str | s.Marked]:
    """The context with the answer marked, cut to what is near it."""
    if prediction.start is None or prediction.end is None:
        return [clip_text(context)]
    around = 200
    first, last = max(0, prediction.start - around), prediction.end + around
    before, after = context[first : prediction.start], context[prediction.end : last]
    return [
        ("… " if first else "") + before,
        s.Marked(context[prediction.start : prediction.end]),
        after + (" …" if last < len(context) else ""),
    ]
