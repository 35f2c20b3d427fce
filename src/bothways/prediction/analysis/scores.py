"""Analysis of numbers: predicted against true ones, and the residuals."""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from bothways.core.report import sections as s
from bothways.prediction.analysis.base import TaskAnalysis, clip_pair
from bothways.tasks.base import Metrics
from bothways.tasks.predictions import ScorePrediction
from bothways.tasks.text_examples import TextExample

DRAWN = 1000
"""Number of points in a picture; of more examples an even sample is drawn."""


class ScoreAnalysis(TaskAnalysis[TextExample, ScorePrediction]):
    """Pairs of numbers: 16 bytes of each example are kept."""

    grade_name, cost_name = None, "squared error"

    def __init__(self) -> None:
        self._truth, self._predicted = array("d"), array("d")

    def add(self, example: TextExample, prediction: ScorePrediction) -> None:
        """Count a prediction."""
        self._truth.append(_number(example))
        self._predicted.append(prediction.score)

    def cost(self, example: TextExample, prediction: ScorePrediction) -> float:
        """Return the squared error."""
        return (_number(example) - prediction.score) ** 2

    def show(self, example: TextExample, prediction: ScorePrediction) -> s.ReportExample:
        """Return the texts with the true and the predicted score."""
        true, predicted = map(s.readable_number, (_number(example), prediction.score))
        parts = clip_pair(example.text, example.text_b)
        return s.ReportExample(parts, f"{true}, predicted {predicted}", [], example.where)

    def baseline(self) -> Metrics:
        """Return the metrics of always answering the mean."""
        error = float(np.var(np.array(self._truth))) if self._truth else 0.0
        return {"spearman": 0.0, "pearson": 0.0, "mse": error}

    def sections(self) -> list[s.Section]:
        """Return the sections of a report."""
        truth, predicted = np.array(self._truth), np.array(self._predicted)
        residuals = predicted - truth
        low, high = float(truth.min()), float(truth.max())
        ends = min(low, float(predicted.min())), max(high, float(predicted.max()))
        sample = slice(None, None, -(-len(truth) // DRAWN))
        x, y, rest = (values[sample].tolist() for values in (truth, predicted, residuals))
        line, level = ((ends[0], ends[0]), (ends[1], ends[1])), ((low, 0.0), (high, 0.0))
        note = f"{len(x):,} of {len(truth):,} examples." if len(x) < len(truth) else ""
        return [
            s.Scatter("Predicted against true", "true", "predicted", x, y, line, note),
            s.Scatter("Residuals", "true", "predicted − true", x, rest, level, note),
            _residuals(residuals),
        ]


def _residuals(rest: NDArray[np.float64]) -> s.TableSection:
    low, half, high = np.quantile(rest, [0.05, 0.5, 0.95]).tolist()
    size = np.abs(rest)
    rows: list[list[s.Cell]] = [
        ["mean (bias)", float(rest.mean())],
        ["mean absolute", float(size.mean())],
        ["root mean square", float(np.sqrt(np.square(rest).mean()))],
        ["5th percentile", low],
        ["median", half],
        ["95th percentile", high],
        ["maximum absolute", float(size.max())],
    ]
    return s.TableSection("Residuals: predicted − true", ["", "value"], rows)


def _number(example: TextExample) -> float:
    assert example.label is not None
    return float(example.label)
