"""Analysis of answers from a text: kinds of errors and calibration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bothways.core.report import sections as s
from bothways.prediction.analysis.base import GUESSES, SURE, Judgement, TaskAnalysis, clip
from bothways.tasks.base import Metrics
from bothways.tasks.predictions import AnswerPrediction
from bothways.tasks.question_answering.examples import Question
from bothways.tasks.question_answering.metrics import grade_answer

KINDS = {
    "right": "exactly a right answer",
    "right to give none": "there is no answer, and none was given",
    "boundary wrong": "shares words with a right answer",
    "another place": "shares no word with a right answer",
    "no answer given": "there is an answer",
    "answer though there is none": "there is no answer",
}
"""The kinds of predictions with their meaning."""
NONE = "(no answer)"
AROUND = 200
"""Number of characters of the context that are shown on each side of an answer."""


def classify_answer(example: Question, prediction: AnswerPrediction) -> str:
    """Return the kind of a prediction, one of `KINDS`; the question is annotated."""
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
        self.kinds: Counter[str] = Counter()

    def add(self, example: Question, prediction: AnswerPrediction) -> Judgement:
        """Doubt the label where a sure answer shares no word with a right one."""
        grade, confidence = grade_answer(prediction.text, example), prediction.confidence
        self.kinds[classify_answer(example, prediction)] += 1
        self.calibration.add(confidence, bool(grade.exact))
        sure = confidence >= SURE and not grade.f1
        return Judgement(confidence * (1 - grade.f1), confidence if sure else None)

    def show(self, example: Question, prediction: AnswerPrediction) -> s.ReportExample:
        answers = {prediction.text: prediction.confidence}
        for span in prediction.spans:
            answers.setdefault(span.text, span.probability)
        best = [
            s.ReportGuess(text or NONE, confidence, bool(grade_answer(text, example).exact))
            for text, confidence in answers.items()
        ]
        truth = " / ".join(sorted({text for text, _ in example.answers})) or NONE
        context, start, end = example.context, prediction.start, prediction.end
        pieces: list[str | s.Marked] = [clip(context)]
        if start is not None and end is not None:  # the surroundings of the answer
            begin, stop = max(0, start - AROUND), end + AROUND
            pieces = [
                ("… " if begin else "") + context[begin:start],
                s.Marked(context[start:end]),
                context[end:stop] + (" …" if stop < len(context) else ""),
            ]
        pieces.insert(0, f"{example.question} ‖ ")
        return s.ReportExample(pieces, truth, best[:GUESSES], example.where)

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
