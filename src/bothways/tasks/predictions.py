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
        rounded = {name: float(f"{value:.6g}") for name, value in self.probabilities.items()}
        return {"label": self.label, "probabilities": rounded}
