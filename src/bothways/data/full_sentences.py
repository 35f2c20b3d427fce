"""Sequences of consecutive whole sentences, as in RoBERTa (Liu et al. 2019, section 4.2).

FULL-SENTENCES crosses document boundaries, with a further [SEP] between documents; DOC-SENTENCES
stops at the end of a document. A sentence longer than a sequence is cut into pieces, none of which
is lost.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

import numpy as np

from bothways.core.errors import ConfigError
from bothways.data.epoch_order import EpochBlock, Selection, Whole
from bothways.data.segments import Segments, SpanPlan


@dataclass(frozen=True)
class FullSentences(Segments):
    """Consecutive whole sentences, as many as fit (RoBERTa).

    Attributes:
        length: the longest sequence in tokens, specials included.
        cross: True continues with the next document (FULL-SENTENCES), False ends a sequence at
            the end of its document (DOC-SENTENCES).
    """

    fate: ClassVar[str] = "will be cut into pieces, all of which are read"
    length: int = 128
    cross: bool = True
    kind: Literal["full_sentences"] = "full_sentences"

    def __post_init__(self) -> None:
        if self.length < self.specials + 1:
            message = f"must be at least 3 ([CLS], a token, [SEP]), not {self.length}"
            raise ConfigError(message, where="segments.length")

    def plan(
        self, block: EpochBlock, selection: Selection, rng: np.random.Generator
    ) -> list[SpanPlan]:
        """Return the sequences of a block, shuffled."""
        return plan_spans(block, self.length, self.cross, rng)


def plan_spans(
    block: EpochBlock, length: int, cross: bool, rng: np.random.Generator
) -> list[SpanPlan]:
    """Return all sequences of a block, shuffled.

    Every sentence is in exactly one sequence; longer sentences are cut at multiples of the room.

    Args:
        length: the maximum length of a sequence, specials included; at least 3.
        cross: whether a sequence may continue with the next document of the block.
    """
    room = length - FullSentences.specials
    pieces = _pieces(block, room)
    opens, closes, document = pieces[0].tolist(), pieces[1].tolist(), pieces[2].tolist()
    heads = np.searchsorted(pieces[2], np.arange(len(block.owners) + 1)).tolist()
    tokens = np.cumsum(pieces[1] - pieces[0])
    # The pieces [i, e) take ends[e - 1] − begins[i] tokens: their own, and one [SEP] per document
    # boundary among them.
    ends = (tokens + pieces[2]).tolist()
    begins = (tokens - (pieces[1] - pieces[0]) + pieces[2]).tolist()
    spans, at = [], 0
    while at < len(opens):
        limit = len(opens) if cross else heads[document[at] + 1]
        stop = bisect_right(ends, begins[at] + room, at + 1, limit)
        cuts = [at, *heads[document[at] + 1 : document[stop - 1] + 1], stop]
        spans.append(SpanPlan(tuple((opens[i], closes[e - 1]) for i, e in pairwise(cuts))))
        at = stop
    return [spans[i] for i in rng.permutation(len(spans)).tolist()]


def _pieces(block: EpochBlock, room: int) -> tuple[Whole, Whole, Whole]:
    """Cut sentences to at most `room` tokens; return starts, stops and documents of the pieces."""
    counts = -(-(block.stops - block.starts) // room)
    sentence = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(sentence)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = block.starts[sentence] + index * room
    document = np.searchsorted(block.edges, sentence, side="right") - 1
    return starts, np.minimum(starts + room, block.stops[sentence]), document
