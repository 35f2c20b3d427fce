"""Calibration: bins of confidence with their accuracy, and the expected calibration error.

Source: Naeini et al. 2015; Guo et al. 2017, section 2. Only counts are kept, so memory does not grow
with the examples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BINS = 15
"""Number of bins of equal width, as in Guo et al. 2017."""


@dataclass(frozen=True)
class Bin:
    """Predictions of similar confidence.

    Attributes:
        examples: number of predictions.
        confidence: their mean probability.
        accuracy: the share of them that is right.
    """

    examples: int
    confidence: float
    accuracy: float


class Calibration:
    """A count of predictions by confidence.

    Args:
        bins: number of bins of equal width in [0, 1]; a bin includes its upper edge only.
    """

    def __init__(self, bins: int = BINS) -> None:
        self._edges = np.linspace(0.0, 1.0, bins + 1)[1:-1]
        self._counts = np.zeros(bins, np.int64)
        self._confidence, self._right = np.zeros((2, bins))

    def add(self, confidence: float, right: bool) -> None:
        """Count a prediction with this probability."""
        place = np.searchsorted(self._edges, confidence)
        self._counts[place] += 1
        self._confidence[place] += confidence
        self._right[place] += right

    @property
    def bins(self) -> list[Bin]:
        """The bins that are not empty, in ascending order of confidence."""
        rows = zip(
            self._counts.tolist(), self._confidence.tolist(), self._right.tolist(), strict=True
        )
        return [
            Bin(count, confidence / count, right / count)
            for count, confidence, right in rows
            if count
        ]

    @property
    def error(self) -> float:
        """The expected calibration error: mean |accuracy − confidence|, weighted by examples."""
        total = int(self._counts.sum())
        gaps = sum(part.examples * abs(part.accuracy - part.confidence) for part in self.bins)
        return gaps / max(1, total)
