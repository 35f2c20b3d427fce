"""Analysis of one of several classes: confusion, calibration, and each class by itself."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from bothways.core.report import sections as s
from bothways.prediction.analysis.base import SURE, TaskAnalysis, clip_pair, guesses, reliability
from bothways.prediction.analysis.calibration import Calibration
from bothways.tasks.base import Metrics
from bothways.tasks.metrics import Confusion, classification_metrics, negative_log
from bothways.tasks.predictions import ClassPrediction
from bothways.tasks.text_examples import TextExample

MOST = 20
"""Number of classes in a confusion matrix: those with the most errors."""
PAIRS = 15
"""Number of confusions in the table of the most frequent ones."""


class ClassAnalysis(TaskAnalysis[TextExample, ClassPrediction]):
    """Confusion and calibration.

    Args:
        labels: of the model, in order.
    """

    grade_name, cost_name = "accuracy", "cross-entropy"

    def __init__(self, labels: Many[str]) -> None:
        self.labels = tuple(labels)
        self.calibration = Calibration()
        self.confusion = Confusion(len(labels))
        self._index = {label: place for place, label in enumerate(labels)}

    def add(self, example: TextExample, prediction: ClassPrediction) -> None:
        """Count a prediction."""
        self.confusion.pairs[self._index[_label(example)], prediction.index] += 1
        self.calibration.add(
            prediction.probabilities[prediction.label], prediction.label == example.label
        )

    def cost(self, example: TextExample, prediction: ClassPrediction) -> float:
        """Return the cross-entropy in nats."""
        return negative_log(prediction.probabilities[_label(example)])

    def doubt(self, example: TextExample, prediction: ClassPrediction) -> float | None:
        """Return the lead of the predicted class over the given one, where the model is sure."""
        top = prediction.probabilities[prediction.label]
        wrong = prediction.label != example.label and top >= SURE
        return top - prediction.probabilities[_label(example)] if wrong else None

    def show(self, example: TextExample, prediction: ClassPrediction) -> s.ReportExample:
        """Return the texts and the most probable classes."""
        best = guesses(prediction.probabilities, example.label)
        parts = clip_pair(example.text, example.text_b)
        return s.ReportExample(parts, str(example.label), best, example.where)

    def baseline(self) -> Metrics:
        """Return the metrics of always answering the most frequent class."""
        truth = self.confusion.true
        constant, top = Confusion(len(self.labels)), int(truth.argmax())
        constant.pairs.update({(at, top): int(count) for at, count in enumerate(truth) if count})
        return classification_metrics(constant) if constant.total else {}

    def sections(self) -> list[s.Section]:
        """Return the sections of a report."""
        return [
            *confusion_sections(self.labels, self.confusion),
            *reliability(self.calibration),
            class_table(self.labels, self.confusion),
        ]


def confusion_sections(labels: Many[str], counts: Confusion) -> list[s.Section]:
    """Return the confusion matrix; with many classes that of the worst, and the worst pairs."""
    if len(labels) <= MOST:
        return [
            s.ConfusionMatrix("Confusion matrix", list(labels), _matrix(counts, range(len(labels))))
        ]
    errors = counts.true + counts.predicted - 2 * counts.right
    kept = np.sort(np.argsort(-errors, kind="stable")[:MOST])
    note = (
        f"The {MOST} of {len(labels)} classes with the most errors; confusion with other classes "
        "is not shown."
    )
    names = [labels[place] for place in kept]
    matrix = s.ConfusionMatrix("Confusion matrix", names, _matrix(counts, kept.tolist()), note)
    return [matrix, _frequent_confusions(labels, counts)]


def _matrix(counts: Confusion, places: Many[int]) -> list[list[int]]:
    """Return the counts of some classes, true ones in rows."""
    return [[counts.pairs[true, predicted] for predicted in places] for true in places]


def _frequent_confusions(labels: Many[str], counts: Confusion) -> s.TableSection:
    wrong = [(-count, pair) for pair, count in counts.pairs.items() if pair[0] != pair[1]]
    totals, rows = counts.true, list[Many[s.Cell]]()
    for count, (true, predicted) in sorted(wrong)[:PAIRS]:
        share = s.percentage(-count / int(totals[true]))
        rows.append([labels[true], labels[predicted], -count, share])
    columns = ["class", "predicted as", "examples", "share of the class"]
    return s.TableSection("The most frequent confusions", columns, rows)


def class_table(labels: Many[str], counts: Confusion) -> s.TableSection:
    """Return precision, recall and F1 of each class; with many classes the worst F1 first."""
    columns = (counts.right.tolist(), counts.true.tolist(), counts.predicted.tolist())
    return rates_table("Each class", "class", list(zip(labels, *columns, strict=True)))


def rates_table(title: str, kind: str, rows: Many[tuple[str, int, int, int]]) -> s.TableSection:
    """Return precision, recall and F1 by name, where defined; of many names the worst F1 first.

    Args:
        kind: what the names are, such as "class".
        rows: name, number of hits, of true and of predicted examples.
    """
    note = ""
    if len(rows) > MOST:
        rows = sorted(rows, key=lambda row: 2 * row[1] / max(1, row[2] + row[3]))
        note = "In ascending order of F1."
    cells: list[Many[s.Cell]] = []
    for name, hits, true, predicted in rows:
        shares = ((hits, predicted), (hits, true), (2 * hits, true + predicted))
        rates = [s.percentage(part / whole) if whole else None for part, whole in shares]
        cells.append([name, true, predicted, *rates])
    columns = [kind, "examples", "predicted", "precision", "recall", "F1"]
    return s.TableSection(title, columns, cells, note=note)


def _label(example: TextExample) -> str:
    assert example.label is not None
    return example.label
