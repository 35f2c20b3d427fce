"""Analyses of texts: one of several classes, any number of labels, a choice, a number."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bothways.core.report import sections as s
from bothways.prediction.analysis import base
from bothways.prediction.analysis.base import SURE, Calibration, Judgement, TaskAnalysis
from bothways.tasks import metrics
from bothways.tasks import predictions as p
from bothways.tasks.base import Metrics
from bothways.tasks.choice.task import ChoiceExample
from bothways.tasks.multilabel.task import LEAST, MultilabelExample, constant_labels
from bothways.tasks.text_examples import TextExample

LABELS = 5
"""Number of labels that are shown of an example: the labels furthest from the truth."""
POINTS = 1000
"""Number of points in a picture; of more examples an even sample is drawn."""


def _shown(
    example: TextExample | MultilabelExample, truth: str, answers: list[s.ReportGuess]
) -> s.ReportExample:
    texts = [example.text] if example.text_b is None else [example.text, " ‖ ", example.text_b]
    return s.ReportExample([*map(base.clip, texts)], truth, answers, example.where)


def _label(example: TextExample) -> str:
    assert example.label is not None
    return example.label


def _judge_choice(calibration: Calibration, top: float, chance: float, correct: bool) -> Judgement:
    """Count one of several answers by its probability; doubt the label of a sure error.

    Args:
        top, chance: probabilities of the given answer and of the right one.
    """
    calibration.add(top, correct)
    return Judgement(
        metrics.negative_log(chance), top - chance if top >= SURE and not correct else None
    )


class ClassAnalysis(TaskAnalysis[TextExample, p.ClassPrediction]):
    """Confusion of classes and calibration.

    Args:
        labels: labels of the model, in order.
    """

    grade_name, cost_name = "accuracy", "cross-entropy"

    def __init__(self, labels: Sequence[str]) -> None:
        super().__init__()
        self.labels = tuple(labels)
        self.confusion = metrics.Confusion(len(labels))
        self._index = {label: index for index, label in enumerate(labels)}

    def add(self, example: TextExample, prediction: p.ClassPrediction) -> Judgement:
        chances, label = prediction.probabilities, _label(example)
        self.confusion.pairs[self._index[label], prediction.index] += 1
        top, right = chances[prediction.label], prediction.label == label
        return _judge_choice(self.calibration, top, chances[label], right)

    def show(self, example: TextExample, prediction: p.ClassPrediction) -> s.ReportExample:
        best = base.guesses(prediction.probabilities, example.label)
        return _shown(example, str(example.label), best)

    def baseline(self) -> Metrics:
        truth = self.confusion.true
        majority, top = metrics.Confusion(len(self.labels)), int(truth.argmax())
        majority.pairs.update({(i, top): int(count) for i, count in enumerate(truth) if count})
        return metrics.classification_metrics(majority) if majority.total else {}

    def sections(self) -> list[s.Section]:
        return [*base.confusion_sections(self.labels, self.confusion), *self.reliability()]


class ChoiceAnalysis(TaskAnalysis[ChoiceExample, p.ChoicePrediction]):
    """Confusion of the positions of endings, and calibration."""

    grade_name, cost_name = "accuracy", "cross-entropy"

    def __init__(self) -> None:
        super().__init__()
        self.confusion = metrics.Confusion(0)

    def add(self, example: ChoiceExample, prediction: p.ChoicePrediction) -> Judgement:
        chances, label = prediction.probabilities, example.label
        assert label is not None
        self.confusion.pairs[label, prediction.index] += 1
        self.confusion.labels = max(self.confusion.labels, label + 1, prediction.index + 1)
        right = prediction.index == label
        return _judge_choice(self.calibration, max(chances), chances[label], right)

    def show(self, example: ChoiceExample, prediction: p.ChoicePrediction) -> s.ReportExample:
        assert example.label is not None
        endings = [f"{n}. {base.clip(text)}" for n, text in enumerate(example.endings, 1)]
        truth = endings[example.label]
        best = base.guesses(dict(zip(endings, prediction.probabilities, strict=True)), truth)
        return s.ReportExample([base.clip(example.context)], truth, best, example.where)

    def baseline(self) -> Metrics:
        truth = self.confusion.true
        return {"accuracy": float(truth.max() / truth.sum())} if len(truth) else {}

    def sections(self) -> list[s.Section]:
        names = [f"ending {number}" for number in range(1, self.confusion.labels + 1)]
        return [*base.confusion_sections(names, self.confusion), *self.reliability()]


class LabelSetAnalysis(TaskAnalysis[MultilabelExample, p.MultilabelPrediction]):
    """Counts of each label and calibration.

    Args:
        labels: labels of the model, in order.
    """

    grade_name, cost_name, calibrated = "all labels right", "cross-entropy", "labels"

    def __init__(self, labels: Sequence[str]) -> None:
        super().__init__()
        self.labels = tuple(labels)
        self.examples = 0
        self.hits, self.true, self.predicted = np.zeros((3, len(labels)), dtype=np.int64)

    def add(self, example: MultilabelExample, prediction: p.MultilabelPrediction) -> Judgement:
        truth, predicted = self._encode(example.labels), self._encode(prediction.labels)
        self.examples += 1
        self.hits += truth & predicted
        self.true += truth
        self.predicted += predicted
        chances = prediction.probabilities.values()
        for chance, holds in zip(chances, truth.tolist(), strict=True):
            self.calibration.add(chance, holds)
        misses = self._misses(example, prediction)
        loss, worst = -float(np.log(np.maximum(1 - misses, LEAST)).mean()), float(misses.max())
        return Judgement(loss, worst if worst >= SURE else None)

    def show(
        self, example: MultilabelExample, prediction: p.MultilabelPrediction
    ) -> s.ReportExample:
        furthest = np.argsort(-self._misses(example, prediction), kind="stable")[:LABELS]
        labels = example.labels or ()
        answers = [
            s.ReportGuess(name, prediction.probabilities[name], name in labels)
            for name in (self.labels[index] for index in furthest)
        ]
        return _shown(example, ", ".join(labels) or "no label", answers)

    def baseline(self) -> Metrics:
        answer = constant_labels(self.true, self.examples)
        hits = np.where(answer, self.true, 0)
        return metrics.multilabel_metrics(hits, self.true + answer * self.examples - 2 * hits)

    def sections(self) -> list[s.Section]:
        table = base.rates_table("label", self.labels, self.hits, self.true, self.predicted)
        return [table, *self.reliability()]

    def _encode(self, labels: tuple[str, ...] | None) -> NDArray[np.bool_]:
        names = set(labels or ())
        return np.array([name in names for name in self.labels])

    def _misses(
        self, example: MultilabelExample, prediction: p.MultilabelPrediction
    ) -> NDArray[np.float64]:
        """Return the distance of each label's probability from 1 where it holds, else from 0."""
        chances = np.array(list(prediction.probabilities.values()), dtype=np.float64)
        return np.where(self._encode(example.labels), 1 - chances, chances)


