"""Segments: what the sequences of a corpus are made of, and the plans of single sequences.

A value such as `FullSentences` plans the sequences of a block from sentence offsets. Any subclass
of `Segments` can be handed to `CorpusSource`.

`FullSentences` has the consecutive whole sentences of RoBERTa (Liu et al. 2019, section 4.2):
FULL-SENTENCES crosses document boundaries, with a further [SEP] between documents; DOC-SENTENCES
stops at the end of a document. A sentence longer than a sequence is cut into pieces, none of which
is lost.

The others are pairs of segments, [CLS] A [SEP] B [SEP], by the instance builders of their authors,
as distributions. A document has a target
length: the room next to the special tokens, or for a share of documents a uniform draw from 2 on.
Sentences are gathered to a chunk until the target is reached or the document ends. A is the first a
sentences of the chunk, a drawn uniformly so that at least one is left. A pair that is too long is
cut at its longer segment, token by token from either end.

**Next sentence prediction**: Devlin et al. 2018, appendix A.2, leaves most of it open;
google-research/bert, create_pretraining_data.py, is the source. B is the rest of the chunk, or, in
half of the cases and whenever there is no rest, sentences from a random position of a random
document; the rest then opens the next chunk. More than half of the pairs are therefore random where
documents are short.

**Sentence order prediction**: Lan et al. 2019, section 3.1; google-research/albert,
create_pretraining_data.py. B is the rest; in half of the cases A and B change places. All sentences
of a document are read.

    chunk s0 s1 s2, a = 1, in order → [CLS] s0 [SEP] s1 s2 [SEP], label 0
                           swapped  → [CLS] s1 s2 [SEP] s0 [SEP], label 1

Only the walk over the chunks is a loop; random documents, their bounds and the cuts are computed
for a whole block at once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_never

from bothways.core import source
from bothways.core.config.values import require_range
from bothways.core.errors import ConfigError, DataError, Finding, argument, setting
from bothways.core.terminal import quantity
from bothways.data.epoch_order import BLOCK, EpochBlock, Int64s, Selection, cut_ranges

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
        classes: the meaning of each label of a pair; none without pairs.
    """

    length: int
    kind: str
    classes: ClassVar[tuple[str, ...]] = ()
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
        lengths = np.diff(corpus.sentences[:SENTENCES_CHECKED].astype(np.int64))
        cut = int((lengths > self.room).sum())
        if not cut:
            return []
        share = cut / min(len(corpus.sentences) - 1, SENTENCES_CHECKED)
        message = f"{share:.1%} of the sentences are longer than {self.room} tokens and {self.fate}"
        return [Finding("truncation", "note", message, "phases")]


