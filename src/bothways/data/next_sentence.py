"""Pairs of segments for next sentence prediction, by the algorithm of Google's instance builder.

Devlin et al. 2018, appendix A.2, leaves most of it open; google-research/bert,
create_pretraining_data.py, is the source of the following, as distributions. A document has a
target length: the room next to [CLS] and two [SEP], or for a share of documents a uniform draw
from 2 on. Sentences are gathered to a chunk until the target is reached or the document ends. A is
the first a sentences of the chunk, a drawn uniformly so that at least one is left. B is the rest,
or, in half of the cases and whenever there is no rest, sentences from a random position of a
random document; the rest then opens the next chunk. More than half of the pairs are therefore
random where documents are short. The longer segment is cut, token by token from either end, until
the pair fits.

Only the walk over the chunks is a loop; random documents, their bounds and the cuts are computed
for a whole block at once.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from bothways.core.errors import DataError
from bothways.data.epoch_order import EpochBlock, Selection, Whole
from bothways.data.remote_arrays import Column
from bothways.data.segments import PairPlan, PairSegments

if TYPE_CHECKING:
    from bothways.text.template import Template

DRAWS = 10
"""Maximum attempts to draw a different document; the last draw counts even if it is the same."""


@dataclass(frozen=True)
class NextSentence(PairSegments):
    """Two segments: the second follows the first (label 0) or is random (label 1), as in BERT.

    Attributes:
        length: the longest sequence in tokens, specials included.
        short: the share of documents that are read with a random shorter target length.
    """

    one_sentence: ClassVar[str] = "next-sentence pairs of those are all random"
    length: int = 128
    short: float = 0.1
    kind: Literal["next_sentence"] = "next_sentence"

    def plan(
        self, block: EpochBlock, selection: Selection, rng: np.random.Generator
    ) -> list[PairPlan]:
        """Return the pairs of a block, shuffled."""
        return plan_pairs(block, selection, self.length, self.short, rng)

    def read_in_place(self, pairs: Whole) -> NDArray[np.bool_]:
        """Return True for the pairs that are not random."""
        return np.asarray(pairs[:, 4] == 0)

    def require(self, selection: Selection, template: Template) -> None:
        """Raise DataError for a single document, which has no random segments."""
        super().require(selection, template)
        if len(selection) == 1:
            raise DataError(
                "next sentence prediction draws its random segments from other documents, "
                "and only one document has text",
                where="segments",
                fix="Give four documents or more (a blank line ends one in a .txt file), "
                "or set objective=masked_lm.",
            )


def plan_pairs(
    block: EpochBlock, selection: Selection, length: int, short: float, rng: np.random.Generator
) -> list[PairPlan]:
    """Return all pairs of a block, shuffled.

    Args:
        selection: the documents from which random segments come.
        length: the maximum length of a sequence, specials included; at least 5.
        short: the share of documents whose target length is drawn.
    """
    room = length - PairSegments.specials
    targets = target_lengths(len(block.owners), room, short, rng)
    document, begin, middle, stop, label = gather_chunks(block, targets, rng, pairs_again=True)
    a, a_stop = block.starts[begin], block.stops[middle - 1]
    # A random pair of one sentence has no rest; its `middle` may be past the block and is unused.
    b, b_stop = block.starts[np.minimum(middle, len(block.starts) - 1)], block.stops[stop - 1]
    random = np.flatnonzero(label)
    target_tokens = (targets[document] - (a_stop - a))[random]
    b[random], b_stop[random] = draw_other_segments(
        block.owners[document[random]], target_tokens, selection, block.window, rng
    )
    from_a, from_b = excess(a_stop - a, b_stop - b, room)
    pairs = np.stack(
        [*cut_segment(a, a_stop, from_a, rng), *cut_segment(b, b_stop, from_b, rng), label], axis=1
    )
    return [PairPlan._make(pair) for pair in rng.permutation(pairs).tolist()]


def target_lengths(documents: int, room: int, short: float, rng: np.random.Generator) -> Whole:
    """Return a target length for each document: `room`, or for a share `short` a draw from 2 on."""
    drawn = rng.integers(2, room, size=documents, endpoint=True)
    return np.where(rng.random(documents) < short, drawn, room)


def gather_chunks(
    block: EpochBlock, targets: Whole, rng: np.random.Generator, *, pairs_again: bool
) -> Whole:
    """Cut each document into chunks of its target length, and each chunk in two.

    Args:
        pairs_again: whether half of the chunks, and those of one sentence, keep only their first
            part: the second one is drawn from elsewhere, and its sentences open the next chunk.

    Returns:
        `(5, chunks)` with the rows document, first sentence of A, first sentence of B (the end of a
        chunk of one sentence), end, and 1 where B is drawn from elsewhere.
    """
    # bounds[i] is the number of tokens before sentence i, so that tokens [i, j) are a difference.
    bounds = np.concatenate([[0], np.cumsum(block.stops - block.starts)]).tolist()
    edges = block.edges.tolist()
    draws = iter(rng.random((1 + pairs_again) * len(block.starts)).tolist())
    chunks: list[tuple[int, int, int, int, int]] = []
    for document, target in enumerate(targets.tolist()):
        at, end = edges[document], edges[document + 1]
        while at < end:
            # The first sentence at whose end the chunk has `target` tokens, or the document's last.
            stop = bisect_left(bounds, bounds[at] + target, at + 1, end)
            remaining = stop - at - 1
            middle = at + 1 + int(next(draws) * remaining) if remaining else stop
            elsewhere = pairs_again and (not remaining or next(draws) < 0.5)
            chunks.append((document, at, middle, stop, elsewhere))
            at = middle if elsewhere else stop
    rows: Whole = np.array(chunks, dtype=np.int64).T
    return rows


def draw_other_segments(
    documents: Whole,
    target_tokens: Whole,
    selection: Selection,
    window: Whole | None,
    rng: np.random.Generator,
) -> tuple[Whole, Whole]:
    """Draw a segment of another document for each document, from the same window.

    Returns:
        Tokens `[start, stop)`, at least `target_tokens` if the other document has that many.
    """
    other = selection.draw(len(documents), window, rng)
    for _ in range(DRAWS - 1):
        same = np.flatnonzero(other == documents)
        other[same] = selection.draw(len(same), window, rng)
    low, high = selection.bounds(selection.ids[other])
    begin = rng.integers(low, high)
    start = selection.sentences[begin]
    # Every sentence has a token, so that `wanted` sentences are always enough.
    end = np.minimum(high, begin + np.maximum(target_tokens, 1))
    return start, selection.sentences[
        _first_at_least(selection.sentences, start + target_tokens, begin + 1, end)
    ]


def _first_at_least(ascending: Column, goals: Whole, low: Whole, high: Whole) -> Whole:
    """Return for each goal the first index in `[low, high]` whose value reaches it, or `high`."""
    while (low < high).any():
        middle = (low + high) // 2
        reached = ascending[middle] >= goals
        low = np.where(reached | (low == high), low, middle + 1)
        high = np.where(reached, np.minimum(middle, high), high)
    return low


def excess(a: Whole, b: Whole, room: int) -> tuple[Whole, Whole]:
    """Return the number of tokens that A and B lose so that both fit in `room`.

    The longer segment, or B if equal, loses one token at a time.
    """
    over = np.maximum(a + b - room, 0)
    level = np.minimum(over, np.abs(a - b))
    from_a = np.where(a > b, level, 0) + (over - level) // 2
    return from_a, over - from_a


def cut_segment(
    start: Whole, stop: Whole, excess: Whole, rng: np.random.Generator
) -> tuple[Whole, Whole]:
    """Remove `excess` tokens of each segment, each from the front or the back at random."""
    front = rng.binomial(excess, 0.5)
    return start + front, stop - (excess - front)
