"""A corpus as a stream of sequences: planned from offsets, block by block, and read from the memory-mapped tokens one by one.

Nothing is materialised. The documents of an epoch come in a keyed order, the sequences of a block in a keyed order within it,
and every draw is keyed by (seed, epoch, block): what stands at a cursor depends on nothing that was read before, and a resumed
run pays for one block. Memory is told in `bothways.data.selection`.

Static data, as Google's duplicated instances are, is the same stream with a period: `data_copies` epochs, then again from the first.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_never

from bothways.core.errors import ConfigError, DataError
from bothways.core.keyed_rng import rng
from bothways.core.sequence import Ids, Sequence
from bothways.data import full_sentences as fullsentences
from bothways.data import next_sentence as nextsentence
from bothways.data.epoch_order import Arrays, Selection
from bothways.data.full_sentences import SpanPlan, plan_spans
from bothways.data.next_sentence import PairPlan, plan_pairs

if TYPE_CHECKING:
    from bothways.core.source import Cursor
    from bothways.text.template import Template


@dataclass(frozen=True)
class FullSentences:
    """Whole sentences that follow each other, as many as fit (RoBERTa).

    Attributes:
        length: the longest sequence in tokens, specials included.
        cross: True goes on with the next document (FULL-SENTENCES), False ends a sequence with its document (DOC-SENTENCES).
    """

    length: int = 128
    cross: bool = True
    kind: Literal["full_sentences"] = "full_sentences"

    def __post_init__(self) -> None:
        if self.length < 3:
            raise ConfigError(
                f"must be at least 3 ([CLS], a token, [SEP]), not {self.length}",
                where="segments.length",
            )

    @property
    def room(self) -> int:
        """Tokens of text that fit."""
        return self.length - fullsentences.SPECIALS


@dataclass(frozen=True)
class NextSentence:
    """Two segments, the second of which follows the first or is random, by Google's algorithm (BERT).

    Attributes:
        length: the longest sequence in tokens, specials included.
        short: the share of documents that are read, in an epoch, with a random shorter target length.
    """

    length: int = 128
    short: float = 0.1
    kind: Literal["next_sentence"] = "next_sentence"

    def __post_init__(self) -> None:
        if self.length < 5:
            raise ConfigError(
                f"must be at least 5 ([CLS], A, [SEP], B, [SEP]), not {self.length}",
                where="segments.length",
            )
        if not 0 <= self.short <= 1:
            raise ConfigError(f"must lie in [0, 1], not {self.short}", where="segments.short")

    @property
    def room(self) -> int:
        """Tokens of text that fit."""
        return self.length - nextsentence.SPECIALS


Segments = FullSentences | NextSentence


class CorpusSource:
    """Chosen documents of a corpus as an endless stream of sequences (a `core.learner.Source`)."""

    def __init__(
        self,
        corpus: Arrays,
        template: Template,
        segments: Segments,
        chosen: NDArray[np.integer[Any]],
        seed: int,
        data_copies: int | None = None,
    ) -> None:
        """A stream over the documents `chosen` (ids), planned anew in each epoch, or with the period of `data_copies` epochs.

        Raises ConfigError for less than one view, DataError for a selection without text, or of one document where next
        sentences need two.
        """
        if data_copies is not None and data_copies < 1:
            raise ConfigError(
                f"must be at least 1, or absent to plan every epoch anew, not {data_copies}",
                where="data_copies",
            )
        self.template, self.segments, self.seed, self.data_copies = (
            template,
            segments,
            seed,
            data_copies,
        )
        self._tokens = np.asarray(corpus.tokens)
        self._selection = Selection(corpus, chosen)
        self._plans = functools.lru_cache(maxsize=2)(
            functools.partial(_plan, self._selection, segments, seed)
        )
        if isinstance(segments, NextSentence) and template.pair != nextsentence.SPECIALS:
            what = f"next-sentence pairs are [CLS] A [SEP] B [SEP], and this tokenizer has {template.pair} special tokens there"
            raise ConfigError(
                what, where="segments", fix="Use full_sentences segments, as RoBERTa does."
            )
        if isinstance(segments, NextSentence) and len(self._selection) == 1:
            raise DataError(
                "next sentence prediction draws its random segments from other documents, and only one document has text",
                where="segments",
                fix="Give four documents or more (a blank line ends one in a .txt file), or use full_sentences segments.",
            )

    def read(self, cursor: Cursor) -> Iterator[tuple[PairPlan | SpanPlan, Cursor]]:
        """Plans from `cursor` on, each with the cursor of the next. DataError for a cursor of another corpus."""
        from bothways.core.source import Cursor

        epoch, block, item = cursor
        self._check(cursor)
        while True:
            blocks = self._blocks(epoch)
            while block < blocks:
                plans = self._plans(self._view(epoch), block)
                after = Cursor(epoch, block + 1) if block + 1 < blocks else Cursor(epoch + 1)
                for place in range(item, len(plans) - 1):
                    yield plans[place], Cursor(epoch, block, place + 1)
                yield plans[-1], after
                block, item = block + 1, 0
            epoch, block = epoch + 1, 0

    def build(self, plan: PairPlan | SpanPlan) -> Sequence:
        """The sequence of a plan; a pair has its label as `targets["pair"]`, 0 = next, 1 = random."""
        from bothways.core.targets import LabelTargets
        from bothways.text.template import assemble

        match plan:
            case PairPlan():
                pair = assemble(
                    self._slice(plan.a, plan.a_stop),
                    self._slice(plan.b, plan.b_stop),
                    self.template,
                )
                return Sequence(
                    pair.ids,
                    pair.segments,
                    {"pair": LabelTargets(np.array([plan.label], dtype=np.int64))},
                )
            case SpanPlan():
                first, *others = (self._slice(*part) for part in plan.ranges)
                separator = self.template.after.ids
                return assemble(
                    np.concatenate([first, *(x for part in others for x in (separator, part))]),
                    None,
                    self.template,
                )
            case _:
                assert_never(plan)

    def epochs(self, cursor: Cursor) -> float:
        """Epochs before this cursor; within one, blocks count alike."""
        if cursor.item == 0:
            return cursor.epoch + cursor.block / self._blocks(cursor.epoch)
        done = cursor.item / len(self._plans(self._view(cursor.epoch), cursor.block))
        return cursor.epoch + (cursor.block + done) / self._blocks(cursor.epoch)

    def _view(self, epoch: int) -> int:
        return epoch if self.data_copies is None else epoch % self.data_copies

    def _blocks(self, epoch: int) -> int:
        return self._selection.blocks(self.seed, self._view(epoch))

    def _check(self, cursor: Cursor) -> None:
        blocks = self._blocks(cursor.epoch)
        if cursor.block >= blocks or cursor.item >= len(
            self._plans(self._view(cursor.epoch), cursor.block)
        ):
            raise DataError(
                f"there is nothing at block {cursor.block}, item {cursor.item} of epoch {cursor.epoch} ({blocks} blocks)",
                fix="Continue with the corpus, the split, the seed and the segments that the run began with.",
            )

    def _slice(self, start: int, stop: int) -> Ids:
        return self._tokens[start:stop].astype(np.int32)


def _plan(
    selection: Selection, segments: Segments, seed: int, view: int, block: int
) -> list[PairPlan] | list[SpanPlan]:
    opened = selection.open(seed, view, block)
    draws = rng(seed, "segments", epoch=view, index=block)
    match segments:
        case NextSentence(length, short):
            return plan_pairs(opened, selection, length, short, draws)
        case FullSentences(length, cross):
            return plan_spans(opened, length, cross, draws)
        case _:
            assert_never(segments)
