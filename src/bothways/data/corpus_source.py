"""A corpus as a stream of sequences, planned from offsets and read from memory-mapped tokens.

The documents of an epoch have a keyed order, and so have the sequences of a block; every draw is
keyed by (seed, epoch, block). The data at a cursor depends on nothing read before it, and a
resumed run plans one window and one block again. `bothways.data.epoch_order` states the memory.

Static data, such as Google's duplicated instances, is the same stream with a period of
`data_copies` epochs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_never

from bothways.core.config.values import require_at_least
from bothways.core.errors import AGAIN, DataError
from bothways.core.source import Cursor, Sequence, rng
from bothways.data.epoch_order import BLOCKS, DocumentIds, Selection
from bothways.data.segments import PairPlan, Segments, SpanPlan
from bothways.data.sentences import unpack_words

if TYPE_CHECKING:
    from bothways.data.corpus import Corpus
    from bothways.text.template import Template


class CorpusSource:
    """Chosen documents of a corpus as an endless stream of sequences (a `core.source.Source`)."""

    def __init__(
        self,
        corpus: Corpus,
        template: Template,
        segments: Segments,
        ids: DocumentIds,
        seed: int,
        data_copies: int | None = None,
    ) -> None:
        """Plan the documents `ids` in each epoch, with the period of `data_copies` epochs.

        Raises:
            ConfigError: `data_copies` is below 1, or the template does not fit the segments.
            DataError: the documents have no text, or are too few for the segments.
        """
        require_at_least(1, data_copies=data_copies)
        self.template = template
        self.segments = segments
        self.seed = seed
        self.data_copies = data_copies
        self._corpus = corpus
        self._texts = _mapped(corpus.tokens, corpus.words)
        self._offsets = _mapped(corpus.sentences, corpus.documents)
        self._tokens = np.asarray(corpus.tokens)
        selection = self._selection = Selection(corpus, ids)
        self._plans = functools.lru_cache(maxsize=2)(
            lambda view, block: segments.plan(
                selection.open(seed, view, block),
                selection,
                rng(seed, "segments", epoch=view, index=block),
            )
        )
        segments.require(self._selection, template)

    def read(self, cursor: Cursor) -> Iterator[tuple[PairPlan | SpanPlan, Cursor]]:
        """Yield plans from `cursor` on, each with the cursor of the next.

        Raises:
            DataError: the cursor is of another corpus, or no sequence can be made of these
                documents.
        """
        epoch, block, item, _ = cursor
        _check_whole(self._offsets)
        self._check(cursor)
        while True:
            if block == 0 and self.is_empty(epoch):  # which would repeat for ever
                message = f"no {self.segments.kind} sequence can be made of the chosen documents"
                raise DataError(message, where="segments", fix="Use other segments or more text.")
            view = self._view(epoch)
            following: int | None = block
            while following is not None:
                _check_whole(self._offsets)
                block, plans = following, self._plans(view, following)
                following = self._selection.following(self.seed, view, block)
                next_block = Cursor(epoch + 1) if following is None else Cursor(epoch, following)
                for index in range(item, len(plans)):
                    is_last = index + 1 == len(plans)
                    yield plans[index], next_block if is_last else Cursor(epoch, block, index + 1)
                item = 0
            epoch, block = epoch + 1, 0

    def is_empty(self, epoch: int) -> bool:
        """Return True if no sequence can be made of the documents in an epoch."""
        view, block = self._view(epoch), 0
        while not self._plans(view, block):
            following = self._selection.following(self.seed, view, block)
            if following is None:
                return True
            block = following
        return False

    def build(self, plan: PairPlan | SpanPlan) -> Sequence:
        """Return the sequence of a plan; a pair has its label as `targets["pair"]`.

        Raises:
            DataError: a file of the corpus is shorter than when it was opened.
        """
        from bothways.core.batch import LabelTargets

        _check_whole(self._texts)
        sequence = self._assembled(plan, lambda start, stop: self._tokens[start:stop])
        if (words := self._corpus.words) is not None:
            starts = self._assembled(plan, functools.partial(unpack_words, words))
            sequence = dataclasses.replace(sequence, word_starts=starts.ids.astype(np.bool_))
        if not isinstance(plan, PairPlan):
            return sequence
        label = LabelTargets(np.array([plan.label], dtype=np.int64))
        return dataclasses.replace(sequence, targets={"pair": label})

    def _assembled(
        self, plan: PairPlan | SpanPlan, read_slice: Callable[[int, int], NDArray[Any]]
    ) -> Sequence:
        """Return the texts of a plan with the special tokens around them."""
        from bothways.text.template import assemble

        match plan:
            case PairPlan(a, a_stop, b, b_stop):
                return assemble(read_slice(a, a_stop), read_slice(b, b_stop), self.template)
            case SpanPlan():
                first_document, *documents = (read_slice(*document) for document in plan.ranges)
                separator = self.template.after.ids
                separated = (x for document in documents for x in (separator, document))
                return assemble(np.concatenate([first_document, *separated]), None, self.template)
            case _:
                assert_never(plan)

    def key(self, cursor: Cursor) -> tuple[int, int]:
        return self._view(cursor.epoch), cursor.number

    def epochs(self, cursor: Cursor) -> float:
        """Return the epochs before this cursor, as `Selection.share_before` counts."""
        epoch, block, item, _ = cursor
        view = self._view(epoch)
        done = item / len(self._plans(view, block)) if item else 0.0
        return epoch + self._selection.share_before(self.seed, view, block, done)

    def unread(self, cursor: Cursor) -> tuple[DocumentIds, float]:
        """Return the ids of the documents unread before the cursor, in its epoch, and their share
        of the epoch.
        """
        view, selection, begun = self._view(cursor.epoch), self._selection, np.zeros(0, np.int64)
        if cursor.item:
            block = selection.open(self.seed, view, cursor.block)
            # A part of a document is contiguous: it holds the tokens from its first sentence on.
            order = np.argsort(block.starts[block.edges[:-1]])
            starts = block.starts[block.edges[:-1]][order]
            plans = self._plans(view, cursor.block)[: cursor.item]
            # The first token of each document that a plan reads in order, not at random.
            firsts = list[int]()
            for plan in plans:
                firsts += [plan.a] if isinstance(plan, PairPlan) else [a for a, _ in plan.ranges]
            documents = np.searchsorted(starts, firsts, side="right") - 1
            begun = block.owners[order[documents]]
        return selection.unread(self.seed, view, cursor.block, begun)

    def restricted(self, ids: DocumentIds) -> CorpusSource:
        """Return the same stream over other documents."""
        settings = (self.segments, ids, self.seed, self.data_copies)
        return CorpusSource(self._corpus, self.template, *settings)

    def _view(self, epoch: int) -> int:
        return epoch if self.data_copies is None else epoch % self.data_copies

    def _check(self, cursor: Cursor) -> None:
        view, (window, index) = self._view(cursor.epoch), divmod(cursor.block, BLOCKS)
        if index >= self._selection.blocks(self.seed, view, window) or (
            cursor.item and cursor.item >= len(self._plans(view, cursor.block))
        ):
            message = f"no data at block {cursor.block}, item {cursor.item} of epoch {cursor.epoch}"
            fix = "Continue with the same corpus, split, seed and segments as the run."
            raise DataError(message, fix=fix)


class ContinuedSource:
    """A stream that continues the epoch in which another one ended, with segments of its own.

    The rest of that epoch has the documents of which the other one has read nothing; the epochs
    after it have all. The sequences of a block are shuffled, so that of an open block nearly all
    documents are begun: hardly any is left of a corpus of one block. The rest therefore counts as
    the share of an epoch that its documents are, and the next epoch begins where it ends.

    Args:
        previous: the stream of the phase before.
        end: where it ended.
        following: the stream of this phase over all documents.
    """

    def __init__(
        self, previous: CorpusSource | ContinuedSource, end: Cursor, following: CorpusSource
    ) -> None:
        self._first, self._after = end.epoch, following
        self._done = previous.epochs(end)
        unread, share = previous.unread(end)
        # Next sentence prediction needs two documents; a pair may need two tokens or sentences,
        # which documents that are never begun have not.
        remaining = following.restricted(unread) if len(unread) > 1 else None
        has_pairs = remaining is not None and not remaining.is_empty(end.epoch)
        self._rest = remaining if has_pairs else None
        self._share = share if self._rest else 0.0

    def read(self, cursor: Cursor) -> Iterator[tuple[PairPlan | SpanPlan, Cursor]]:
        """Yield plans from `cursor` on, each with the cursor of the next."""
        if cursor.epoch == self._first:
            for plan, following in self._rest.read(cursor) if self._rest else ():
                yield plan, following
                if following.epoch > self._first:
                    break
            cursor = Cursor(self._first + 1)
        yield from self._after.read(cursor)

    def build(self, plan: PairPlan | SpanPlan) -> Sequence:
        return self._after.build(plan)

    def key(self, cursor: Cursor) -> tuple[int, int]:
        return self._after.key(cursor)

    def epochs(self, cursor: Cursor) -> float:
        """Return the epochs before this cursor, the other stream's included."""
        if cursor.epoch > self._first:
            return self._done + self._share + self._after.epochs(cursor) - self._first - 1
        fraction = 0.0 if self._rest is None else self._rest.epochs(cursor) - self._first
        return self._done + self._share * fraction

    def unread(self, cursor: Cursor) -> tuple[DocumentIds, float]:
        """Return the ids of the documents of which nothing was read, in the cursor's epoch, and
        their share of an epoch.
        """
        source = self._rest if cursor.epoch == self._first else self._after
        if source is None:
            return np.zeros(0, np.int64), 0.0
        ids, share = source.unread(cursor)
        return ids, share * (self._share if source is self._rest else 1.0)


def _mapped(*columns: NDArray[Any] | None) -> list[np.memmap[Any, Any]]:
    return [column for column in columns if isinstance(column, np.memmap)]


def _check_whole(arrays: list[np.memmap[Any, Any]]) -> None:
    """Raise DataError if a file was cut short: reading what is gone would end the process."""
    for array in arrays:
        mapped = getattr(array, "_mmap", None)  # None in a copy
        if mapped is not None and mapped.size() < array.nbytes:
            message = "is shorter than when it was opened: something has written to it"
            fix = f"Restore it, then {AGAIN}; a corpus must stay as it is."
            raise DataError(message, where=str(array.filename), fix=fix)
