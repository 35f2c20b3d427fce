"""An even sample of a stream of texts, within a ceiling of characters.

A vocabulary does not get better by the tenth gigabyte, but its training needs memory for every distinct word. So texts are cut
and joined to blocks of near-equal size, each block draws a number that depends on its place alone, and those with the smallest
numbers stay: every block has the same chance, one pass is enough, and the same texts give the same sample.
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
    """`blocks`: neighbouring texts, in their order. `kept` of `seen` characters are in it."""

    blocks: tuple[tuple[str, ...], ...]
    kept: int
    seen: int

    def read(self) -> Iterator[str]:
        """Its texts."""
        return (text for block in self.blocks for text in block)


def sample(texts: Iterable[str], ceiling: int, seed: int = 0) -> Sample:
    """At most `ceiling` characters of the texts: all of them if they fit, else blocks of a thousandth of it, evenly drawn.

    Raises:
        ConfigError: a ceiling below 1.
    """
    if ceiling < 1:
        raise ConfigError(
            f"must be at least one character, is {ceiling}",
            where="ceiling",
            fix="Give a positive number.",
        )
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
    """Blocks of at most `size` characters; a longer text is cut."""
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
