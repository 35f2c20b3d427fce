"""Keyed randomness: a draw depends on its purpose and place, not on earlier draws.

Philox is a block cipher used as a generator: (key, counter) → numbers, without state between
calls. Therefore the data depend neither on the number of workers and ranks nor on resuming.

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
    """Return the generator for a purpose ("mask", "segments", …) at a place (epoch, index).

    Equal arguments give equal draws.
    """
    key = np.array([seed % 2**64, _purpose_key(purpose)], dtype=np.uint64)
    counter = np.array([0, 0, index, epoch], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))
