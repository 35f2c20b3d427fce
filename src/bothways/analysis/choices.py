"""Analysis of choices: which place is taken for which, and whether probabilities hold."""

from __future__ import annotations

from collections import Counter

import numpy as np

from bothways.analysis.base import SURE, Analyst, clip_text, guesses, reliability
from bothways.analysis.calibration import Calibration
from bothways.analysis.classes import by_class, confusion
from bothways.report import sections as s
from bothways.tasks.choice.examples import ChoiceExample
from bothways.tasks.predictions import ChoicePrediction


class ChoiceAnalysis(Analyst[ChoiceExample, ChoicePrediction]):
    """Confusions of places and calibration."""

    grade, loss = "accuracy", "cross-entropy"

    def __init__(self) -> None:
        self.pairs: Counter[tuple[int, int]] = Counter()
        self.calibration = Calibration()

    def see(self, example: ChoiceExample, prediction: ChoicePrediction) -> None:
        """Count it; it has a label."""
        self.pairs[_label(example), prediction.index] += 1
        self.calibration.add(max(prediction.probabilities), prediction.index == example.label)

    def cost(self, example: ChoiceExample, prediction: ChoicePrediction) -> float:
        """The cross-entropy, in nats."""
        return -float(
            np.log(max(prediction.probabilities[_label(example)], np.finfo(np.float64).tiny))
        )

    def doubt(self, example: ChoiceExample, prediction: ChoicePrediction) -> float | None:
        """The lead of another ending over the given one, where the model is sure of it."""
        top, given = max(prediction.probabilities), prediction.probabilities[_label(example)]
        return top - given if prediction.index != example.label and top >= SURE else None

    def shown(self, example: ChoiceExample, prediction: ChoicePrediction) -> s.ReportExample:
        """The context, and the most probable endings."""
        named = dict(zip(_numbered(example), prediction.probabilities, strict=True))
        truth = _numbered(example)[_label(example)]
        return s.ReportExample(
            [clip_text(example.context)], truth, guesses(named, truth), example.where
        )

    def sections(self) -> list[s.Section]:
        """Places and calibration."""
        most = 1 + max(max(pair) for pair in self.pairs)
        counts, names = (
            np.zeros((most, most), dtype=np.int64),
            [f"ending {place + 1}" for place in range(most)],
        )
        for (truth, found), count in self.pairs.items():
            counts[truth, found] = count
        return [confusion(names, counts), by_class(names, counts), *reliability(self.calibration)]


def _numbered(example: ChoiceExample) -> list[str]:
    return [f"{place}. {clip_text(ending)}" for place, ending in enumerate(example.endings, 1)]


def _label(example: ChoiceExample) -> int:
    assert example.label is not None
    return example.label