class ScoreAnalysis(TaskAnalysis[TextExample, p.ScorePrediction]):
    """Predicted against true numbers, and the residuals: 16 bytes of each example are kept."""

    grade_name, cost_name = None, "squared error"

    def __init__(self) -> None:
        super().__init__()
        self._truth, self._predicted = array("d"), array("d")

    def add(self, example: TextExample, prediction: p.ScorePrediction) -> Judgement:
        self._truth.append(float(_label(example)))
        self._predicted.append(prediction.score)
        return Judgement((self._truth[-1] - prediction.score) ** 2)

    def show(self, example: TextExample, prediction: p.ScorePrediction) -> s.ReportExample:
        true, predicted = map(s.readable_number, (float(_label(example)), prediction.score))
        return _shown(example, f"{true}, predicted {predicted}", [])

    def baseline(self) -> Metrics:
        error = float(np.var(np.array(self._truth))) if self._truth else 0.0
        return {"spearman": 0.0, "pearson": 0.0, "mse": error}

    def sections(self) -> list[s.Section]:
        truth, predicted = np.array(self._truth), np.array(self._predicted)
        residuals = predicted - truth
        low, high = float(truth.min()), float(truth.max())
        # Both axes have one range, so that the diagonal is where predictions are right.
        ends = min(low, float(predicted.min())), max(high, float(predicted.max()))
        sample = slice(None, None, -(-len(truth) // POINTS))
        x, y, errors = (values[sample].tolist() for values in (truth, predicted, residuals))
        diagonal, level = ((ends[0], ends[0]), (ends[1], ends[1])), ((low, 0.0), (high, 0.0))
        note = f"{len(x):,} of {len(truth):,} examples." if len(x) < len(truth) else ""
        sizes, quantiles = np.abs(residuals), np.quantile(residuals, [0.05, 0.5, 0.95]).tolist()
        rows: list[list[s.Cell]] = [
            ["mean (bias)", float(residuals.mean())],
            ["mean absolute", float(sizes.mean())],
            ["root mean square", float(np.sqrt(np.square(residuals).mean()))],
            ["5th percentile", quantiles[0]],
            ["median", quantiles[1]],
            ["95th percentile", quantiles[2]],
            ["maximum absolute", float(sizes.max())],
        ]
        return [
            s.Scatter("Predicted against true", "true", "predicted", x, y, diagonal, note),
            s.Scatter("Residuals", "true", "predicted − true", x, errors, level, note),
            s.TableSection("Residuals: predicted − true", ["", "value"], rows),
        ]
