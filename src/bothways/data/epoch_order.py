"""The order in which an epoch reads some documents of a corpus, as offsets.

An epoch deals the documents, in runs of `RUN` neighbours, to windows of about `WINDOW` documents,
permutes the documents of a window, and cuts the permuted list into blocks of about `BLOCK`
sentences. Up to `WINDOW` documents there is one window, and all orders of the documents are equally
likely. For more, memory and the time until a sequence can be read grow no further: only the open
window, 20 bytes per document, and the open block, about 10 MB, are in memory, and while a window is
planned about 50 bytes more per document, and 4 per run of the corpus. The offsets remain in their
memory-mapped files, of which a window reads its runs. A document of more than `BLOCK` sentences is
read in several parts.

Of a corpus at a URL, what a block reads is fetched when it is opened, and then the next window.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bothways.core.config.checks import require_at_least
from bothways.core.errors import ConfigError, DataError
from bothways.core.keyed_rng import rng
from bothways.data import remote_arrays

BLOCK = 2**16
"""Sentences per block; the last document of a block may exceed it."""

WINDOW, RUN = 2**22, 256
"""Documents of a window, and of each run in it: neighbours in the corpus."""

BLOCKS = 2**20
"""Numbers of blocks that a window has, used or not: block b is in window b // BLOCKS."""

CHUNK = 2**18
"""Documents that are split into parts at a time."""

CLUSTER = 2**10
"""Neighbouring documents that are sampled together."""
OVERSAMPLE = 1.25
"""The factor by which `sample_clustered` exceeds the requested tokens, on average."""

Whole = NDArray[np.int64]


@dataclass(frozen=True)
class Windows:
    """Read an epoch in smaller windows of longer runs.

    A window of a corpus at a URL is fetched once an epoch, in requests that are read in full, and a
    cache has room for it.

    Attributes:
        documents: of a window. More mix the corpus better, and need more room in the cache, which
            holds a window and the next one.
        run: neighbouring documents that come into a window together.
    """

    documents: int = 2**20
    run: int = 2**12
    kind: Literal["windows"] = "windows"

    def __post_init__(self) -> None:
        require_at_least(1, run=self.run)
        if self.documents < self.run:
            message = f"must be at least the {self.run:,} of a run, not {self.documents:,}"
            fix = "Set shuffle.run lower, too."
            raise ConfigError(message, where="shuffle.documents", fix=fix)


