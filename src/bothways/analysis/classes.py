"""Analysis of one of several classes: confusions, calibration, each class by itself."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
from numpy.typing import NDArray

from bothways.analysis.base import SURE, Analyst, clip_text, guesses, reliability
from bothways.analysis.calibration import Calibration
from bothways.report import sections as s
from bothways.tasks.predictions import ClassPrediction
from bothways.tasks.text_examples import TextExample

MOST = 20
"""Classes that a confusion matrix shows; the rarer ones are taken together."""
REST = "all others"


class ClassAnalysis(Analyst[TextExample, ClassPrediction]):
    """Confusions and calibration.

    Args:
        labels: of the model, in order.
    """

    grade, loss = "accuracy", "cross-entropy"

    def __init__(self, labels: Many[str]) -> None:
        self.labels = tuple(labels)
        self.calibration = Calibration()
        self.confusion = np.zeros((len(labels), len(labels)), dtype=np.int64)
        self._index = {label: place for place, label in enumerate(labels)}

    def see(self, example: TextExample, prediction: ClassPrediction) -> None:
        """Count it; its label is one of the model's."""
        assert example.label is not None
        self.confusion[self._index[example.label], prediction.index] += 1
        self.calibration.add(
            prediction.probabilities[prediction.label], prediction.label == example.label
        )

    def cost(self, example: TextExample, prediction: ClassPrediction) -> float:
        """The cross-entropy, in nats."""
        assert example.label is not None
        return -float(
            np.log(max(prediction.probabilities[example.label], np.finfo(np.float64).tiny))
        )

    def doubt(self, example: TextExample, prediction: ClassPrediction) -> float | None:
        """By how much the predicted class is more probable than the given one, where the model is sure and wrong."""
        assert example.label is not None
        top = prediction.probabilities[prediction.label]
        return (
            top - prediction.probabilities[example.label]
            if prediction.label != example.label and top >= SURE
            else None
        )

    def shown(self, example: TextExample, prediction: ClassPrediction) -> s.ReportExample:
        """The texts, the label and the most probable classes."""
        parts = [clip_text(example.text)] + (
            [] if example.text_b is None else [" ‖ ", clip_text(example.text_b)]
        )
        return s.ReportExample(
            parts,
            str(example.label),
            guesses(prediction.probabilities, example.label),
            example.where,
        )

    def sections(self) -> list[s.Section]:
        """Confusions, calibration, each class."""
        return [
            confusion(self.labels, self.confusion),
            *reliability(self.calibration),
            by_class(self.labels, self.confusion),
        ]


def confusion(labels: Many[str], counts: NDArray[np.int64]) -> s.Confusion:
    """The confusions of the most frequent classes; the others are one row and one column."""
    order = np.argsort(-(counts.sum(0) + counts.sum(1)), kind="stable")
    kept, rest = np.sort(order[:MOST]), order[MOST:]
    names = [labels[place] for place in kept]
    groups = [[place] for place in kept] + ([list(rest)] if len(rest) else [])
    merged = [[int(counts[np.ix_(rows, columns)].sum()) for columns in groups] for rows in groups]
    note = f"{len(rest)} rarer classes are taken together." if len(rest) else ""
    return s.Confusion(
        "What was taken for what", [*names, REST] if len(rest) else names, merged, note
    )


def by_class(labels: Many[str], counts: NDArray[np.int64]) -> s.TableSection:
    """Precision, recall and F1 of each class; empty where they have no meaning."""
    rows: list[Many[s.Cell]] = []
    for place, label in enumerate(labels):
        hits, true, predicted = (
            int(counts[place, place]),
            int(counts[place].sum()),
            int(counts[:, place].sum()),
        )
        rows.append([label, *rates(hits, true, predicted)])
    return s.TableSection(
        "Each class", ["class", "examples", "predicted", "precision", "recall", "F1"], rows
    )


def rates(hits: int, true: int, predicted: int) -> tuple[s.Cell, ...]:
    """How many there are and how many were predicted, then precision, recall and F1."""
    shares = ((hits, predicted), (hits, true), (2 * hits, true + predicted))
    return (
        true,
        predicted,
        *(s.percentage(part / whole) if whole else None for part, whole in shares),
    )
