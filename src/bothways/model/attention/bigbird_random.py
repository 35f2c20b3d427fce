"""BigBird's random blocks: which blocks of keys a block of queries reads besides its neighbours.

Every layer draws with its own number as the seed, so the blocks are the same in every run: a
trained model depends on them. The draws are those of google-research/bigbird, as transformers
implements them. In evaluation transformers draws nothing and reads the first block in place of
each random one; a model gives the same results here only if this is copied, too.

Source: Zaheer et al. 2020; transformers' `modeling_big_bird.py`. Its ranges are kept where they
differ from the paper's: at 1,024, 3,072 and 4,096 tokens, blocks are drawn from the first 1,024
tokens only, and neighbours may be among them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from bothways.model.attention.patterns import Blocks

BlockNumbers = NDArray[np.int64]

PUBLISHED = (1024, 3072, 4096)
"""Lengths, in tokens, with a range of their own …"""
REACHED = 1024
"""… which ends here."""


@dataclass(frozen=True)
class RandomBlocks:
    """The key of a layer's draws.

    Attributes:
        layer: its number, the seed.
        heads: each has draws of its own.
        max_positions: the model's longest input, in tokens.
    """

    layer: int
    heads: int
    max_positions: int


def random_blocks(
    key: RandomBlocks | None, tokens: int, pattern: Blocks
) -> Int[Tensor, "heads blocks random"]:
    """Return the random blocks that each block reads, by head; without a key, the first block."""
    count = -(-tokens // pattern.size)
    if key is None:
        return torch.zeros(1, count, pattern.random, dtype=torch.int64)
    return torch.from_numpy(_draw(key, count, pattern))


@functools.lru_cache(maxsize=256)
def _draw(key: RandomBlocks, count: int, pattern: Blocks) -> BlockNumbers:
    """Draw for `count` blocks; the first and the last attend to all and keep block 0."""
    # RandomState is NumPy's older generator, with the draws that the published models have seen.
    size, random, generator = pattern.size, pattern.random, np.random.RandomState(key.layer)
    result = np.zeros((key.heads, count, random), dtype=np.int64)
    if count * size in PUBLISHED:
        last_block = max(key.max_positions // size, count)
        for head in range(key.heads):
            # np.resize repeats the draws where a range holds fewer than `random` blocks.
            rows = [
                np.resize(generator.permutation(_range(block, last_block, size)), random)
                for block in range(1, last_block - 1)
            ]
            result[head, 1:-1] = rows[: count - 2]
    else:  # block by block and then head by head: the order of the generator's draws matters
        # A block reads the draws that are neither its neighbours nor global. The sequence is taken
        # to end with the last block that can be drawn: transformers does so.
        last_block = 4 + 2 * random
        for block in range(1, count - 1):
            barred = {0, last_block, block - 1, block, block + 1}
            barred |= {last_block - 1} if block == 1 else {1} if block == last_block - 1 else set()
            for head in range(key.heads):
                order = generator.permutation(last_block + 1).tolist()
                allowed = [number for number in order if number not in barred]
                result[head, block] = allowed[:random]
    return result


def _range(block: int, count: int, size: int) -> BlockNumbers:
    """Return the blocks that a block draws from at the published lengths."""
    # 0 and count − 1 are global blocks and never drawn.
    middle = np.arange(1, count - 1)
    last_start = REACHED // size - 1 if 2 * size < REACHED else count - 1
    previous = block - 2
    match block:
        case 1 | 2:
            return middle[block + 1 : last_start]
        case _ if block >= count - 3 or previous > last_start:
            return middle[:last_start]
        case _ if block + 1 == last_start:
            return middle[:previous]
        case _:
            return np.concatenate([middle[:previous], middle[block + 1 : last_start]])