@dataclass(frozen=True)
class EpochBlock:
    """The S sentences of N documents.

    Attributes:
        starts, stops: `(S)`, sentence s is tokens `[starts[s], stops[s])` of the corpus.
        edges: `(N+1)`, document n is sentences `[edges[n], edges[n+1])` of the block.
        owners: `(N)`, the position of each document among the chosen ones.
        window: the same for each part of a document in the window; None for the whole corpus.
    """

    starts: Whole
    stops: Whole
    edges: Whole
    owners: Whole
    window: Whole | None = None


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
class AllExcept(ComputedIds):
    """The ids of all documents of a corpus except some, ascending.

    Attributes:
        total: the number of documents in the corpus.
        without: `(N)`, the excluded ids, ascending; none by default.
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


DocumentIds = NDArray[np.integer[Any]] | AllExcept | RestOfEpoch


class _Window(NamedTuple):
    """The parts of documents in a window, in the order of the epoch.

    Attributes:
        owners, firsts, sizes: `(P)`, the document of each part, as a place among the chosen ones,
            its first sentence and the number of its sentences.
        edges: `(B+1)`, block b is the parts `[edges[b], edges[b+1])`.
        before: `(B+1)`, the sentences of the window before each edge.
    """

    owners: Whole
    firsts: Whole
    sizes: NDArray[np.uint32]
    edges: Whole
    before: Whole


class Selection:
    """The chosen documents of a corpus that are not empty.

    Attributes:
        chosen: their ids.
        shuffle: how documents are dealt to windows.
        windows: the number of windows of an epoch.
        run: neighbours that come into a window together.
    """

    def __init__(
        self, corpus: remote_arrays.Arrays, chosen: DocumentIds, shuffle: Windows | None = None
    ) -> None:
        """Select documents by their ids; of `AllExcept`, none may be empty.

        Args:
            shuffle: None for windows of `WINDOW` documents, in runs of `RUN`.

        Raises:
            DataError: the offsets contradict each other, or all documents are empty.
        """
        # Signed: NumPy turns a mixture of unsigned and signed integers into floats.
        self.sentences, self.documents = _signed(corpus.sentences), _signed(corpus.documents)
        _check(corpus, self.sentences, self.documents, chosen)
        if isinstance(chosen, np.ndarray):
            filled = self.documents[chosen + 1] > self.documents[chosen]
            chosen = chosen[filled].astype(np.int64, copy=False)
            if len(chosen) == 0:
                message = f"none of the {len(filled)} chosen documents has a sentence"
                raise DataError(message, fix="Give a corpus with text, or choose other documents.")
        self.chosen: DocumentIds = chosen
        self.shuffle, self._corpus = shuffle, corpus
        size, self.run = (WINDOW, RUN) if shuffle is None else (shuffle.documents, shuffle.run)
        self.windows = -(-len(chosen) // size)
        self._window = functools.lru_cache(maxsize=1)(
            functools.partial(_plan_window, self.documents, chosen, self.windows, self.run)
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
        """Return the share of an epoch before a place: that after the share `part` of a block.

        All windows count equally, and all sentences of a window.
        """
        window, place = divmod(block, BLOCKS)
        if not place and not part:  # where a window begins, it need not be planned
            return window / self.windows
        before = self._window(seed, epoch, window).before
        done = before[place] + part * (before[place + 1] - before[place])
        return (window + float(done / before[-1])) / self.windows

    def unread(self, seed: int, epoch: int, block: int, begun: Whole) -> tuple[DocumentIds, float]:
        """Return the documents of an epoch that are in no earlier block, and their share of it.

        Args:
            begun: places, among the chosen documents, of those in this block that are left out.
        """
        window, place = divmod(block, BLOCKS)
        opened = self._window(seed, epoch, window)
        read = np.concatenate([opened.owners[: opened.edges[place]], begun])
        count, windows, run = len(self), self.windows, self.run
        own = _places(count, _runs(count, windows, run, seed, epoch, window, window + 1), run)
        later = _runs(count, windows, run, seed, epoch, window + 1, windows)
        left = np.setdiff1d(own, read)
        inside = opened.sizes[np.isin(opened.owners, left)].sum(dtype=np.int64) / opened.before[-1]
        share = float(windows - window - 1 + inside) / windows
        rest = RestOfEpoch(self.chosen, left, later, run)
        return rest if len(later) else np.asarray(rest), share

    def open(self, seed: int, epoch: int, block: int) -> EpochBlock:
        """Open a block of an epoch.

        Raises:
            DataError: a sentence in it is empty.
        """
        window, place = divmod(block, BLOCKS)
        opened = self._window(seed, epoch, window)
        parts = slice(*opened.edges[place : place + 2])
        firsts, sizes = opened.firsts[parts], opened.sizes[parts].astype(np.int64)
        if isinstance(self.sentences, remote_arrays.RemoteArray):
            self.sentences.fetch_ahead(firsts, firsts + sizes + 1)
        ends = np.concatenate([[0], np.cumsum(sizes)])
        sentences = np.arange(ends[-1]) + np.repeat(firsts - ends[:-1], sizes)
        starts, stops = self.sentences[sentences], self.sentences[sentences + 1]
        remote_arrays.fetch_tokens_ahead(self._corpus, starts[ends[:-1]], stops[ends[1:] - 1])
        self._fetch_next_window(seed, epoch, block)
        if (stops <= starts).any():
            broken = sentences[np.argmax(stops <= starts)]
            message = f"sentence {broken} of the corpus has no tokens"
            raise DataError(message, fix="Build the corpus again.")
        others = None if self.shuffle is None else opened.owners
        return EpochBlock(starts, stops, ends, opened.owners[parts], others)

    def draw(self, count: int, window: Whole | None, rng: np.random.Generator) -> Whole:
        """Draw documents with repetition, as places among the chosen ones.

        Args:
            window: the document of each part to draw from; None for all documents.
        """
        if window is None:
            return rng.integers(len(self), size=count)
        return window[rng.integers(len(window), size=count)]

    def _fetch_next_window(self, seed: int, epoch: int, block: int) -> None:
        """Fetch as many runs of the next window as come to a block of this one."""
        window, place = divmod(block, BLOCKS)
        if self.shuffle is None or window + 1 == self.windows:
            return
        following = window + 1, window + 2
        firsts = _runs(len(self), self.windows, self.run, seed, epoch, *following)
        size = self.blocks(seed, epoch, window)
        for first in firsts[len(firsts) * place // size : len(firsts) * (place + 1) // size]:
            last = min(int(first) + self.run, len(self)) - 1
            start, stop = (int(self.chosen[at]) for at in (first, last))
            remote_arrays.fetch_documents_ahead(self._corpus, start, stop + 1)


def bytes_at_hand(corpus: remote_arrays.Arrays, shuffle: Windows | None) -> int:
    """Return the bytes of a corpus at a URL that a cache must hold, so that none is fetched twice.

    That is all of it, or two windows. A run has a part at each end that is not all its own.
    """
    columns = (corpus.tokens, corpus.sentences, corpus.documents, corpus.words)
    remote = [each for each in columns if isinstance(each, remote_arrays.RemoteArray)]
    whole = sum(each.nbytes for each in remote)
    if shuffle is None:
        return whole
    share = shuffle.run / max(1, len(corpus.documents) - 1)
    run = sum(math.ceil(each.nbytes * share) + each.file.part for each in remote)
    return min(whole, 2 * -(-shuffle.documents // shuffle.run) * run)


def sample_clustered(
    corpus: remote_arrays.Arrays, chosen: DocumentIds, tokens: int, seed: int
) -> NDArray[np.int64]:
    """Sample about enough of the chosen documents for some tokens, in clusters of neighbours.

    What has to be fetched of a corpus at a URL then grows with the tokens, not with the corpus.
    """
    ids = np.asarray(chosen)
    _, place, sizes = np.unique(ids // CLUSTER, return_inverse=True, return_counts=True)
    order = rng(seed, "places").permutation(len(sizes))
    needed = OVERSAMPLE * tokens * (len(corpus.documents) - 1) / max(1, len(corpus.tokens))
    taken = order[: 1 + int(np.searchsorted(np.cumsum(sizes[order]), needed))]
    few = ids[np.isin(place, taken)]
    return few if len(few) > 1 else ids


def _signed(offsets: remote_arrays.Column) -> remote_arrays.Column:
    return (
        offsets if isinstance(offsets, remote_arrays.RemoteArray) else np.asarray(offsets)
    ).view(np.int64)


def _check(
    corpus: remote_arrays.Arrays,
    sentences: remote_arrays.Column,
    documents: remote_arrays.Column,
    chosen: DocumentIds,
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
    while isinstance(chosen, RestOfEpoch):
        chosen = chosen.chosen
    if isinstance(chosen, AllExcept):
        chosen = np.array([0, chosen.total - 1])
    if len(chosen) and not 0 <= chosen.min() <= chosen.max() < len(documents) - 1:
        raise DataError(
            f"documents {chosen.min()} to {chosen.max()} were chosen; "
            f"the corpus has 0 to {len(documents) - 2}",
            fix="Split the corpus again.",
        )


def _plan_window(
    documents: remote_arrays.Column, chosen: DocumentIds, windows: int, run: int,
    seed: int, epoch: int, window: int,
) -> _Window:  # fmt: skip
    """Split the documents of a window into parts, permute these, and find where blocks begin."""
    count = len(chosen)
    runs = _runs(count, windows, run, seed, epoch, window, window + 1)
    places = _places(count, runs, run)
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
    total = before[-1]
    before -= sizes
    edges = np.searchsorted(before, np.arange(0, before[-1] + 1, BLOCK))
    sentences = np.append(before[edges], total)
    del before
    return _Window(owners[order], firsts[order], sizes, np.append(edges, len(order)), sentences)


def _runs(
    count: int, windows: int, run: int, seed: int, epoch: int, first: int, stop: int
) -> Whole:
    """Return the first index of each run of the windows `[first, stop)` in `count` documents."""
    runs = np.arange(-(-count // run), dtype=np.uint32)
    rng(seed, "windows", epoch=epoch).shuffle(runs)
    mine = runs[len(runs) * first // windows : len(runs) * stop // windows]
    return np.sort(mine).astype(np.int64) * run


def _places(count: int, runs: Whole, run: int) -> Whole:
    """Return the places of the documents of some runs among `count` chosen ones, ascending."""
    places = (runs[:, None] + np.arange(run)).reshape(-1)
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
