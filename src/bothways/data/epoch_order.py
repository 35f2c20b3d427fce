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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bothways.core.errors import DataError
from bothways.core.source import rng

if TYPE_CHECKING:
    from bothways.data.corpus import Corpus

BLOCK = 2**16
"""Sentences per block; the last document of a block may exceed it."""

WINDOW, RUN = 2**22, 256
"""Documents of a window, and of each run in it: neighbours in the corpus."""

BLOCKS = 2**20
"""Numbers of blocks that a window has, used or not: block b is in window b // BLOCKS."""

CHUNK = 2**18
"""Documents that are split into parts at a time."""

Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class EpochBlock:
    """The S sentences of N documents.

    Attributes:
        starts, stops: `(S)`, sentence s is tokens `[starts[s], stops[s])` of the corpus.
        edges: `(N+1)`, document n is sentences `[edges[n], edges[n+1])` of the block.
        owners: `(N)`, the position of each document among the chosen ones.
    """

    starts: Int64s
    stops: Int64s
    edges: Int64s
    owners: Int64s


class ComputedIds:
    """Base class of document ids that are computed where they are read, as by an array."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, positions: Any) -> Any:
        if isinstance(positions, slice):
            positions = np.arange(*positions.indices(len(self)))
        if np.size(positions) and not 0 <= np.min(positions) <= np.max(positions) < len(self):
            raise IndexError(f"positions must be from 0 to {len(self) - 1}")
        return self._ids(np.asarray(positions))

    def __iter__(self) -> Iterator[np.int64]:
        return iter(self[:])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)

    def _ids(self, positions: Int64s) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class AllExcept(ComputedIds):
    """The ids of all documents of a corpus except some, ascending.

    Attributes:
        without: `(N)`, the excluded ids, ascending; none by default.
    """

    total: int
    without: Int64s = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __len__(self) -> int:
        return self.total - len(self.without)

    def _ids(self, positions: Int64s) -> Any:
        return positions + np.searchsorted(self._before, positions, side="right")

    @functools.cached_property
    def _before(self) -> Int64s:
        """For each document left out, the number of others before it."""
        return self.without - np.arange(len(self.without))


@dataclass(frozen=True)
class RestOfEpoch(ComputedIds):
    """The documents that an epoch has not begun.

    Attributes:
        ids: all documents of the epoch.
        open_window: `(N)`, the documents of the open window, as positions among the chosen ones,
            ascending.
        runs: `(R)`, the positions at which runs of later windows begin, ascending.
    """

    ids: DocumentIds
    open_window: Int64s
    runs: Int64s

    def __len__(self) -> int:
        # Only the last run may be shorter.
        missing = max(0, int(self.runs[-1]) + RUN - len(self.ids)) if len(self.runs) else 0
        return len(self.open_window) + RUN * len(self.runs) - missing

    def _ids(self, positions: Int64s) -> Any:
        near, far = positions < len(self.open_window), positions - len(self.open_window)
        selected = np.empty_like(positions)
        selected[near] = self.open_window[positions[near]]
        selected[~near] = self.runs[far[~near] // RUN] + far[~near] % RUN
        return self.ids[selected]


DocumentIds = NDArray[np.integer[Any]] | AllExcept | RestOfEpoch


class _Window(NamedTuple):
    """The parts of documents in a window, in the order of the epoch.

    Attributes:
        owners, firsts, sizes: `(P)`, the position among the chosen documents that each part is of,
            its first sentence and the number of its sentences.
        edges: `(B+1)`, block b is the parts `[edges[b], edges[b+1])`.
        sentences_before: `(B+1)`, the sentences of the window before each edge.
    """

    owners: Int64s
    firsts: Int64s
    sizes: NDArray[np.uint32]
    edges: Int64s
    sentences_before: Int64s


class Selection:
    """The chosen documents of a corpus that are not empty."""

    def __init__(self, corpus: Corpus, ids: DocumentIds) -> None:
        """Select documents by their ids; of `AllExcept`, none may be empty.

        Raises:
            DataError: all documents are empty.
        """
        # Signed: NumPy turns a mixture of unsigned and signed integers into floats.
        self.sentences = np.asarray(corpus.sentences).view(np.int64)
        self.documents = np.asarray(corpus.documents).view(np.int64)
        if isinstance(ids, np.ndarray):
            filled = self.documents[ids + 1] > self.documents[ids]
            ids = ids[filled].astype(np.int64, copy=False)
            if len(ids) == 0:
                message = f"none of the {len(filled)} chosen documents has a sentence"
                raise DataError(message, fix="Give a corpus with text, or choose other documents.")
        self.ids: DocumentIds = ids
        self.windows = -(-len(ids) // WINDOW)
        self._window = functools.lru_cache(maxsize=1)(
            functools.partial(_plan_window, self.documents, ids, self.windows)
        )

    def __len__(self) -> int:
        return len(self.ids)

    def blocks(self, seed: int, epoch: int, window: int = 0) -> int:
        """Return the number of blocks of a window, at least one; none has no block."""
        if window >= self.windows:
            return 0
        return len(self._window(seed, epoch, window).edges) - 1

    def block_numbers(self, seed: int, epoch: int, block: int = 0) -> Iterator[int]:
        """Yield the numbers of the blocks of an epoch from `block` on."""
        for window in range(block // BLOCKS, self.windows):
            begin = max(block, window * BLOCKS)
            yield begin  # before the window is opened
            yield from range(begin + 1, window * BLOCKS + self.blocks(seed, epoch, window))

    def share_before(self, seed: int, epoch: int, block: int, fraction: float) -> float:
        """Return the share of an epoch before a position: after the share `fraction` of a block.

        All windows count equally, and all sentences of a window.
        """
        window, index = divmod(block, BLOCKS)
        if not index and not fraction:  # where a window begins, it need not be planned
            return window / self.windows
        sentences = self._window(seed, epoch, window).sentences_before
        done = sentences[index] + fraction * (sentences[index + 1] - sentences[index])
        return (window + float(done / sentences[-1])) / self.windows

    def unread(self, seed: int, epoch: int, block: int, begun: Int64s) -> tuple[DocumentIds, float]:
        """Return the documents of an epoch that are in no earlier block, and their share of it.

        Args:
            begun: positions, among the chosen documents, of the begun documents in this block.
        """
        window, index = divmod(block, BLOCKS)
        opened = self._window(seed, epoch, window)
        # Documents of earlier blocks of the window, and those that this block has begun.
        begun_positions = np.concatenate([opened.owners[: opened.edges[index]], begun])
        count, windows = len(self), self.windows
        positions = _positions(count, _runs(count, windows, seed, epoch, window, window + 1))
        later_runs = _runs(count, windows, seed, epoch, window + 1, windows)
        left = np.setdiff1d(positions, begun_positions)
        sentences = opened.sizes[np.isin(opened.owners, left)].sum(dtype=np.int64)
        inside = sentences / opened.sentences_before[-1]
        share = float(windows - window - 1 + inside) / windows
        remaining = RestOfEpoch(self.ids, left, later_runs)
        return remaining if len(later_runs) else np.asarray(remaining), share

    def open(self, seed: int, epoch: int, block: int) -> EpochBlock:
        """Open a block of an epoch.

        Raises:
            DataError: a sentence in it is empty.
        """
        window, index = divmod(block, BLOCKS)
        opened = self._window(seed, epoch, window)
        block_parts = slice(*opened.edges[index : index + 2])
        firsts, sizes = opened.firsts[block_parts], opened.sizes[block_parts].astype(np.int64)
        ends = np.concatenate([[0], np.cumsum(sizes)])
        # Numbers of sentences: parts that begin at 5 and 20 with 2 and 3 sentences → 5 6 20 21 22.
        sentences = np.arange(ends[-1]) + np.repeat(firsts - ends[:-1], sizes)
        starts, stops = self.sentences[sentences], self.sentences[sentences + 1]
        if (stops <= starts).any():
            broken = sentences[np.argmax(stops <= starts)]
            message = f"sentence {broken} of the corpus has no tokens"
            raise DataError(message, fix="Build the corpus again.")
        return EpochBlock(starts, stops, ends, opened.owners[block_parts])


def _plan_window(
    documents: Int64s, document_ids: DocumentIds, windows: int, seed: int, epoch: int, window: int
) -> _Window:
    """Split the documents of a window into parts, permute these, and find where blocks begin."""
    count = len(document_ids)
    positions = _positions(count, _runs(count, windows, seed, epoch, window, window + 1))
    split = []
    for at in range(0, len(positions), CHUNK):
        chunk = positions[at : at + CHUNK]
        ids = document_ids[chunk]
        indices, begins, stops = cut_ranges(documents[ids], documents[ids + 1], BLOCK)
        split.append((chunk[indices], begins, (stops - begins).astype(np.uint32)))
    owners, firsts, sizes = (np.concatenate(column) for column in zip(*split, strict=True))
    del split, positions
    order = np.arange(len(sizes), dtype=np.uint32)
    rng(seed, "documents", epoch=epoch, index=window).shuffle(order)
    sizes = sizes[order]
    sentences_before = np.cumsum(sizes, dtype=np.int64)
    total = sentences_before[-1]
    sentences_before -= sizes
    # A block begins with the first part at or after each BLOCK-th sentence of the window.
    edges = np.searchsorted(sentences_before, np.arange(0, sentences_before[-1] + 1, BLOCK))
    sentences = np.append(sentences_before[edges], total)
    del sentences_before
    return _Window(owners[order], firsts[order], sizes, np.append(edges, len(order)), sentences)


def _runs(count: int, windows: int, seed: int, epoch: int, begin: int, stop: int) -> Int64s:
    """Return the first index of each run of the windows `[begin, stop)` in `count` documents."""
    runs = np.arange(-(-count // RUN), dtype=np.uint32)
    rng(seed, "windows", epoch=epoch).shuffle(runs)
    selected = runs[len(runs) * begin // windows : len(runs) * stop // windows]
    return np.sort(selected).astype(np.int64) * RUN


def _positions(count: int, runs: Int64s) -> Int64s:
    """Return the positions of the documents of some runs among `count` chosen ones, ascending."""
    positions = (runs[:, None] + np.arange(RUN)).reshape(-1)
    return positions[positions < count]


def cut_ranges(begins: Int64s, stops: Int64s, size: int) -> tuple[Int64s, Int64s, Int64s]:
    """Cut ranges into pieces of at most `size`; return the range, begin and stop of each piece."""
    counts = -(-(stops - begins) // size)
    owners = np.repeat(np.arange(len(begins)), counts)
    nth = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = begins[owners] + nth * size
    return owners, starts, np.minimum(starts + size, stops[owners])
