"""What is looked at in the predictions of one kind of task.

An analyst sees every example once and counts; the few examples that are shown are kept by others (`survey`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Generic

from bothways.analysis.calibration import Calibration
from bothways.report import sections as s
from bothways.tasks.base import E, P

SHOWN = 600
"""Characters of a text that are shown."""
GUESSES = 3
"""Answers of the model that are shown for an example."""

SURE = 0.8
"""From this probability of a wrong answer on, it may be the given one that is wrong."""


class Analyst(Generic[E, P]):
    """Counts what is worth knowing of the predictions of a task. Subclasses define the methods that raise.

    Class attributes:
        grade: what the task's `grade` of an example is called, when it is averaged; none where its mean is no share.
        loss: what the analyst's `loss` is called.
    """

    grade: ClassVar[str | None]
    loss: ClassVar[str]

    def see(self, example: E, prediction: P) -> None:
        """Count an example; it has its answer."""
        raise NotImplementedError

    def cost(self, example: E, prediction: P) -> float:
        """How bad the prediction is: the loss, where there is one. The worst are shown."""
        raise NotImplementedError

    def doubt(self, example: E, prediction: P) -> float | None:
        """How sure the model is of another answer than the given one, which may then be wrong itself; none if it is not."""
        return None

    def shown(self, example: E, prediction: P) -> s.ReportExample:
        """The example as it is shown."""
        raise NotImplementedError

    def sections(self) -> list[s.Section]:
        """What all examples come to."""
        raise NotImplementedError


def clip_text(text: str) -> str:
    """The beginning of a text that may be long."""
    return text if len(text) <= SHOWN else text[:SHOWN] + " …"


def guesses(probabilities: Mapping[str, float], truth: str | None) -> list[s.ReportGuess]:
    """The most probable answers, and the right one if it is not among them."""
    ordered = sorted(probabilities.items(), key=lambda item: -item[1])
    chosen = [pair for place, pair in enumerate(ordered) if place < GUESSES or pair[0] == truth]
    return [s.ReportGuess(name, probability, name == truth) for name, probability in chosen]


def reliability(calibration: Calibration, of: str = "predictions") -> list[s.Section]:
    """The reliability curve with the expected calibration error, and its figures."""
    bins = calibration.bins
    lines = [
        s.Line("the model", [part.confidence for part in bins], [part.accuracy for part in bins]),
        s.Line("perfectly calibrated", [0.0, 1.0], [0.0, 1.0]),
    ]
    mean = sum(part.examples * (part.confidence - part.accuracy) for part in bins) / max(
        1, sum(p.examples for p in bins)
    )
    lean = "too sure of itself" if mean > 0 else "less sure than it could be"
    note = (
        f"Expected calibration error (15 bins of equal width): {s.percentage(calibration.error)}. "
        f"On average the model is {lean}, by {s.percentage(abs(mean))}."
    )
    curve = s.Curves(
        "Is it right as often as it says?",
        "mean probability",
        f"share of {of} right",
        lines,
        percent=True,
        note=note,
    )
    rows: list[Sequence[s.Cell]] = [
        [p.examples, s.percentage(p.confidence), s.percentage(p.accuracy)] for p in bins
    ]
    table = s.TableSection("Calibration by bins", ["examples", "mean probability", "right"], rows)
    return [curve, s.Details("Calibration by bins", (table,))]
