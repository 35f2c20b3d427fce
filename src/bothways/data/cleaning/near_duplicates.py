"""Near-duplicates: candidates by bands of their signatures, verified by their shingles.

A shingle is a run of n words, and the similarity of two texts is the Jaccard similarity of their
sets of shingles: those in both, divided by those in at least one. Case, punctuation and the width
of characters do not matter. In scripts without spaces each character is a word, so that shingles of
Chinese are runs of n characters.

For a random order of all shingles, the probability that two sets have the same first shingle is
their similarity. So the number of equal entries in two MinHash signatures of k entries has the
binomial distribution of k draws with that probability, and the share of equal entries estimates it
with the standard deviation √(s(1 − s) / k).

Documents are taken in their order. One is dropped if it is a candidate with an earlier one that
stays, and their Jaccard similarity reaches the threshold. So each document that is dropped has a
similar one that stays, which is earlier, and a chain of small changes leaves out nothing at its
end that differs from its beginning.

Two documents are candidates if their signatures agree in all rows of one of b bands of r rows. A
pair of similarity s is one with the probability 1 − (1 − s^r)^b.

Memory holds at most 57 bytes a document, 48 for each time that a document agrees with another one
in a band, at most once for each band, and 8 for one that is dropped. The signatures and shingles
are in files.

Sources: Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, section 3.4; Broder 1997, On
the resemblance and containment of documents; entries of 16 bits as in Li and König 2010, b-Bit
Minwise Hashing.
"""

from __future__ import annotations

import itertools
import math
import unicodedata
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bothways.core.config.values import require_at_least, require_range
from bothways.core.errors import ConfigError
from bothways.core.progress import SILENT, Progress
from bothways.core.source import rng
from bothways.data.cleaning.words import chain, find_words, mix

CHUNK = 2**15
"""Shingles whose permutations are computed at once."""

RECALL = 0.95
"""The least probability with which a pair at the threshold is a candidate."""

LIMIT = 1024
"""Documents with equal rows in a band, each of which differs from all others, that a later one is
compared with. So many dissimilar documents with one band do not take quadratic time."""

MARGIN = 4
"""Standard deviations by which the estimated similarity of a candidate may be below the threshold;
others are not verified. A pair at the threshold is lost with a probability of 0.00003."""

ROWS = 2**16
"""Signatures that are read at once."""


@dataclass(frozen=True)
class SignedTexts:
    """The sets of shingles of D texts, and their MinHash signatures.

    Attributes:
        shingles: `(N)` 32-bit hashes, ascending and without repetition in each text.
        offsets: `(D+1)`, text d has the shingles `[offsets[d], offsets[d+1])`.
        signatures: `(D, permutations)`.
    """

    shingles: NDArray[np.uint32]
    offsets: NDArray[np.int64]
    signatures: NDArray[np.uint16]

    @property
    def counts(self) -> NDArray[np.int64]:
        """The number of shingles of each text, `(D)`."""
        return np.diff(self.offsets)

    def similarity(self, document: int, other: int) -> float:
        """Return the Jaccard similarity of two texts that have shingles."""
        shingles, other_shingles = (
            self.shingles[self.offsets[text] : self.offsets[text + 1]] for text in (document, other)
        )
        common = len(np.intersect1d(shingles, other_shingles, assume_unique=True))
        return common / (len(shingles) + len(other_shingles) - common)


def find_shingles(texts: Sequence[str], size: int) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Return the shingles and offsets of texts, as in `SignedTexts`.

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
    return hashes, np.searchsorted(keys, edges)


def sign(
    shingles: NDArray[np.uint32], offsets: NDArray[np.int64], permutations: int
) -> NDArray[np.uint16]:
    """Return the MinHash signatures of sets of shingles, `(D, permutations)`.

    That of an empty set means nothing.
    """
    draw = rng(0, "minhash")
    # x → factor · x + term permutes 32-bit numbers where the factor is odd.
    factors = draw.integers(2**32, size=permutations, dtype=np.uint32) | np.uint32(1)
    terms = draw.integers(2**32, size=permutations, dtype=np.uint32)
    counts = np.diff(offsets)
    smallest = np.full((permutations, len(counts)), 2**32 - 1, dtype=np.uint32)
    space = np.empty(CHUNK, dtype=np.uint32)
    for start in range(0, len(shingles), CHUNK):
        chunk = shingles[start : start + CHUNK]
        first_text = int(np.searchsorted(offsets, start, side="right")) - 1
        stop = int(np.searchsorted(offsets, start + len(chunk), side="left"))
        owners = first_text + np.flatnonzero(counts[first_text:stop])
        begins = np.maximum(offsets[owners] - start, 0)
        permuted = space[: len(chunk)]
        for row, (factor, term) in enumerate(zip(factors, terms, strict=True)):
            np.multiply(chunk, factor, out=permuted)
            np.add(permuted, term, out=permuted)
            least = np.minimum.reduceat(permuted, begins)
            smallest[row, owners] = np.minimum(smallest[row, owners], least)
    return np.asarray(smallest.T, dtype=np.uint16)  # the low 16 bits