@dataclass(frozen=True)
class FullSentences(Segments):
    """Consecutive whole sentences, as many as fit (RoBERTa).

    Attributes:
        length: the longest sequence in tokens, specials included; in a run the length of the phase.
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
            raise ConfigError(message, where="length")

    def plan(
        self, block: EpochBlock, selection: Selection, rng: np.random.Generator
    ) -> list[SpanPlan]:
        """Return the sequences of a block, shuffled.

        Every sentence is in exactly one sequence; longer ones are cut at multiples of the room.
        """
        room = self.room
        # Pieces of at most `room` tokens, and the document of each.
        sentence, starts, stops = cut_ranges(block.starts, block.stops, room)
        owners = np.searchsorted(block.edges, sentence, side="right") - 1
        opens, closes, document = starts.tolist(), stops.tolist(), owners.tolist()
        heads = np.searchsorted(owners, np.arange(len(block.owners) + 1)).tolist()
        tokens = np.cumsum(stops - starts)
        # The pieces [i, e) take ends[e - 1] − begins[i] tokens: their own, and one [SEP] per
        # document boundary among them.
        ends = (tokens + owners).tolist()
        begins = (tokens - (stops - starts) + owners).tolist()
        spans, at = [], 0
        while at < len(opens):
            limit = len(opens) if self.cross else heads[document[at] + 1]
            stop = bisect_right(ends, begins[at] + room, at + 1, limit)
            cuts = [at, *heads[document[at] + 1 : document[stop - 1] + 1], stop]
            spans.append(SpanPlan(tuple((opens[i], closes[e - 1]) for i, e in pairwise(cuts))))
            at = stop
        return [spans[i] for i in rng.permutation(len(spans)).tolist()]


DRAWS = 10
"""Maximum attempts to draw a different document; the last draw counts even if it is the same."""


class PairSegments(Segments):
    """Base class of segments that are pairs, [CLS] A [SEP] B [SEP], with a label.

    Attributes:
        short: the share of documents that are read with a random shorter target length.
        one_sentence: the fate of pairs of one-sentence documents, as the end of a sentence.
        drawn: the label of pairs whose B is drawn from elsewhere; -1 if there are none.
    """

    short: float = 0.0
    specials: ClassVar[int] = PAIR_SPECIALS
    one_sentence: ClassVar[str] = "these have no second sentence"
    drawn: ClassVar[int] = -1

    def __post_init__(self) -> None:
        if self.length < self.specials + 2:
            message = f"must be at least 5 ([CLS], A, [SEP], B, [SEP]), not {self.length}"
            raise ConfigError(message, where="length")
        require_range("[0, 1]", "segments", short=self.short)

    def require(self, selection: Selection, template: Template) -> None:
        """Raise ConfigError if the tokenizer's pairs have other special tokens."""
        if findings := self._check_template(template):
            raise ConfigError(findings[0].what, where="segments", fix=findings[0].fix)

    def check(self, corpus: Corpus) -> list[Finding]:
        """Return the findings about sentences, special tokens and one-sentence documents."""
        documents = corpus.documents[: SENTENCES_CHECKED + 1]
        # Offsets of sentences: a difference of 1 is a document of one sentence.
        single = float((np.diff(documents) == 1).mean())
        findings = [*super().check(corpus), *self._check_template(corpus.tokenizer.template)]
        if (unread := self._unread_share(corpus)) >= 0.0005:
            message = f"{unread:.1%} of the tokens are left out, so that pairs fit in {self.length}"
            findings.append(Finding("truncation", "note", message, "phases"))
        if single > 0.5:
            message = f"{single:.1%} of the documents are one sentence, and {self.one_sentence}"
            boundaries = f"{argument(boundary='blank')} or {argument(boundary='file')}"
            fix = f"Build the corpus with {boundaries}, or set {setting('objective', 'masked_lm')}."
            findings.append(Finding("balance", "warning", message, "objective.segments", fix))
        return findings

    def _unread_share(self, corpus: Corpus) -> float:
        """Return the share of tokens that no pair reads in their place, in the first documents."""
        documents = corpus.documents[: BLOCK + 1].astype(np.int64)
        ids = np.arange(min(len(corpus), max(2, int((documents <= BLOCK).sum()) - 1)))
        if len(ids) < 2:
            return 0.0
        selection = Selection(corpus, ids)
        block, draws = selection.open(0, 0, 0), source.rng(0, "unread")
        pairs = np.array(self.plan(block, selection, draws), dtype=np.int64).reshape(-1, 5)
        borders = np.zeros(int(block.stops.max()) + 1, dtype=np.int64)
        # +1 where a span begins and −1 where it stops: the running sum counts the spans over each
        # sentence.
        for begin, stop in ((pairs[:, :2]).T, pairs[pairs[:, 4] != self.drawn, 2:4].T):
            np.add.at(borders, begin, 1)
            np.add.at(borders, stop, -1)
        return 1 - float((borders.cumsum() > 0).sum() / (block.stops - block.starts).sum())

    def _check_template(self, template: Template) -> list[Finding]:
        if (n := template.pair) == self.specials:
            return []
        message = f"pairs are [CLS] A [SEP] B [SEP]; this tokenizer has {n} special tokens there"
        fix = f"Set {setting('objective', 'masked_lm')}, as RoBERTa does."
        return [Finding("heads", "error", message, "objective.segments", fix)]

    def _gather_chunks(
        self, block: EpochBlock, rng: np.random.Generator, *, pairs_again: bool
    ) -> Int64s:
        """Cut each document into chunks of its target length, and each chunk in two.

        A target length is `room`, or for a share `short` of the documents a draw from 2 on.

        Args:
            pairs_again: whether half of the chunks, and those of one sentence, keep only their
                first part: the second one is drawn from elsewhere, and its sentences open the next
                chunk.

        Returns:
            `(6, chunks)` with the rows owner of the document, its target length, first sentence of
            A, first sentence of B (the end of a chunk of one sentence), end, and 1 where B is drawn
            from elsewhere.
        """
        owners, edges = block.owners.tolist(), block.edges.tolist()
        drawn = rng.integers(2, self.room, size=len(owners), endpoint=True)
        targets = np.where(rng.random(len(owners)) < self.short, drawn, self.room).tolist()
        # bounds[i] is the number of tokens before sentence i: tokens [i, j) are a difference.
        bounds = np.concatenate([[0], np.cumsum(block.stops - block.starts)]).tolist()
        draws = iter(rng.random((1 + pairs_again) * len(block.starts)).tolist())
        chunks: list[tuple[int, int, int, int, int, int]] = []
        for document, (owner, target) in enumerate(zip(owners, targets, strict=True)):
            at, end = edges[document], edges[document + 1]
            while at < end:
                # The first sentence at whose end the chunk has `target` tokens, or the last one.
                stop = bisect_left(bounds, bounds[at] + target, at + 1, end)
                remaining = stop - at - 1
                middle = at + 1 + int(next(draws) * remaining) if remaining else stop
                elsewhere = pairs_again and (not remaining or next(draws) < 0.5)
                chunks.append((owner, target, at, middle, stop, elsewhere))
                at = middle if elsewhere else stop
        rows: Int64s = np.array(chunks, dtype=np.int64).T
        return rows


