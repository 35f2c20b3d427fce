"""The base of the analyses: what is counted in the predictions of one kind of task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Generic

from bothways.core.report import sections as s
from bothways.prediction.analysis.calibration import Calibration
from bothways.tasks.base import E, Metrics, P

SHOWN = 600
"""Number of characters of a text that are shown."""
GUESSES = 3
"""Number of answers of the model that are shown for an example."""
SURE = 0.8
"""Probability of a wrong answer from which the given label may be wrong instead."""


class TaskAnalysis(Generic[E, P]):
    """Counts over the predictions of a task. Each example is added once and not kept.

    Class attributes:
        grade_name: the name of the task's mean `grade`; None where its mean is not a share.
        cost_name: the name of `cost`.
    """

    grade_name: ClassVar[str | None]
    cost_name: ClassVar[str]

    def add(self, example: E, prediction: P) -> None:
        """Count an example that has its answer."""
        raise NotImplementedError

    def cost(self, example: E, prediction: P) -> float:
        """Return how bad the prediction is: the loss, where there is one. The worst are shown."""
        raise NotImplementedError

    def doubt(self, example: E, prediction: P) -> float | None:
        """Return how sure the model is that the given answer is wrong; None if it is not."""
        return None

    def show(self, example: E, prediction: P) -> s.ReportExample:
        """Return the example as it is shown."""
        raise NotImplementedError

    def baseline(self) -> Metrics:
        """Return the metrics of the best constant answer for the examples that were added."""
        return {}

    def sections(self) -> list[s.Section]:
        """Return the sections of a report."""
        raise NotImplementedError


def clip_text(text: str) -> str:
    """Return the beginning of a text that may be long."""
    return text if len(text) <= SHOWN else text[:SHOWN] + " …"


def clip_pair(text: str, text_b: str | None) -> list[str]:
    """Return a text or two as parts of a shown example."""
    return [clip_text(text)] + ([] if text_b is None else [" ‖ ", clip_text(text_b)])


def guesses(probabilities: Mapping[str, float], truth: str | None) -> list[s.ReportGuess]:
    """Return the most probable answers, and the right one if it is not among them."""
    ordered = sorted(probabilities.items(), key=lambda item: -item[1])
    chosen = [pair for place, pair in enumerate(ordered) if place < GUESSES or pair[0] == truth]
    return [s.ReportGuess(name, probability, name == truth) for name, probability in chosen]


def reliability(calibration: Calibration, of: str = "predictions") -> list[s.Section]:
    """Return the reliability curve with the expected calibration error, and its numbers.

    The curve has bins of equally many predictions: with bins of equal width, those of a model that
    is nearly always sure, or never, would be one point.
    """
    groups, bins = calibration.groups, calibration.bins
    lines = [
        s.Line("the model", [p.confidence for p in groups], [p.accuracy for p in groups]),
        s.Line("perfectly calibrated", [0.0, 1.0], [0.0, 1.0]),
    ]
    total = sum(part.examples for part in bins)
    gap = sum(part.examples * (part.confidence - part.accuracy) for part in bins) / max(1, total)
    lean = "more" if gap > 0 else "less"
    note = (
        f"Expected calibration error (15 bins of equal width): {s.percentage(calibration.error)}. "
        f"On average the model is {s.percentage(abs(gap))} {lean} confident than right."
    )
    curve = s.Curves(
        "Confidence against accuracy", "mean probability", f"share of {of} that is right", lines,
        percent=True, note=note,
    )  # fmt: skip
    rows: list[Sequence[s.Cell]] = [
        [p.examples, s.percentage(p.confidence), s.percentage(p.accuracy)] for p in bins
    ]
    table = s.TableSection("Calibration by bins", ["examples", "mean probability", "right"], rows)
    return [curve, s.Details("Calibration by bins", (table,))]
