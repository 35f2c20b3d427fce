"""Segments: what the sequences of a corpus are made of, and the plans of single sequences.

A value such as `FullSentences` plans the sequences of a block from sentence offsets. Any subclass
of `Segments` can be handed to `CorpusSource`; `data.sentence_pairs` has those with two segments.

`FullSentences` has the consecutive whole sentences of RoBERTa (Liu et al. 2019, section 4.2):
FULL-SENTENCES crosses document boundaries, with a further [SEP] between documents; DOC-SENTENCES
stops at the end of a document. A sentence longer than a sequence is cut into pieces, none of which
is lost.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import numpy as np

from bothways.core.errors import ConfigError
from bothways.core.finding import Finding
from bothways.data.epoch_order import EpochBlock, Selection, Whole

if TYPE_CHECKING:
    from bothways.data.corpus import Corpus
    from bothways.text.template import Template

PAIR_SPECIALS = 3
"""The special tokens of [CLS] A [SEP] B [SEP]."""
SENTENCES_CHECKED = 1_000_000
"""Sentences and documents of a corpus that checks read, at most."""


class PairPlan(NamedTuple):
    """A is tokens `[a, a_stop)` of the corpus, B is `[b, b_stop)`; `label` is the pair's class."""

    a: int
    a_stop: int
    b: int
    b_stop: int
    label: int

    @property
    def length(self) -> int:
        """Tokens of the sequence, [CLS] A [SEP] B [SEP]."""
        return self.a_stop - self.a + self.b_stop - self.b + PAIR_SPECIALS


class SpanPlan(NamedTuple):
    """Tokens `[start, stop)` of the corpus for each document in the sequence, in order."""

    ranges: tuple[tuple[int, int], ...]

    @property
    def length(self) -> int:
        """Tokens of the sequence: [CLS], and a [SEP] after each document."""
        return 1 + sum(stop - start + 1 for start, stop in self.ranges)


class Segments:
    """Base class of frozen dataclasses with the fields `length` and `kind`.

    Attributes:
        length: the longest sequence in tokens, specials included.
        specials: special tokens of a sequence from one document.
        fate: what becomes of a sentence that is longer than a sequence.
    """

    length: int
    kind: str
    specials: ClassVar[int] = 2
    fate: ClassVar[str] = "will be cut"

    @property
    def room(self) -> int:
        """Tokens of text that fit."""
        return self.length - self.specials

    def plan(
        self, block: EpochBlock, selection: Selection, rng: np.random.Generator
    ) -> list[PairPlan] | list[SpanPlan]:
        """Return the sequences of a block, shuffled."""
        raise NotImplementedError

    def require(self, selection: Selection, template: Template) -> None:
        """Raise ConfigError or DataError if these documents or special tokens do not suffice."""

    def check(self, corpus: Corpus) -> list[Finding]:
        """Return the findings of the preflight about this corpus."""
        cut = int(
            (np.diff(corpus.sentences[:SENTENCES_CHECKED].astype(np.int64)) > self.room).sum()
        )
        if not cut:
            return []
        share = cut / min(len(corpus.sentences) - 1, SENTENCES_CHECKED)
        message = f"{share:.1%} of the sentences are longer than {self.room} tokens and {self.fate}"
        return [Finding("truncation", "note", message, "phases")]


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
        """Return the sequences of a block, shuffled.

        Every sentence is in exactly one sequence; longer ones are cut at multiples of the room.
        """
        room = self.room
        pieces = _pieces(block, room)
        opens, closes, document = pieces[0].tolist(), pieces[1].tolist(), pieces[2].tolist()
        heads = np.searchsorted(pieces[2], np.arange(len(block.owners) + 1)).tolist()
        tokens = np.cumsum(pieces[1] - pieces[0])
        # The pieces [i, e) take ends[e - 1] − begins[i] tokens: their own, and one [SEP] per
        # document boundary among them.
        ends = (tokens + pieces[2]).tolist()
        begins = (tokens - (pieces[1] - pieces[0]) + pieces[2]).tolist()
        spans, at = [], 0
        while at < len(opens):
            limit = len(opens) if self.cross else heads[document[at] + 1]
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