_FROM_OTHERS = "next sentence prediction draws its random segments from other documents"
_FOUR_DOCUMENTS = (
    "Give four documents or more (a blank line ends one in a .txt file), or set "
    f"{setting('objective', 'masked_lm')}."
)


@dataclass(frozen=True)
class NextSentence(PairSegments):
    """Two segments: the second follows the first (label 0) or is random (label 1), as in BERT.

    Attributes:
        length: the longest sequence in tokens, specials included; in a run the length of the phase.
        short: the share of documents that are read with a random shorter target length.
    """

    classes: ClassVar[tuple[str, ...]] = ("is next", "random")
    one_sentence: ClassVar[str] = "next-sentence pairs of those are all random"
    drawn: ClassVar[int] = 1
    length: int = 128
    short: float = 0.1
    kind: Literal["next_sentence"] = "next_sentence"

    def plan(
        self, block: EpochBlock, selection: Selection, rng: np.random.Generator
    ) -> list[PairPlan]:
        chunks = self._gather_chunks(block, rng, pairs_again=True)
        owner, target, begin, middle, stop, label = chunks
        a, a_stop = block.starts[begin], block.stops[middle - 1]
        # A random pair of one sentence has no rest; its unused `middle` may be past the block.
        b, b_stop = block.starts[np.minimum(middle, len(block.starts) - 1)], block.stops[stop - 1]
        random = np.flatnonzero(label)
        b[random], b_stop[random] = draw_other_segments(
            owner[random], (target - (a_stop - a))[random], selection, rng
        )
        return shuffled_pairs((a, a_stop, b, b_stop), label, self.room, rng)

    def check(self, corpus: Corpus) -> list[Finding]:
        """Return the findings about pairs, and about a corpus that is too small to split."""
        findings = super().check(corpus)
        if len(corpus) < 4:  # of fewer, the training or the held-out documents are one
            message = f"{_FROM_OTHERS}, and the corpus has {quantity(len(corpus), 'document(s)')}"
            findings.append(Finding("balance", "error", message, "segments", _FOUR_DOCUMENTS))
        return findings

    def require(self, selection: Selection, template: Template) -> None:
        """Raise DataError for a single document, which has no random segments."""
        super().require(selection, template)
        if len(selection) == 1:
            message = f"{_FROM_OTHERS}, and only one document has text"
            raise DataError(message, where="segments", fix=_FOUR_DOCUMENTS)


