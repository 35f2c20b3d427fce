"""Calibration: confidence against accuracy, and the expected calibration error.

Source: Naeini et al. 2015; Guo et al. 2017, section 2. Only counts are kept, so memory does not
grow with the examples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BINS = 15
"""Number of bins of equal width, as in Guo et al. 2017."""
GROUPS = 10
"""Number of groups of equally many predictions."""
_FINE = 1 / (1 + np.exp(-np.linspace(-12, 12, 2400)))
"""Edges that are close near 0 and 1, where most probabilities are."""


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
        # By bin: the number of predictions, and the sums of their confidence and accuracy.
        self._even, self._fine = np.zeros((3, bins)), np.zeros((3, len(_FINE) + 1))

    def add(self, confidence: float, correct: bool) -> None:
        """Count a prediction with this probability."""
        for edges, sums in ((self._edges, self._even), (_FINE, self._fine)):
            sums[:, np.searchsorted(edges, confidence)] += (1, confidence, correct)

    @property
    def bins(self) -> list[Bin]:
        """The bins of equal width that are not empty, in ascending order of confidence."""
        return [_bin(sums) for sums in self._even.T if sums[0]]

    @property
    def groups(self) -> list[Bin]:
        """At most `GROUPS` bins of about equally many predictions, in ascending order."""
        counts, _, _ = self._fine
        if not counts.any():
            return []
        # The middle prediction of each fine bin decides its group.
        middle = (counts.cumsum() - counts / 2) / counts.sum()
        group = np.minimum((middle * GROUPS).astype(np.int64), GROUPS - 1)
        merged = np.stack([np.bincount(group, row, GROUPS) for row in self._fine])
        return [_bin(sums) for sums in merged.T if sums[0]]

    @property
    def error(self) -> float:
        """The expected calibration error: mean |accuracy − confidence|, weighted by examples."""
        bins = self.bins
        gaps = sum(row.examples * abs(row.accuracy - row.confidence) for row in bins)
        return gaps / max(1, sum(row.examples for row in bins))


def _bin(sums: NDArray[np.float64]) -> Bin:
    count, confidence, correct = sums.tolist()
    return Bin(int(count), confidence / count, correct / count)
