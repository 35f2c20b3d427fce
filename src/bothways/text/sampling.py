"""An even sample of a stream of texts, of at most a given number of characters.

The tenth gigabyte does not improve a vocabulary, but training needs memory for every distinct word.
Therefore texts are cut and joined into blocks of near-equal size, each block draws a number that
depends only on its place, and the blocks with the smallest numbers are kept: all blocks have the
same chance, one pass is enough, and the same texts give the same sample.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from bothways.core.errors import ConfigError, DataError
from bothways.core.source import rng

_BLOCK = 4096


@dataclass(frozen=True)
class Sample:
    """A sample: `blocks` of neighbouring texts in order, `characters` of `total`."""

    blocks: tuple[tuple[str, ...], ...]
    characters: int
    total: int

    def read(self) -> Iterator[str]:
        """Yield the texts."""
        return (text for block in self.blocks for text in block)


def characters_of(ceiling: float) -> int:
    """Return the characters of a ceiling in millions.

    Raises:
        ConfigError: it is not finite.
    """
    if not math.isfinite(ceiling):
        fix = "Give a large number to read all of a text."
        message = f"must be a number of millions of characters, not {ceiling}"
        raise ConfigError(message, where="ceiling", fix=fix)
    return int(ceiling * 1e6)


def sample(texts: Iterable[str], ceiling: int, seed: int = 0) -> Sample:
    """Return all texts if they fit in `ceiling` characters, else blocks of a thousandth of it.

    Raises:
        ConfigError: a ceiling below 1.
    """
    if ceiling < 1:
        message = f"must be at least one character, is {ceiling}"
        raise ConfigError(message, where="ceiling", fix="Give a positive number.")
    # The heap's first block has the largest number, and is the next to be dropped
    heap: list[tuple[float, int, tuple[str, ...]]] = []
    size_kept = size_seen = 0
    for index, block in enumerate(_blocks(texts, min(ceiling, max(_BLOCK, ceiling // 1000)))):
        size = sum(map(len, block))
        size_seen, size_kept = size_seen + size, size_kept + size
        heapq.heappush(heap, (-rng(seed, "vocabulary sample", index=index).random(), index, block))
        while size_kept > ceiling:
            size_kept -= sum(map(len, heapq.heappop(heap)[2]))
    blocks = sorted((index, block) for _, index, block in heap)
    return Sample(tuple(block for _, block in blocks), size_kept, size_seen)


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
    samples: dict[str, Sample] = {}
    for name, language in texts.items():
        samples[name] = sample(language, ceiling, seed)
        for known, room in _quotas(samples, alpha, ceiling).items():
            language_sample = samples[known]
            if language_sample.characters > room:
                smaller = sample(language_sample.read(), room, seed)
                samples[known] = Sample(smaller.blocks, smaller.characters, language_sample.total)
    blocks = list[tuple[str, ...]]()
    for name, room in _quotas(samples, alpha, ceiling).items():
        # Again and again, until the language has about as many characters as its quota.
        filled = 0
        for block in itertools.cycle(samples[name].blocks):
            size = sum(map(len, block))
            if room - filled < size / 2:
                break
            blocks.append(block)
            filled += size
    size = sum(len(text) for block in blocks for text in block)
    total = sum(language_sample.total for language_sample in samples.values())
    return Sample(tuple(blocks), size, total)


def smoothed_shares(sizes: Mapping[str, int], alpha: float) -> dict[str, float]:
    """Return shares proportional to size^alpha, which add up to 1.

    Example: alpha=0.7 and the sizes 1000 and 1 → 0.992 and 0.008, or 126 : 1.

    Raises:
        ConfigError: `alpha` is not between 0 and 1.
        DataError: a size is 0.
    """
    if not 0 <= alpha <= 1:
        message = f"must be between 0 (equal shares) and 1 (by size), not {alpha:g}"
        raise ConfigError(message, where="alpha", fix="mBERT has 0.7, XLM-R 0.3.")
    for name, size in sizes.items():
        if size <= 0:
            raise DataError("has no text", where=name, fix="Leave it out, or add text.")
    total = sum(sizes.values())
    weights = {name: (size / total) ** alpha for name, size in sizes.items()}
    total_weight = sum(weights.values())
    return {name: weight / total_weight for name, weight in weights.items()}


def _quotas(samples: Mapping[str, Sample], alpha: float, ceiling: int) -> dict[str, int]:
    """Return the characters of each language in the sample, at least one."""
    sizes = {name: language_sample.total for name, language_sample in samples.items()}
    total = min(ceiling, sum(sizes.values()))
    return {n: max(1, round(q * total)) for n, q in smoothed_shares(sizes, alpha).items()}


def _blocks(texts: Iterable[str], size: int) -> Iterator[tuple[str, ...]]:
    """Yield blocks of at most `size` characters; cut longer texts."""
    block, filled = list[str](), 0
    for text in texts:
        for start in range(0, len(text), size):
            piece = text[start : start + size]
            if filled + len(piece) > size:
                yield tuple(block)
                block, filled = [], 0
            block.append(piece)
            filled += len(piece)
    if block:
        yield tuple(block)
