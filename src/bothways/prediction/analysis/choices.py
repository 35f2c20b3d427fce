"""Analysis of choices: confusion of places, and calibration."""

from __future__ import annotations

from collections import Counter

from bothways.core.report import sections as s
from bothways.prediction.analysis.base import SURE, TaskAnalysis, clip_text, guesses, reliability
from bothways.prediction.analysis.calibration import Calibration
from bothways.prediction.analysis.classes import class_table, confusion_sections
from bothways.tasks.base import Metrics
from bothways.tasks.choice.examples import ChoiceExample
from bothways.tasks.metrics import Confusion, negative_log
from bothways.tasks.predictions import ChoicePrediction


class ChoiceAnalysis(TaskAnalysis[ChoiceExample, ChoicePrediction]):
    """Confusion of places and calibration."""

    grade_name, cost_name = "accuracy", "cross-entropy"

    def __init__(self) -> None:
        self.pairs: Counter[tuple[int, int]] = Counter()
        self.calibration = Calibration()

    def add(self, example: ChoiceExample, prediction: ChoicePrediction) -> None:
        """Count a prediction."""
        self.pairs[_label(example), prediction.index] += 1
        self.calibration.add(max(prediction.probabilities), prediction.index == example.label)

    def cost(self, example: ChoiceExample, prediction: ChoicePrediction) -> float:
        """Return the cross-entropy in nats."""
        return negative_log(prediction.probabilities[_label(example)])

    def doubt(self, example: ChoiceExample, prediction: ChoicePrediction) -> float | None:
        """Return the lead of another ending over the given one, where the model is sure of it."""
        top, given = max(prediction.probabilities), prediction.probabilities[_label(example)]
        return top - given if prediction.index != example.label and top >= SURE else None

    def show(self, example: ChoiceExample, prediction: ChoicePrediction) -> s.ReportExample:
        """Return the context and the most probable endings."""
        endings = [f"{place}. {clip_text(text)}" for place, text in enumerate(example.endings, 1)]
        truth = endings[_label(example)]
        named = dict(zip(endings, prediction.probabilities, strict=True))
        return s.ReportExample(
            [clip_text(example.context)], truth, guesses(named, truth), example.where
        )

    def baseline(self) -> Metrics:
        """Return the accuracy of always choosing the most frequent place."""
        truth: Counter[int] = Counter()
        for (place, _), count in self.pairs.items():
            truth[place] += count
        return {"accuracy": max(truth.values()) / truth.total()} if truth else {}

    def sections(self) -> list[s.Section]:
        """Return the sections of a report."""
        size = 1 + max(max(pair) for pair in self.pairs)
        counts = Confusion(size, self.pairs.elements())
        names = [f"ending {place + 1}" for place in range(size)]
        confusions, table = confusion_sections(names, counts), class_table(names, counts)
        return [*confusions, table, *reliability(self.calibration)]


def _label(example: ChoiceExample) -> int:
    assert example.label is not None
    return example.label
