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


class _Counts:
    """Sums over predictions between edges; a bin includes its upper edge only."""

    def __init__(self, edges: NDArray[np.float64]) -> None:
        self._edges = edges
        self.sums = np.zeros((3, len(edges) + 1))

    def add(self, confidence: float, right: bool) -> None:
        """Count a prediction with this probability."""
        self.sums[:, np.searchsorted(self._edges, confidence)] += (1, confidence, right)


class Calibration:
    """A count of predictions by confidence.

    Args:
        bins: number of bins of equal width in [0, 1]; a bin includes its upper edge only.
    """

    def __init__(self, bins: int = BINS) -> None:
        self._even = _Counts(np.linspace(0.0, 1.0, bins + 1)[1:-1])
        self._fine = _Counts(_FINE)

    def add(self, confidence: float, right: bool) -> None:
        """Count a prediction with this probability."""
        self._even.add(confidence, right)
        self._fine.add(confidence, right)

    @property
    def bins(self) -> list[Bin]:
        """The bins of equal width that are not empty, in ascending order of confidence."""
        return [_bin(sums) for sums in self._even.sums.T if sums[0]]

    @property
    def groups(self) -> list[Bin]:
        """At most `GROUPS` bins of about equally many predictions, in ascending order."""
        counts, _, _ = self._fine.sums
        if not counts.any():
            return []
        # The middle prediction of each fine bin decides its group.
        middle = (counts.cumsum() - counts / 2) / counts.sum()
        group = np.minimum((middle * GROUPS).astype(np.int64), GROUPS - 1)
        merged = np.stack([np.bincount(group, row, GROUPS) for row in self._fine.sums])
        return [_bin(sums) for sums in merged.T if sums[0]]

    @property
    def error(self) -> float:
        """The expected calibration error: mean |accuracy − confidence|, weighted by examples."""
        bins = self.bins
        gaps = sum(part.examples * abs(part.accuracy - part.confidence) for part in bins)
        return gaps / max(1, sum(part.examples for part in bins))


def _bin(sums: NDArray[np.float64]) -> Bin:
    count, confidence, right = sums.tolist()
    return Bin(int(count), confidence / count, right / count)
