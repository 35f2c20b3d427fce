"""Analysis of any number of labels: each label by itself, and whether probabilities hold."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
from numpy.typing import NDArray

from bothways.analysis.base import SURE, Analyst, clip_text, reliability
from bothways.analysis.calibration import Calibration
from bothways.analysis.classes import rates
from bothways.report import sections as s
from bothways.tasks.multilabel.examples import MultilabelExample
from bothways.tasks.predictions import MultilabelPrediction

TINY = 1e-16
"""No probability counts as nearer to 0 or 1."""
LISTED = 5
"""Labels that are shown of an example, those that are furthest from the truth."""


class LabelSetAnalysis(Analyst[MultilabelExample, MultilabelPrediction]):
    """Counts for each label.

    Args:
        labels: of the model, in order.
    """

    grade, loss = "all labels right", "cross-entropy"

    def __init__(self, labels: Many[str]) -> None:
        self.labels = tuple(labels)
        self.hits, self.true, self.given = np.zeros((3, len(labels)), dtype=np.int64)
        self.calibration = Calibration()

    def see(self, example: MultilabelExample, prediction: MultilabelPrediction) -> None:
        """Count it; its labels are known."""
        truth = self._held(example.labels)
        given = self._held(prediction.labels)
        self.hits += truth & given
        self.true += truth
        self.given += given
        for probability, held in zip(
            prediction.probabilities.values(), truth.tolist(), strict=True
        ):
            self.calibration.add(probability, held)

    def cost(self, example: MultilabelExample, prediction: MultilabelPrediction) -> float:
        """The mean cross-entropy over labels, in nats."""
        return -float(np.log(np.maximum(1 - self._misses(example, prediction), TINY)).mean())

    def doubt(self, example: MultilabelExample, prediction: MultilabelPrediction) -> float | None:
        """How far the worst label is from the truth, where the model is sure."""
        worst = float(self._misses(example, prediction).max())
        return worst if worst >= SURE else None

    def shown(
        self, example: MultilabelExample, prediction: MultilabelPrediction
    ) -> s.ReportExample:
        """The texts, and the labels that are furthest from the truth."""
        parts = [clip_text(example.text)] + (
            [] if example.text_b is None else [" ‖ ", clip_text(example.text_b)]
        )
        furthest = np.argsort(-self._misses(example, prediction), kind="stable")[:LISTED]
        names, held = [self.labels[place] for place in furthest], set(example.labels or ())
        guesses = [
            s.ReportGuess(name, prediction.probabilities[name], name in held) for name in names
        ]
        return s.ReportExample(
            parts, ", ".join(example.labels or ()) or "no label", guesses, example.where
        )

    def sections(self) -> list[s.Section]:
        """Each label, calibration."""
        columns = zip(
            self.labels, self.hits.tolist(), self.true.tolist(), self.given.tolist(), strict=True
        )
        rows: list[Many[s.Cell]] = [
            [name, *rates(hits, true, given)] for name, hits, true, given in columns
        ]
        table = s.TableSection(
            "Each label", ["label", "examples", "predicted", "precision", "recall", "F1"], rows
        )
        return [table, *reliability(self.calibration, "labels")]

    def _held(self, labels: tuple[str, ...] | None) -> NDArray[np.bool_]:
        held = set(labels or ())
        return np.array([name in held for name in self.labels])

    def _misses(
        self, example: MultilabelExample, prediction: MultilabelPrediction
    ) -> NDArray[np.float64]:
        """How far the probability of each label is from 1 where it holds, else from 0."""
        chances = np.array(list(prediction.probabilities.values()), dtype=np.float64)
        return np.where(self._held(example.labels), 1 - chances, chances)
