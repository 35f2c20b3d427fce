"""What tasks predict: one frozen type per kind of answer, each with its form in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ClassPrediction:
    """One of several classes.

    Attributes:
        label: the most probable.
        index: its place among the labels.
        probabilities: of every label, in their order; they add up to 1.
    """

    label: str
    index: int
    probabilities: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `bothways predict` writes them."""
        return {"label": self.label, "probabilities": {name: brief(value) for name, value in self.probabilities.items()}}


@dataclass(frozen=True)
class MultiPrediction:
    """Any number of labels.

    Attributes:
        labels: those whose probability reaches their threshold, in the model's order.
        probabilities: of every label, in their order, each by itself.
    """

    labels: tuple[str, ...]
    probabilities: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `bothways predict` writes them."""
        rounded = {name: brief(value) for name, value in self.probabilities.items()}
        return {"labels": list(self.labels), "probabilities": rounded}


@dataclass(frozen=True)
class Score:
    """A number."""

    score: float

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `bothways predict` writes them."""
        return {"score": brief(self.score)}


@dataclass(frozen=True)
class ChoicePrediction:
    """One of the endings of a question.

    Attributes:
        index: the place of the most probable, from 0.
        ending: its text.
        probabilities: of each ending; they add up to 1.
    """

    index: int
    ending: str
    probabilities: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `bothways predict` writes them."""
        return {"index": self.index, "ending": self.ending, "probabilities": list(map(brief, self.probabilities))}


def brief(value: float) -> float:
    """A number with six digits, for JSON."""
    return float(f"{value:.6g}")