@dataclass(frozen=True)
class NearDuplicates:
    """Leave out documents that repeat most of an earlier one.

    Attributes:
        threshold: the Jaccard similarity of two documents from which the later one is dropped.
        shingle: the number of consecutive words that are compared as one.
        permutations: entries of a signature; four times as many halve the error of an estimate.
    """

    threshold: float = 0.8
    shingle: int = 5
    permutations: int = 128

    def __post_init__(self) -> None:
        require_at_least(1, shingle=self.shingle)
        require_range("[1, 4096]", permutations=self.permutations)
        require_range("(0, 1]", threshold=self.threshold)
        if retrieval_probability(self.threshold, self.permutations, 1) < RECALL:
            message = f"{self.threshold} is too low for {self.permutations} permutations"
            raise ConfigError(message, where="threshold", fix="Set permutations higher.")

    @property
    def bands(self) -> tuple[int, int]:
        """The number of bands and of rows of each: the most rows that find a pair often enough."""
        shapes = ((self.permutations // rows, rows) for rows in range(self.permutations, 0, -1))
        return next(x for x in shapes if retrieval_probability(self.threshold, *x) >= RECALL)


def retrieval_probability(similarity: float, bands: int, rows: int) -> float:
    """Return the probability that two texts of this similarity agree in at least one band."""
    return float(1 - (1 - similarity**rows) ** bands)


def sign_texts(texts: Sequence[str], settings: NearDuplicates) -> SignedTexts:
    """Return the shingles and signatures of texts."""
    shingles, offsets = find_shingles(texts, settings.shingle)
    return SignedTexts(shingles, offsets, sign(shingles, offsets, settings.permutations))


def find_near_duplicates(
    texts: SignedTexts, settings: NearDuplicates, progress: Progress = SILENT
) -> NDArray[np.int64]:
    """Return the documents to leave out, ascending. Documents without shingles stay.

    Args:
        texts: their arrays may be memory-mapped.
    """
    documents, buckets, starts = _find_buckets(texts, settings, progress)
    threshold = settings.threshold
    deviation = math.sqrt(threshold * (1 - threshold) / settings.permutations)
    least_estimate = threshold - MARGIN * deviation  # others are not verified
    progress.stage("verifying near-duplicates", len(documents))
    filled = np.zeros(len(starts), dtype=np.int64)
    members = np.empty(len(buckets), dtype=np.int64)  # of each bucket the documents that stay
    repeated = array("q")
    edges = np.flatnonzero(np.diff(documents, prepend=-1, append=-1))
    for number, (start, stop) in enumerate(itertools.pairwise(edges)):
        document, bucket_ids = int(documents[start]), buckets[start:stop]
        ranges = zip(starts[bucket_ids], filled[bucket_ids], strict=True)
        bucket_members = [members[begin : begin + count] for begin, count in ranges]
        candidates = np.unique(np.concatenate(bucket_members))
        # Candidates of high estimates are verified first.
        estimates = (texts.signatures[candidates] == texts.signatures[document]).mean(axis=1)
        order = np.argsort(-estimates, kind="stable")
        if any(
            texts.similarity(document, int(candidates[index])) >= threshold
            for index in order[estimates[order] >= least_estimate].tolist()
        ):
            repeated.append(document)
        else:
            bucket_ids = bucket_ids[filled[bucket_ids] < LIMIT]
            members[starts[bucket_ids] + filled[bucket_ids]] = document
            filled[bucket_ids] += 1
        if number % ROWS == 0:
            progress.advance(int(start))
    return np.array(repeated, np.int64)


def _find_buckets(
    texts: SignedTexts, settings: NearDuplicates, progress: Progress
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Find the buckets: at least two documents that agree in a band.

    Returns:
        `(M)` documents that are in a bucket, ascending, each once for each of its buckets; `(M)`
        the numbers of these buckets; `(B)` the number of members of all earlier buckets.
    """
    bands, size = settings.bands
    progress.stage("finding near-duplicates", bands)
    rows, count = np.flatnonzero(texts.counts), 0
    members, buckets = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for band in range(bands):
        # A hash of some columns of each row.
        columns = slice(band * size, (band + 1) * size)
        keys = np.zeros(len(rows), dtype=np.uint64)
        for start in range(0, len(rows), ROWS):
            chunk = slice(start, start + ROWS)
            for column in texts.signatures[rows[chunk], columns].T:
                keys[chunk] = mix(chain(keys[chunk], column) + np.uint64(1))
        order = np.argsort(keys)
        keys = keys[order]
        begins = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])[: len(keys)])
        sizes = np.diff(begins, append=len(keys))  # of each distinct key
        members.append(rows[order[np.repeat(sizes > 1, sizes)]])
        sizes = sizes[sizes > 1]
        buckets.append(np.repeat(np.arange(count, count + len(sizes)), sizes))
        count += len(sizes)
        progress.advance(band + 1)
    documents, numbers = np.concatenate(members), np.concatenate(buckets)
    del members, buckets
    order = np.argsort(documents, kind="stable")
    sizes = np.bincount(numbers, minlength=count)
    return documents[order], numbers[order], np.cumsum(sizes) - sizes
