"""Windows over texts that are longer than the model, and which of them answers for which word.

A word answers from the window in which it has the most context on the poorer side, as Devlin et al.'s code for SQuAD has it
("max context"). Here all windows are of one length, the last one too, so this is the window whose middle is nearest; and every
word has exactly one.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int
from numpy.typing import NDArray


def window_starts(tokens: int, room: int, stride: int) -> Int[NDArray[np.int64], " windows"]:
    """Where windows of `room` tokens begin: each `stride` after the one before, the last one at the end of the text."""
    last = max(0, tokens - room)
    return np.append(np.arange(0, last, min(stride, room)), last).astype(np.int64)


def owners(
    places: Int[NDArray[np.int64], " words"], starts: Int[NDArray[np.int64], " windows"], room: int
) -> Int[NDArray[np.int64], " words"]:
    """For each place, in tokens, the window that answers for it; the earlier one of two that are equally near."""
    borders = (
        starts[:-1] + starts[1:] + room - 1
    )  # twice the point between the middles of neighbours
    return np.searchsorted(borders, 2 * places).astype(np.int64)
