"""Sliding windows over texts that are longer than the model's input.

Source: google-research/bert run_squad.py. A token that several windows hold counts in the window in
which it has the most context on its poorer side ("max context").
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64


class TextWindow(NamedTuple):
    """The tokens `[start, stop)` of a text."""

    start: int
    stop: int


def windows(tokens: int, room: int, stride: int, *, full: bool = False) -> list[TextWindow]:
    """Split a text into windows of at most `room` tokens, one every `stride`; at least one window.

    Examples:
        >>> windows(7, room=4, stride=2)
        [TextWindow(start=0, stop=4), TextWindow(start=2, stop=6), TextWindow(start=4, stop=7)]

    Args:
        full: move the last window back so that it has `room` tokens too: `(3, 7)` in the example.
    """
    step, last = min(room, stride), max(0, tokens - room)
    count = 1 - (-last // step)  # 1 + last / step, rounded up
    starts = [min(step * number, last) if full else step * number for number in range(count)]
    return [TextWindow(start, min(start + room, tokens)) for start in starts]


def owners(
    positions: Int64[np.ndarray, " words"], chunks: Many[TextWindow], room: int
) -> Int64[np.ndarray, " words"]:
    """Return the window in which each position counts, for windows that all hold `room` tokens.

    That is the window with the nearest middle; of two at equal distance, the earlier.
    """
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    # Twice the point halfway between the middles of neighbouring windows: whole numbers.
    borders = starts[:-1] + starts[1:] + room - 1
    return np.searchsorted(borders, 2 * positions).astype(np.int64)
