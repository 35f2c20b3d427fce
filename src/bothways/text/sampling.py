"""An even sample of a stream of texts, of at most a given number of characters.

The tenth gigabyte does not improve a vocabulary, but training needs memory for every distinct word.
Therefore texts are cut and joined into blocks of near-equal size, each block draws a number that
depends only on its place, and the blocks with the smallest numbers are kept: all blocks have the
same chance, one pass is enough, and the same texts give the same sample.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from bothways.core.errors import ConfigError, DataError
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


def sample_languages(
    texts: Mapping[str, Iterable[str]], alpha: float, ceiling: int, seed: int = 0
) -> Sample:
    """Return a sample of several languages, with shares of the characters by `smoothed_shares`.

    It is as large as the texts, or `ceiling`. Languages with more than their share are sampled
    evenly, languages with less are repeated. Memory holds the sample and one language of at most
    `ceiling`.

    Raises:
        ConfigError: a ceiling below 1.
        DataError: a language has no text.
    """
    kept: dict[str, Sample] = {}
    for name, language in texts.items():
        kept[name] = sample(language, ceiling, seed)
        for known, room in _quotas(kept, alpha, ceiling).items():
            held = kept[known]
            if held.kept > room:
                smaller = sample(held.read(), room, seed)
                kept[known] = Sample(smaller.blocks, smaller.kept, held.seen)
    blocks = [
        block
        for name, room in _quotas(kept, alpha, ceiling).items()
        for block in _repeated(kept[name], room)
    ]
    size = sum(len(text) for block in blocks for text in block)
    return Sample(tuple(blocks), size, sum(held.seen for held in kept.values()))


def smoothed_shares(sizes: Mapping[str, int], alpha: float) -> dict[str, float]:
    """Return shares proportional to size^alpha, which add up to 1.

    Example: alpha=0.7 and the sizes 1000 and 1 → 0.992 and 0.008, or 126 : 1.

    Raises:
        ConfigError: `alpha` is not between 0 and 1.
        DataError: a size is 0.
    """
    if not 0 <= alpha <= 1:
        what = f"must be between 0 (equal shares) and 1 (by size), not {alpha:g}"
        raise ConfigError(what, where="alpha", fix="mBERT has 0.7, XLM-R 0.3.")
    for name, size in sizes.items():
        if size <= 0:
            raise DataError("has no text", where=name, fix="Leave it out, or add text.")
    total = sum(sizes.values())
    weights = {name: (size / total) ** alpha for name, size in sizes.items()}
    whole = sum(weights.values())
    return {name: weight / whole for name, weight in weights.items()}


def _quotas(kept: Mapping[str, Sample], alpha: float, ceiling: int) -> dict[str, int]:
    """Return the characters of each language in the sample, at least one."""
    sizes = {name: held.seen for name, held in kept.items()}
    whole = min(ceiling, sum(sizes.values()))
    return {n: max(1, round(q * whole)) for n, q in smoothed_shares(sizes, alpha).items()}


def _repeated(held: Sample, room: int) -> Iterator[tuple[str, ...]]:
    """Yield the blocks again and again until they have about `room` characters."""
    for block in itertools.cycle(held.blocks):
        size = sum(map(len, block))
        if room < size / 2:
            return
        yield block
        room -= size


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
