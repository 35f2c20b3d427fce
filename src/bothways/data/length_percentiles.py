"""How long the sentences and documents of a corpus are, without holding them all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CHUNK = 2**20


def length_percentiles(
    offsets: NDArray[np.unsignedinteger[Any]], points: Sequence[int | float]
) -> list[int]:
    """Percentiles of the lengths between `(N+1)` offsets, each a length that occurs; none if N is 0.

    Source: the inverse of the empirical distribution function (NumPy's method "inverted_cdf").
    """
    counts = np.zeros(1, dtype=np.int64)
    for start in range(0, len(offsets) - 1, _CHUNK):
        lengths = np.diff(offsets[start : start + _CHUNK + 1]).astype(np.int64)
        some = np.bincount(lengths, minlength=len(counts))
        some[: len(counts)] += counts
        counts = some
    ranks = np.cumsum(counts)
    if ranks[-1] == 0:
        return []
    return [
        int(np.searchsorted(ranks, max(np.ceil(point / 100 * ranks[-1]), 1))) for point in points
    ]
