"""Keyed randomness: a draw depends on what it is for, never on what was drawn before.

Philox is a block cipher used as a generator: (key, counter) → numbers, with no state to carry. So the number of workers, the
number of ranks and a resumed run cannot change the data.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011).
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np


@functools.lru_cache(maxsize=256)
def _purpose_key(purpose: str) -> int:
    return int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=8).digest(), "little")


def rng(seed: int, purpose: str, *, epoch: int = 0, index: int = 0) -> np.random.Generator:
    """The generator for one purpose ("mask", "segments", …) at one place (epoch, index); equal keys give equal draws."""
    key = np.array([seed % 2**64, _purpose_key(purpose)], dtype=np.uint64)
    counter = np.array([0, 0, index, epoch], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))
