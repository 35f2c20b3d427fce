"""Analysis of numbers: predicted against true ones, and what is left over."""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from bothways.analysis.base import Analyst, clip_text
from bothways.report import sections as s
from bothways.tasks.predictions import ScorePrediction
from bothways.tasks.text_examples import TextExample

DRAWN = 1000
"""Points of a picture; of more examples evenly many are left out."""


class ScoreAnalysis(Analyst[TextExample, ScorePrediction]):
    """Pairs of numbers: 16 bytes of each example are kept."""

    grade, loss = None, "squared error"

    def __init__(self) -> None:
        self._truth, self._predicted = array("d"), array("d")

    def see(self, example: TextExample, prediction: ScorePrediction) -> None:
        """Remember both numbers; the label is one."""
        self._truth.append(_number(example))
        self._predicted.append(prediction.score)

    def cost(self, example: TextExample, prediction: ScorePrediction) -> float:
        """The squared error."""
        return (_number(example) - prediction.score) ** 2

    def shown(self, example: TextExample, prediction: ScorePrediction) -> s.ReportExample:
        """The texts and both numbers."""
        parts = [clip_text(example.text)] + (
            [] if example.text_b is None else [" ‖ ", clip_text(example.text_b)]
        )
        truth = f"{s.readable_number(_number(example))}, predicted {s.readable_number(prediction.score)}"
        return s.ReportExample(parts, truth, [], example.where)

    def sections(self) -> list[s.Section]:
        """Two pictures and the residuals in figures."""
        truth, predicted = np.array(self._truth), np.array(self._predicted)
        rest = predicted - truth
        ends = float(min(truth.min(), predicted.min())), float(max(truth.max(), predicted.max()))
        some = slice(None, None, -(-len(truth) // DRAWN))
        drawn = _picked(truth, some), _picked(predicted, some), _picked(rest, some)
        line = ((ends[0], ends[0]), (ends[1], ends[1]))
        level = ((float(truth.min()), 0.0), (float(truth.max()), 0.0))
        note = (
            f"{len(drawn[0]):,} of {len(truth):,} examples." if len(drawn[0]) < len(truth) else ""
        )
        return [
            s.Scatter(
                "Predicted against true", "true", "predicted", drawn[0], drawn[1], line, note
            ),
            s.Scatter("Residuals", "true", "predicted less true", drawn[0], drawn[2], level, note),
            _residuals(rest),
        ]


def _residuals(rest: NDArray[np.float64]) -> s.TableSection:
    low, half, high = (float(value) for value in np.quantile(rest, [0.05, 0.5, 0.95]))
    size = np.abs(rest)
    rows: list[list[s.Cell]] = [
        ["mean (bias)", float(rest.mean())],
        ["mean without sign", float(size.mean())],
        ["root of the mean square", float(np.sqrt(np.square(rest).mean()))],
        ["5 % are below", low],
        ["half are below", half],
        ["5 % are above", high],
        ["greatest without sign", float(size.max())],
    ]
    return s.TableSection("Residuals: predicted less true", ["", "value"], rows)


def _picked(values: NDArray[np.float64], some: slice) -> list[float]:
    return [float(value) for value in values[some]]


def _number(example: TextExample) -> float:
    assert example.label is not None
    return float(example.label)
