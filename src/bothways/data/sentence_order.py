"""Pairs of segments for sentence order prediction, by the algorithm of ALBERT's instance builder.

Sources: Lan et al. 2019, section 3.1; google-research/albert, create_pretraining_data.py, as
distributions. Sentences are gathered until a target length is reached or the document ends, with
the targets of next sentence prediction. The first a sentences of the chunk, a drawn uniformly so
that at least one is left, and the rest are the two segments; in half of the cases they change
places. All sentences of a document are read.

    chunk s0 s1 s2, a = 1, in order → [CLS] s0 [SEP] s1 s2 [SEP], label 0
                           swapped  → [CLS] s1 s2 [SEP] s0 [SEP], label 1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from typing_extensions import assert_never

from bothways.core.advice import argument
from bothways.core.finding import Finding
from bothways.data import next_sentence
from bothways.data.epoch_order import EpochBlock, Selection
from bothways.data.segments import PairPlan, PairSegments

if TYPE_CHECKING:
    from bothways.data.corpus import Corpus


@dataclass(frozen=True)
class SentenceOrder(PairSegments):
    """Two consecutive segments, in order (label 0) or swapped (label 1), as in ALBERT.

    Attributes:
        length: the longest sequence in tokens, specials included.
        short: the share of documents that are read with a random shorter target length.
        single: what a chunk of one sentence becomes: "split" cuts it in two at a random token,
            "drop" leaves it out, "random" adds a segment of another document with label 1, as
            Google's code does, which lets the topic give the answer away.
    """

    one_sentence: ClassVar[str] = "sentence order pairs need two (see objective.segments.single)"
    length: int = 128
    short: float = 0.1
    single: Literal["split", "drop", "random"] = "split"
    kind: Literal["sentence_order"] = "sentence_order"

    def check(self, corpus: Corpus) -> list[Finding]:
        """Return the findings; documents that are all left out are an error."""
        if self.single == "drop" and len(corpus) == corpus.manifest.counts.sentences:
            message = "every document is one sentence, and these are left out: there are no pairs"
            fix = (
                "Set objective.segments.single=split, or build the corpus with "
                f"{argument(boundary='blank')}."
            )
            return [Finding("balance", "error", message, "objective.segments.single", fix)]
        return super().check(corpus)

    def plan(
        self, block: EpochBlock, selection: Selection, rng: np.random.Generator
    ) -> list[PairPlan]:
        """Return the pairs of a block, shuffled."""
        targets = next_sentence.target_lengths(len(block.owners), self.room, self.short, rng)
        document, begin, middle, stop, _ = next_sentence.gather_chunks(
            block, targets, rng, pairs_again=False
        )
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
                is_other = single
                if is_other.any():
                    b = b.copy()
                    target_tokens = (targets[document] - (a_stop - a))[is_other]
                    owners = block.owners[document[is_other]]
                    b[is_other], b_stop[is_other] = next_sentence.draw_other_segments(
                        owners, target_tokens, selection, block.window, rng
                    )
            case _:
                assert_never(self.single)
        swapped = ~is_other & (rng.random(len(a)) < 0.5)
        spans = np.stack([a, a_stop, b, b_stop])
        ordered = np.where(swapped, spans[[2, 3, 0, 1]], spans)[:, keep]
        label = (swapped | is_other)[keep].astype(np.int64)
        from_a, from_b = next_sentence.excess(
            ordered[1] - ordered[0], ordered[3] - ordered[2], self.room
        )
        columns = [
            *next_sentence.cut_segment(ordered[0], ordered[1], from_a, rng),
            *next_sentence.cut_segment(ordered[2], ordered[3], from_b, rng),
        ]
        pairs = np.stack([*columns, label], axis=1)
        return [PairPlan._make(pair) for pair in rng.permutation(pairs).tolist()]
