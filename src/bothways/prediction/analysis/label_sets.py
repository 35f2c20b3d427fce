"""Analysis of any number of labels: each label by itself, and calibration."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
from numpy.typing import NDArray

from bothways.core.report import sections as s
from bothways.prediction.analysis.base import SURE, TaskAnalysis, clip_pair, reliability
from bothways.prediction.analysis.calibration import Calibration
from bothways.prediction.analysis.classes import rates_table
from bothways.tasks.base import Metrics
from bothways.tasks.metrics import multilabel_metrics
from bothways.tasks.multilabel.examples import MultilabelExample
from bothways.tasks.multilabel.task import LEAST, constant_labels
from bothways.tasks.predictions import MultilabelPrediction

LISTED = 5
"""Number of labels that are shown of an example: those furthest from the truth."""


class LabelSetAnalysis(TaskAnalysis[MultilabelExample, MultilabelPrediction]):
    """Counts for each label.

    Args:
        labels: of the model, in order.
    """

    grade_name, cost_name = "all labels right", "cross-entropy"

    def __init__(self, labels: Many[str]) -> None:
        self.labels = tuple(labels)
        self.examples = 0
        self.hits, self.true, self.given = np.zeros((3, len(labels)), dtype=np.int64)
        self.calibration = Calibration()

    def add(self, example: MultilabelExample, prediction: MultilabelPrediction) -> None:
        """Count a prediction."""
        truth, given = self._held(example.labels), self._held(prediction.labels)
        self.examples += 1
        self.hits += truth & given
        self.true += truth
        self.given += given
        for probability, held in zip(
            prediction.probabilities.values(), truth.tolist(), strict=True
        ):
            self.calibration.add(probability, held)

    def cost(self, example: MultilabelExample, prediction: MultilabelPrediction) -> float:
        """Return the mean cross-entropy over labels, in nats."""
        return -float(np.log(np.maximum(1 - self._misses(example, prediction), LEAST)).mean())

    def doubt(self, example: MultilabelExample, prediction: MultilabelPrediction) -> float | None:
        """Return the distance of the worst label from the truth, where the model is sure."""
        worst = float(self._misses(example, prediction).max())
        return worst if worst >= SURE else None

    def show(self, example: MultilabelExample, prediction: MultilabelPrediction) -> s.ReportExample:
        """Return the texts and the labels furthest from the truth."""
        furthest = np.argsort(-self._misses(example, prediction), kind="stable")[:LISTED]
        names, held = [self.labels[place] for place in furthest], set(example.labels or ())
        shown = [
            s.ReportGuess(name, prediction.probabilities[name], name in held) for name in names
        ]
        truth = ", ".join(example.labels or ()) or "no label"
        parts = clip_pair(example.text, example.text_b)
        return s.ReportExample(parts, truth, shown, example.where)

    def baseline(self) -> Metrics:
        """Return F1 of always assigning the most frequent labels."""
        given = constant_labels(self.true, self.examples)
        assigned = given * self.examples
        right = np.where(given, self.true, 0)
        return multilabel_metrics(right, self.true + assigned - 2 * right)

    def sections(self) -> list[s.Section]:
        """Return the sections of a report."""
        columns = (self.hits.tolist(), self.true.tolist(), self.given.tolist())
        table = rates_table("Each label", "label", list(zip(self.labels, *columns, strict=True)))
        return [table, *reliability(self.calibration, "labels")]

    def _held(self, labels: tuple[str, ...] | None) -> NDArray[np.bool_]:
        held = set(labels or ())
        return np.array([name in held for name in self.labels])

    def _misses(
        self, example: MultilabelExample, prediction: MultilabelPrediction
    ) -> NDArray[np.float64]:
        """Return the distance of each label's probability from 1 where it holds, else from 0."""
        chances = np.array(list(prediction.probabilities.values()), dtype=np.float64)
        return np.where(self._held(example.labels), 1 - chances, chances)
