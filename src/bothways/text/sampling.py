"""An even sample of a stream of texts, of at most a given number of characters.

The tenth gigabyte does not improve a vocabulary, but training needs memory for every distinct word.
Therefore texts are cut and joined into blocks of near-equal size, each block draws a number that
depends only on its place, and the blocks with the smallest numbers are kept: all blocks have the
same chance, one pass is enough, and the same texts give the same sample.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bothways.core.errors import ConfigError
from bothways.core.keyed_rng import rng

_BLOCK = 4096


@dataclass(frozen=True)
class Sample:
    """A sample: `blocks` of neighbouring texts in order, with `kept` of `seen` characters."""

    blocks: tuple[tuple[str, ...], ...]
    kept: int
    seen: int

    def read(self) -> Iterator[str]:
        """Yield the texts."""
        return (text for block in self.blocks for text in block)


def sample(texts: Iterable[str], ceiling: int, seed: int = 0) -> Sample:
    """Return all texts if they fit in `ceiling` characters, else blocks of a thousandth of it.

    Raises:
        ConfigError: a ceiling below 1.
    """
    if ceiling < 1:
        what = f"must be at least one character, is {ceiling}"
        raise ConfigError(what, where="ceiling", fix="Give a positive number.")
    heap: list[tuple[float, int, tuple[str, ...]]] = []
    kept = seen = 0
    for index, block in enumerate(_blocks(texts, min(ceiling, max(_BLOCK, ceiling // 1000)))):
        size = sum(map(len, block))
        seen, kept = seen + size, kept + size
        heapq.heappush(heap, (-rng(seed, "vocabulary sample", index=index).random(), index, block))
        while kept > ceiling:
            kept -= sum(map(len, heapq.heappop(heap)[2]))
    blocks = sorted((index, block) for _, index, block in heap)
    return Sample(tuple(block for _, block in blocks), kept, seen)


def _blocks(texts: Iterable[str], size: int) -> Iterator[tuple[str, ...]]:
    """Yield blocks of at most `size` characters; cut longer texts."""
    block, filled = list[str](), 0
    for text in texts:
        for start in range(0, len(text), size):
            part = text[start : start + size]
            if filled + len(part) > size:
                yield tuple(block)
                block, filled = [], 0
            block.append(part)
            filled += len(part)
    if block:
        yield tuple(block)
