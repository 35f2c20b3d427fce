"""Whether a model is right as often as it says: reliability by bins of confidence, and the expected calibration error.

Source: Naeini et al. 2015; Guo et al. 2017, section 2. Only counts are held, so memory does not grow with the examples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BINS = 15
"""Of equal width, as in Guo et al. 2017."""


@dataclass(frozen=True)
class Bin:
    """Predictions of like confidence.

    Attributes:
        examples: how many.
        confidence: their mean probability.
        accuracy: the share of them that is right.
    """

    examples: int
    confidence: float
    accuracy: float


class Calibration:
    """Counts predictions by their confidence.

    Args:
        bins: of equal width between 0 and 1; a bin holds its upper edge, not its lower one.
    """

    def __init__(self, bins: int = BINS) -> None:
        self._edges = np.linspace(0.0, 1.0, bins + 1)[1:-1]
        self._counts, self._confidence, self._right = (
            np.zeros(bins, np.int64),
            np.zeros(bins),
            np.zeros(bins),
        )

    def add(self, confidence: float, right: bool) -> None:
        """One prediction: its probability, and whether it is right."""
        place = np.searchsorted(self._edges, confidence)
        self._counts[place] += 1
        self._confidence[place] += confidence
        self._right[place] += right

    @property
    def bins(self) -> list[Bin]:
        """The bins that hold something, from the lowest confidence on."""
        columns = zip(
            self._counts.tolist(), self._confidence.tolist(), self._right.tolist(), strict=True
        )
        return [
            Bin(count, confidence / count, right / count)
            for count, confidence, right in columns
            if count
        ]

    @property
    def error(self) -> float:
        """The expected calibration error: the mean distance of accuracy and confidence, weighted by examples; 0 for none."""
        total = int(self._counts.sum())
        return sum(
            part.examples * abs(part.accuracy - part.confidence) for part in self.bins
        ) / max(1, total)
