"""The random blocks of BigBird: which blocks of keys a block of queries reads beside its neighbours (Zaheer et al. 2020).

Each layer draws with its own number as the seed, so the blocks are the same in every run: a trained model depends on them.
These are the draws of google-research/bigbird as transformers has them. In evaluation transformers draws nothing and reads the
first block in place of each random one; a model gives what it gives there only if the same is done here.

Source: transformers' `modeling_big_bird.py`, whose ranges are kept where the paper's are not: at 1,024, 3,072 and 4,096 tokens
blocks are drawn from the first 1,024 tokens, and neighbours may be among them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from bothways.attention.patterns import Blocks

Drawn = NDArray[np.int64]

PUBLISHED = (1024, 3072, 4096)
"""Lengths, in tokens, with ranges of their own …"""
REACHED = 1024
"""… which end here."""


@dataclass(frozen=True)
class Draw:
    """Who draws.

    Attributes:
        layer: its number, the seed.
        heads: each with draws of its own.
        max_positions: tokens of the longest sequence that the model reads.
    """

    layer: int
    heads: int
    max_positions: int


def drawn_blocks(
    draw: Draw | None, tokens: int, pattern: Blocks
) -> Int[Tensor, "heads blocks random"]:
    """The blocks that each block of a sequence reads, by head; nobody draws in evaluation: then the first block for all."""
    if draw is None:
        return torch.zeros(1, -(-tokens // pattern.size), pattern.random, dtype=torch.int64)
    return torch.from_numpy(_drawn(draw, -(-tokens // pattern.size), pattern))


@functools.lru_cache(maxsize=256)
def _drawn(draw: Draw, count: int, pattern: Blocks) -> Drawn:
    """For `count` blocks; nothing is drawn for the first and the last, which see all."""
    size, random, generator = pattern.size, pattern.random, np.random.RandomState(draw.layer)
    result = np.zeros((draw.heads, count, random), dtype=np.int64)
    if count * size in PUBLISHED:
        last = max(draw.max_positions // size, count)
        for head in range(draw.heads):
            rows = [
                np.resize(generator.permutation(_range(block, last, size)), random)
                for block in range(1, last - 1)
            ]
            result[head, 1:-1] = rows[: count - 2]
    else:
        for block in range(1, count - 1):
            for head in range(draw.heads):
                result[head, block] = _few(generator.permutation(5 + 2 * random), block, random)
    return result


def _range(block: int, count: int, size: int) -> Drawn:
    """What a block draws from at the published lengths."""
    middle, last = np.arange(1, count - 1), REACHED // size - 1 if 2 * size < REACHED else count - 1
    before = block - 2
    match block:
        case 1 | 2:
            return middle[block + 1 : last]
        case _ if block >= count - 3:
            return middle[:last]
        case _ if before > last:
            return middle[:last]
        case _ if block + 1 == last:
            return middle[:before]
        case _:
            return np.concatenate([middle[:before], middle[block + 1 : last]])


def _few(order: NDArray[np.integer], block: int, random: int) -> Drawn:
    """The first in this order that are neither neighbours nor global, as if the sequence ended with the last of them."""
    count = len(order)
    barred = {0, count - 1, block - 1, block, block + 1}
    barred |= {count - 2} if block == 1 else {1} if block == count - 2 else set()
    return np.array([key for key in order.tolist() if key not in barred][:random], dtype=np.int64)