@dataclass(frozen=True)
class SentenceOrder(PairSegments):
    """Two consecutive segments, in order (label 0) or swapped (label 1), as in ALBERT.

    Attributes:
        length: the longest sequence in tokens, specials included; in a run the length of the phase.
        short: the share of documents that are read with a random shorter target length.
        single: what a chunk of one sentence becomes: "split" cuts it in two at a random token,
            "drop" leaves it out, "random" adds a segment of another document with label 1, as
            Google's code does, which lets the topic give the answer away.
    """

    classes: ClassVar[tuple[str, ...]] = ("in order", "swapped")
    one_sentence: ClassVar[str] = "sentence order pairs need two (see objective.segments.single)"
    length: int = 128
    short: float = 0.1
    single: Literal["split", "drop", "random"] = "split"
    kind: Literal["sentence_order"] = "sentence_order"

    def check(self, corpus: Corpus) -> list[Finding]:
        """Return the findings; documents that are all left out are an error."""
        if self.single == "drop" and len(corpus) == corpus.manifest.counts.sentences:
            message = "every document is one sentence, and these are left out: there are no pairs"
            boundary = argument(boundary="blank")
            single = setting("objective.segments.single", "split")
            fix = f"Set {single}, or build the corpus with {boundary}."
            return [Finding("balance", "error", message, "objective.segments.single", fix)]
        return super().check(corpus)

    def plan(
        self, block: EpochBlock, selection: Selection, rng: np.random.Generator
    ) -> list[PairPlan]:
        chunks = self._gather_chunks(block, rng, pairs_again=False)
        owner, target, begin, middle, stop, _ = chunks
        a, b_stop = block.starts[begin], block.stops[stop - 1]
        # Sentences of a document are contiguous: A ends where B begins, in one array for both.
        a_stop = b = np.where(middle < stop, block.stops[middle - 1], b_stop)
        b_stop, single = b_stop.copy(), middle == stop
        keep, is_other = np.ones(len(a), dtype=bool), np.zeros(len(a), dtype=bool)
        match self.single:
            case "drop":
                keep = ~single
            case "split":
                keep = ~single | (b_stop - a > 1)
                halves = np.flatnonzero(single & keep)
                a_stop[halves] = a[halves] + rng.integers(1, (b_stop - a)[halves])
            case "random":
                is_other, b = single, b.copy()
                b[is_other], b_stop[is_other] = draw_other_segments(
                    owner[is_other], (target - (a_stop - a))[is_other], selection, rng
                )
            case _:
                assert_never(self.single)
        swapped = ~is_other & (rng.random(len(a)) < 0.5)
        spans = np.stack([a, a_stop, b, b_stop])
        ordered = np.where(swapped, spans[[2, 3, 0, 1]], spans)[:, keep]
        label = (swapped | is_other)[keep].astype(np.int64)
        return shuffled_pairs(ordered, label, self.room, rng)


def shuffled_pairs(
    spans: tuple[Int64s, Int64s, Int64s, Int64s] | NDArray[np.int64],
    label: Int64s,
    room: int,
    rng: np.random.Generator,
) -> list[PairPlan]:
    """Cut pairs of tokens `[a, a_stop)` and `[b, b_stop)` to `room` tokens, and shuffle them.

    The longer segment, or B if equal, loses one token at a time, from either end at random.
    """
    a, a_stop, b, b_stop = spans
    size_a, size_b = a_stop - a, b_stop - b
    over = np.maximum(size_a + size_b - room, 0)
    level = np.minimum(over, np.abs(size_a - size_b))
    from_a = np.where(size_a > size_b, level, 0) + (over - level) // 2
    from_b = over - from_a
    front_a, front_b = rng.binomial(from_a, 0.5), rng.binomial(from_b, 0.5)
    cut_a = a + front_a, a_stop - (from_a - front_a)
    cut_b = b + front_b, b_stop - (from_b - front_b)
    pairs = np.stack([*cut_a, *cut_b, label], axis=1)
    return [PairPlan._make(pair) for pair in rng.permutation(pairs).tolist()]


def draw_other_segments(
    documents: Int64s, target_tokens: Int64s, selection: Selection, rng: np.random.Generator
) -> tuple[Int64s, Int64s]:
    """Draw a segment of another document for each document.

    Returns:
        Tokens `[start, stop)`, at least `target_tokens` if the other document has that many.
    """
    other = rng.integers(len(selection), size=len(documents))
    for _ in range(DRAWS - 1):
        same = np.flatnonzero(other == documents)
        other[same] = rng.integers(len(selection), size=len(same))
    ids = selection.ids[other]
    low, high = selection.documents[ids], selection.documents[ids + 1]
    begin = rng.integers(low, high)
    start = selection.sentences[begin]
    # Every sentence has a token, so that `wanted` sentences are always enough.
    end = np.minimum(high, begin + np.maximum(target_tokens, 1))
    # Binary search for the first sentence of each that begins at its target or later, or `end`.
    low, high, targets = begin + 1, end, start + target_tokens
    while (low < high).any():
        middle = (low + high) // 2
        reached = selection.sentences[middle] >= targets
        low = np.where(reached | (low == high), low, middle + 1)
        high = np.where(reached, np.minimum(middle, high), high)
    return start, selection.sentences[low]
