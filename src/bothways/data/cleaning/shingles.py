"""Sets of shingles of texts, their similarity, and their MinHash signatures.

A shingle is a run of n words, and the similarity of two texts is the Jaccard similarity of their
sets of shingles: those in both, divided by those in at least one. Case, punctuation and the width
of characters do not matter. In scripts without spaces each character is a word, so that shingles of
Chinese are runs of n characters.

For a random order of all shingles, the probability that two sets have the same first shingle is
their similarity. So the number of equal entries in two signatures of k entries has the binomial
distribution of k draws with that probability, and the share of equal entries estimates it with the
standard deviation √(s(1 − s) / k).

Sources: Broder 1997, On the resemblance and containment of documents; entries of 16 bits as in Li
and König 2010, b-Bit Minwise Hashing.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bothways.core.source import rng
from bothways.data.cleaning.words import chain, find_words, mix

CHUNK = 2**15
"""Shingles whose permutations are computed at once."""


@dataclass(frozen=True)
class ShingleTable:
    """The sets of shingles of D texts.

    Attributes:
        values: `(N)` 32-bit hashes, ascending and without repetition in each text.
        offsets: `(D+1)`, text d has the shingles `[offsets[d], offsets[d+1])`.
    """

    values: NDArray[np.uint32]
    offsets: NDArray[np.int64]

    @property
    def counts(self) -> NDArray[np.int64]:
        """The number of shingles of each text, `(D)`."""
        return np.diff(self.offsets)

    def similarity(self, document: int, other: int) -> float:
        """Return the Jaccard similarity of two texts that have shingles."""
        shingles, other_shingles = (
            self.values[self.offsets[text] : self.offsets[text + 1]] for text in (document, other)
        )
        common = len(np.intersect1d(shingles, other_shingles, assume_unique=True))
        return common / (len(shingles) + len(other_shingles) - common)


def find_shingles(texts: Sequence[str], size: int) -> ShingleTable:
    """Return the sets of shingles of texts.

    Of a text with fewer words than a shingle has, all words are one shingle; a text without words
    has none.

    Args:
        size: the number of words of a shingle.
    """
    folded = [unicodedata.normalize("NFKC", text).lower() for text in texts]
    words = find_words(folded, letters=True)
    # The number of words from each word to the end of its text, itself included.
    left = np.repeat(words.offsets[1:], words.counts) - np.arange(len(words.hashes))
    values = np.zeros(len(words.hashes), dtype=np.uint64)
    for offset in range(size):
        # Words that have another word of their text at this offset: shingles end with the text.
        inside = np.flatnonzero(left > offset)
        values[inside] = chain(values[inside], words.hashes[inside + offset])
    # The first word of a text begins a shingle even if fewer than `size` words follow.
    is_first = np.zeros(len(values), dtype=np.bool_)
    is_first[words.offsets[:-1][words.counts > 0]] = True
    complete = (left >= size) | is_first
    hashes = (mix(values[complete]) >> np.uint64(32)).astype(np.uint32)
    counts = np.minimum(words.counts, np.maximum(words.counts - size + 1, 1))
    # Text in the upper half, hash in the lower one: one sort orders both, and equal keys are one
    # shingle of one text.
    keys = np.repeat(np.arange(len(texts), dtype=np.uint64), counts) << np.uint64(32)
    keys |= hashes
    keys.sort()
    keys = keys[np.append(True, keys[1:] != keys[:-1])[: len(keys)]]
    edges = np.arange(len(texts) + 1, dtype=np.uint64) << np.uint64(32)
    hashes = (keys & np.uint64(2**32 - 1)).astype(np.uint32)
    return ShingleTable(hashes, np.searchsorted(keys, edges))


def sign(shingles: ShingleTable, permutations: int) -> NDArray[np.uint16]:
    """Return the MinHash signatures of sets of shingles, `(D, permutations)`.

    That of an empty set means nothing.
    """
    counts, offsets = shingles.counts, shingles.offsets
    smallest = np.full((permutations, len(counts)), 2**32 - 1, dtype=np.uint32)
    space = np.empty(CHUNK, dtype=np.uint32)
    for start in range(0, len(shingles.values), CHUNK):
        chunk = shingles.values[start : start + CHUNK]
        first_text = int(np.searchsorted(offsets, start, side="right")) - 1
        stop = int(np.searchsorted(offsets, start + len(chunk), side="left"))
        owners = first_text + np.flatnonzero(counts[first_text:stop])
        begins = np.maximum(offsets[owners] - start, 0)
        permuted = space[: len(chunk)]
        for row, (factor, term) in enumerate(zip(*_permutations(permutations), strict=True)):
            np.multiply(chunk, factor, out=permuted)
            np.add(permuted, term, out=permuted)
            least = np.minimum.reduceat(permuted, begins)
            smallest[row, owners] = np.minimum(smallest[row, owners], least)
    return np.asarray(smallest.T, dtype=np.uint16)  # the low 16 bits


@functools.lru_cache(maxsize=4)
def _permutations(count: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return odd factors and terms, with which x → factor · x + term permutes 32-bit numbers."""
    draw = rng(0, "minhash")
    factors = draw.integers(2**32, size=count, dtype=np.uint32) | np.uint32(1)
    return factors, draw.integers(2**32, size=count, dtype=np.uint32)
