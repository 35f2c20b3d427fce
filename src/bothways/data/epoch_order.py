"""The order in which an epoch reads some documents of a corpus, as offsets.

An epoch deals the documents, in runs of `RUN` neighbours, to windows of about `WINDOW` documents,
permutes the documents of a window, and cuts the permuted list into blocks of about `BLOCK`
sentences. Up to `WINDOW` documents there is one window, and all orders of the documents are equally
likely. For more, memory and the time until a sequence can be read grow no further: only the open
window, 20 bytes per document, and the open block, about 10 MB, are in memory, and while a window is
planned about 50 bytes more per document, and 4 per run of the corpus. The offsets remain in their
memory-mapped files, of which a window reads its runs. A document of more than `BLOCK` sentences is
read in several parts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from bothways.core.errors import DataError
from bothways.core.keyed_rng import rng

BLOCK = 2**16
"""Sentences per block; the last document of a block may exceed it."""

WINDOW, RUN = 2**22, 256
"""Documents of a window, and of each run in it: neighbours in the corpus."""

BLOCKS = 2**20
"""Numbers of blocks that a window has, used or not: block b is in window b // BLOCKS."""

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


class ComputedIds:
    """Base class of document ids that are computed where they are read, as by an array."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, places: Any) -> Any:
        if isinstance(places, slice):
            places = np.arange(*places.indices(len(self)))
        if np.size(places) and not 0 <= np.min(places) <= np.max(places) < len(self):
            raise IndexError(f"places must be from 0 to {len(self) - 1}")
        return self._ids(np.asarray(places))

    def __iter__(self) -> Iterator[np.int64]:
        return iter(self[:])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)

    def _ids(self, places: Whole) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class AllBut(ComputedIds):
    """All documents of a corpus but some, ascending.

    Attributes:
        total: the documents of the corpus.
        without: `(N)`, ascending ids that are left out; none unless given.
    """

    total: int
    without: Whole = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __len__(self) -> int:
        return self.total - len(self.without)

    def _ids(self, places: Whole) -> Any:
        return places + np.searchsorted(self._before, places, side="right")

    @functools.cached_property
    def _before(self) -> Whole:
        """For each document left out, the number of others before it."""
        return self.without - np.arange(len(self.without))


@dataclass(frozen=True)
class RestOfEpoch(ComputedIds):
    """The documents that an epoch has not begun.

    Attributes:
        chosen: all documents of the epoch.
        left: `(N)`, places of those of the open window among the chosen ones, ascending.
        runs: `(R)`, the places where runs of later windows begin, ascending.
        run: documents of a run.
    """

    chosen: DocumentIds
    left: Whole
    runs: Whole
    run: int

    def __len__(self) -> int:
        # Only the last run may be shorter.
        missing = max(0, int(self.runs[-1]) + self.run - len(self.chosen)) if len(self.runs) else 0
        return len(self.left) + self.run * len(self.runs) - missing

    def _ids(self, places: Whole) -> Any:
        near, far = places < len(self.left), places - len(self.left)
        found = np.empty_like(places)
        found[near] = self.left[places[near]]
        found[~near] = self.runs[far[~near] // self.run] + far[~near] % self.run
        return self.chosen[found]


DocumentIds = NDArray[np.integer[Any]] | AllBut | RestOfEpoch


class _Window(NamedTuple):
    """The parts of documents in a window, in the order of the epoch.

    Attributes:
        owners, firsts, sizes: `(P)`, the document of each part, as a place among the chosen ones,
            its first sentence and the number of its sentences.
        edges: `(B+1)`, block b is the parts `[edges[b], edges[b+1])`.
    """

    owners: Whole
    firsts: Whole
    sizes: NDArray[np.uint32]
    edges: Whole


class Selection:
    """The chosen documents of a corpus that are not empty.

    Attributes:
        chosen: their ids.
        windows: the number of windows of an epoch.
    """

    def __init__(self, corpus: Arrays, chosen: DocumentIds) -> None:
        """Select documents by their ids; of `AllBut`, none may be empty.

        Raises:
            DataError: the offsets contradict each other, or all documents are empty.
        """
        # Signed: NumPy turns a mixture of unsigned and signed integers into floats.
        self.sentences: Whole = np.asarray(corpus.sentences).view(np.int64)
        self.documents: Whole = np.asarray(corpus.documents).view(np.int64)
        _check(corpus, self.sentences, self.documents, chosen)
        if isinstance(chosen, np.ndarray):
            filled = self.documents[chosen + 1] > self.documents[chosen]
            chosen = chosen[filled].astype(np.int64, copy=False)
            if len(chosen) == 0:
                what = f"none of the {len(filled)} chosen documents has a sentence"
                raise DataError(what, fix="Give a corpus with text, or choose other documents.")
        self.chosen: DocumentIds = chosen
        self.windows = -(-len(chosen) // WINDOW)
        self._window = functools.lru_cache(maxsize=1)(
            functools.partial(_plan_window, self.documents, chosen, self.windows)
        )

    def __len__(self) -> int:
        return len(self.chosen)

    def bounds(self, documents: NDArray[np.integer[Any]]) -> tuple[Whole, Whole]:
        """Return the sentences `[first, stop)` of these documents."""
        return self.documents[documents], self.documents[documents + 1]

    def blocks(self, seed: int, epoch: int, window: int = 0) -> int:
        """Return the number of blocks of a window, at least one; none has no block."""
        if window >= self.windows:
            return 0
        return len(self._window(seed, epoch, window).edges) - 1

    def following(self, seed: int, epoch: int, block: int) -> int | None:
        """Return the number of the block after this one; None after the last of the epoch."""
        window, place = divmod(block, BLOCKS)
        if place + 1 < self.blocks(seed, epoch, window):
            return block + 1
        return (window + 1) * BLOCKS if window + 1 < self.windows else None

    def share_before(self, seed: int, epoch: int, block: int, part: float) -> float:
        """Return the share of an epoch before a place: that after the share `part` of a block."""
        window, place = divmod(block, BLOCKS)
        # Where a window begins, it need not be planned.
        inside = (place + part) / self.blocks(seed, epoch, window) if place or part else 0.0
        return (window + inside) / self.windows

    def unread(self, seed: int, epoch: int, block: int, begun: Whole) -> DocumentIds:
        """Return the documents of an epoch that are in no earlier block.

        Args:
            begun: places, among the chosen documents, of those in this block that are left out.
        """
        window, place = divmod(block, BLOCKS)
        opened = self._window(seed, epoch, window)
        read = np.concatenate([opened.owners[: opened.edges[place]], begun])
        own = _places(len(self), _runs(len(self), self.windows, seed, epoch, window, window + 1))
        later = _runs(len(self), self.windows, seed, epoch, window + 1, self.windows)
        rest = RestOfEpoch(self.chosen, np.setdiff1d(own, read), later, RUN)
        return rest if len(later) else np.asarray(rest)

    def open(self, seed: int, epoch: int, block: int) -> EpochBlock:
        """Open a block of an epoch.

        Raises:
            DataError: a sentence in it is empty.
        """
        window, place = divmod(block, BLOCKS)
        opened = self._window(seed, epoch, window)
        parts = slice(*opened.edges[place : place + 2])
        firsts, sizes = opened.firsts[parts], opened.sizes[parts].astype(np.int64)
        ends = np.concatenate([[0], np.cumsum(sizes)])
        sentences = np.arange(ends[-1]) + np.repeat(firsts - ends[:-1], sizes)
        starts, stops = self.sentences[sentences], self.sentences[sentences + 1]
        if (stops <= starts).any():
            broken = sentences[np.argmax(stops <= starts)]
            what = f"sentence {broken} of the corpus has no tokens"
            raise DataError(what, fix="Build the corpus again.")
        return EpochBlock(starts, stops, ends, opened.owners[parts])


def _check(corpus: Arrays, sentences: Whole, documents: Whole, chosen: DocumentIds) -> None:
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
    while isinstance(chosen, RestOfEpoch):
        chosen = chosen.chosen
    if isinstance(chosen, AllBut):
        chosen = np.array([0, chosen.total - 1])
    if len(chosen) and not 0 <= chosen.min() <= chosen.max() < len(documents) - 1:
        raise DataError(
            f"documents {chosen.min()} to {chosen.max()} were chosen; "
            f"the corpus has 0 to {len(documents) - 2}",
            fix="Split the corpus again.",
        )


def _plan_window(
    documents: Whole, chosen: DocumentIds, windows: int, seed: int, epoch: int, window: int
) -> _Window:
    """Split the documents of a window into parts, permute these, and find where blocks begin."""
    places = _places(len(chosen), _runs(len(chosen), windows, seed, epoch, window, window + 1))
    parts = []
    for at in range(0, len(places), CHUNK):
        ids = chosen[places[at : at + CHUNK]]
        parts.append(_parts(places[at : at + CHUNK], documents[ids], documents[ids + 1]))
    owners, firsts, sizes = (np.concatenate(column) for column in zip(*parts, strict=True))
    del parts, places
    order = np.arange(len(sizes), dtype=np.uint32)
    rng(seed, "documents", epoch=epoch, index=window).shuffle(order)
    sizes = sizes[order]
    before = np.cumsum(sizes, dtype=np.int64)
    before -= sizes
    edges = np.searchsorted(before, np.arange(0, before[-1] + 1, BLOCK))
    del before
    return _Window(owners[order], firsts[order], sizes, np.append(edges, len(order)))


def _runs(count: int, windows: int, seed: int, epoch: int, first: int, stop: int) -> Whole:
    """Return where the runs of the windows `[first, stop)` begin among `count` chosen documents."""
    runs = np.arange(-(-count // RUN), dtype=np.uint32)
    rng(seed, "windows", epoch=epoch).shuffle(runs)
    mine = runs[len(runs) * first // windows : len(runs) * stop // windows]
    return np.sort(mine).astype(np.int64) * RUN


def _places(count: int, runs: Whole) -> Whole:
    """Return the places of the documents of some runs among `count` chosen ones, ascending."""
    places = (runs[:, None] + np.arange(RUN)).reshape(-1)
    return places[places < count]


def _parts(places: Whole, first: Whole, stop: Whole) -> tuple[Whole, Whole, NDArray[np.uint32]]:
    """Split the documents at these places into parts of at most `BLOCK` sentences.

    Returns:
        The place, first sentence and size of each part.
    """
    counts = -(-(stop - first) // BLOCK)
    document = np.repeat(np.arange(len(first)), counts)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    firsts = first[document] + nth * BLOCK
    sizes = np.minimum(stop[document] - firsts, BLOCK)
    return places[document], firsts, sizes.astype(np.uint32)
