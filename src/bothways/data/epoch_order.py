"""The order in which an epoch reads some documents of a corpus, as offsets.

An epoch permutes the documents and cuts the permuted list into blocks of about `BLOCK` sentences.
Only the open block is in memory, besides 32 bytes per chosen document: 8 for its id, 16 for its
first sentence, its size and its owner, 4 for the order of the epoch and 4 for the previous order.
10⁷ documents of 10 sentences need 320 MB (measured: 340, and 460 while the arrays are built). The
sentence offsets, 8 bytes each, remain in their memory-mapped file. A block needs about 10 MB for
any corpus: a document of more than `BLOCK` sentences is read in several parts.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from bothways.core.errors import DataError
from bothways.core.keyed_rng import rng

BLOCK = 2**16
"""Sentences per block; the last document of a block may exceed it."""

CHUNK = 2**18
"""Documents that are split into parts at a time."""

Whole = NDArray[np.int64]


@runtime_checkable
class Arrays(Protocol):
    """Corpus of T tokens in S sentences in D documents. Documents may be empty, sentences not."""

    @property
    def tokens(self) -> NDArray[Any]:
        """`(T)`: ids, one document after the other."""
        ...

    @property
    def sentences(self) -> NDArray[Any]:
        """`(S+1)`, 8-byte integers: sentence s is tokens `[sentences[s], sentences[s+1])`."""
        ...

    @property
    def documents(self) -> NDArray[Any]:
        """`(D+1)`, 8-byte integers: document d is sentences `[documents[d], documents[d+1])`."""
        ...

    @property
    def words(self) -> NDArray[np.uint8] | None:
        """`(⌈T/8⌉)`: a bit per token, True where a word begins; None where the ids say it."""
        ...


@dataclass(frozen=True)
class EpochBlock:
    """The S sentences of N documents.

    Attributes:
        starts, stops: `(S)`, sentence s is tokens `[starts[s], stops[s])` of the corpus.
        edges: `(N+1)`, document n is sentences `[edges[n], edges[n+1])` of the block.
        owners: `(N)`, the position of each document among the chosen ones.
    """

    starts: Whole
    stops: Whole
    edges: Whole
    owners: Whole


class Selection:
    """The chosen documents of a corpus that are not empty."""

    def __init__(self, corpus: Arrays, chosen: NDArray[np.integer[Any]]) -> None:
        """Select documents by their ids.

        Raises:
            DataError: the offsets contradict each other, or all documents are empty.
        """
        # Signed: NumPy turns a mixture of unsigned and signed integers into floats.
        self.sentences: Whole = np.asarray(corpus.sentences).view(np.int64)
        self.documents: Whole = np.asarray(corpus.documents).view(np.int64)
        _check(corpus, self.sentences, self.documents, chosen)
        filled = self.documents[chosen + 1] > self.documents[chosen]
        self.chosen: Whole = chosen[filled].astype(np.int64, copy=False)
        if len(self.chosen) == 0:
            what = f"none of the {len(chosen)} chosen documents has a sentence"
            raise DataError(what, fix="Give a corpus with text, or choose other documents.")
        parts = [
            _parts(at, *self.bounds(self.chosen[at : at + CHUNK]))
            for at in range(0, len(self.chosen), CHUNK)
        ]
        self._owners, self._firsts, self._sizes = (
            np.concatenate(column) for column in zip(*parts, strict=True)
        )
        self._stream = functools.lru_cache(maxsize=2)(functools.partial(_permute, self._sizes))

    def __len__(self) -> int:
        return len(self.chosen)

    def bounds(self, documents: Whole) -> tuple[Whole, Whole]:
        """Return the sentences `[first, stop)` of these documents."""
        return self.documents[documents], self.documents[documents + 1]

    def blocks(self, seed: int, epoch: int) -> int:
        """Return the number of blocks of an epoch, at least one."""
        return len(self._stream(seed, epoch)[1]) - 1

    def opened_before(self, seed: int, epoch: int, block: int) -> NDArray[np.uint32]:
        """Return the places, among the chosen documents, of those in earlier blocks of an epoch."""
        order, edges = self._stream(seed, epoch)
        return self._owners[order[: edges[block]]]

    def open(self, seed: int, epoch: int, block: int) -> EpochBlock:
        """Open a block of an epoch.

        Raises:
            DataError: a sentence in it is empty.
        """
        order, edges = self._stream(seed, epoch)
        parts = order[edges[block] : edges[block + 1]]
        firsts, sizes = self._firsts[parts], self._sizes[parts].astype(np.int64)
        ends = np.concatenate([[0], np.cumsum(sizes)])
        sentences = np.arange(ends[-1]) + np.repeat(firsts - ends[:-1], sizes)
        starts, stops = self.sentences[sentences], self.sentences[sentences + 1]
        if (stops <= starts).any():
            broken = sentences[np.argmax(stops <= starts)]
            what = f"sentence {broken} of the corpus has no tokens"
            raise DataError(what, fix="Build the corpus again.")
        return EpochBlock(starts, stops, ends, self._owners[parts].astype(np.int64))


def _check(
    corpus: Arrays, sentences: Whole, documents: Whole, chosen: NDArray[np.integer[Any]]
) -> None:
    if (
        len(documents) == 0
        or documents[-1] != len(sentences) - 1
        or sentences[-1] != len(corpus.tokens)
    ):
        raise DataError(
            f"inconsistent corpus: {len(corpus.tokens)} tokens, {len(sentences) - 1} sentences and "
            f"{len(documents) - 1} documents do not fit their offsets",
            fix="Build the corpus again.",
        )
    if len(chosen) and not 0 <= chosen.min() <= chosen.max() < len(documents) - 1:
        raise DataError(
            f"documents {chosen.min()} to {chosen.max()} were chosen; "
            f"the corpus has 0 to {len(documents) - 2}",
            fix="Split the corpus again.",
        )


def _parts(
    at: int, first: Whole, stop: Whole
) -> tuple[NDArray[np.uint32], Whole, NDArray[np.uint32]]:
    """Split documents `at`, `at` + 1 … into parts of at most `BLOCK` sentences.

    Returns:
        The document, first sentence and size of each part.
    """
    counts = -(-(stop - first) // BLOCK)
    document = np.repeat(np.arange(len(first)), counts)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    firsts = first[document] + nth * BLOCK
    sizes = np.minimum(stop[document] - firsts, BLOCK)
    return (at + document).astype(np.uint32), firsts, sizes.astype(np.uint32)


def _permute(sizes: NDArray[np.uint32], seed: int, epoch: int) -> tuple[NDArray[np.uint32], Whole]:
    """Return the order of the parts and the starts of the blocks, with the end of the last."""
    order = np.arange(len(sizes), dtype=np.uint32)
    rng(seed, "documents", epoch=epoch).shuffle(order)
    sizes = sizes[order]
    before = np.cumsum(sizes, dtype=np.int64)
    before -= sizes
    edges = np.searchsorted(before, np.arange(0, before[-1] + 1, BLOCK))
    return order, np.append(edges, len(order))
