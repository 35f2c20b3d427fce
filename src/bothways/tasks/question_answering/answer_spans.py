"""From scores of tokens to spans of characters.

Source: google-research/bert run_squad.py (Devlin et al. 2018, section 4.2, defines only the score
of a span, start plus end). Where windows overlap, a span counts in the window in which its first
token has the most context. There are two differences, and both only add spans:

- That code combines the 20 best starts and the 20 best ends of a window. Here every start is
  combined with every end within the longest answer, so the best spans are the best of all.
- It drops a span that the window with the most context cuts in two. Here the next window counts.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence as Many

import numpy as np
from numpy.typing import NDArray

from bothways.tasks.windows import TextWindow

Offsets = NDArray[np.int64]
Scores = NDArray[np.float32]


def covering(offsets: Offsets, start: int, stop: int) -> tuple[int, int] | None:
    """Return the first and the last token that share a character with `[start, stop)`, if any.

    Args:
        offsets: begin and end of each token in characters, in order `(tokens, 2)`.
    """
    first = int(np.searchsorted(offsets[:, 1], start, side="right"))
    last = int(np.searchsorted(offsets[:, 0], stop, side="left")) - 1
    return (first, last) if first <= last else None


def characters(text: str, offsets: Offsets, first: int, last: int) -> tuple[int, int]:
    """Return the characters of the tokens from `first` to `last`.

    White space at the ends is dropped. Combining marks that the tokenizer dropped stay with their
    letter.
    """
    start, stop = int(offsets[first, 0]), int(offsets[last, 1])
    while stop < len(text) and unicodedata.category(text[stop]).startswith("M"):
        stop += 1
    span = text[start:stop]
    return start + len(span) - len(span.lstrip()), stop - len(span) + len(span.rstrip())


def span_scores(
    scores: Many[Scores], chunks: Many[TextWindow], max_tokens: int
) -> NDArray[np.float32]:
    """Return the scores of all spans of a text `(tokens, longest)`.

    Entry `[i, n]` is the span of the n + 1 tokens from i on; −∞ if no window holds it.

    Args:
        scores: for each window `(its tokens, 2)`: of a start and of an end.
        chunks: the windows, which together are the whole text.
    """
    tokens = chunks[-1].stop
    result = np.full((tokens, max_tokens), -np.inf, dtype=np.float32)
    best_scores = np.full(
        (tokens, max_tokens), -np.inf
    )  # the context of each span in its best window
    for score, chunk in zip(scores, chunks, strict=True):
        size, rows = chunk.stop - chunk.start, slice(chunk.start, chunk.stop)
        if not size:
            continue
        # Row i of the view is ends[i : i + longest]: the ends of all spans that begin at i.
        ends = np.concatenate([score[:, 1], np.full(max_tokens - 1, -np.inf, dtype=np.float32)])
        spans = np.lib.stride_tricks.sliding_window_view(ends, max_tokens)[:size] + score[:, :1]
        context = np.minimum(np.arange(size), np.arange(size)[::-1]) + 0.01 * size
        better = (context[:, None] > best_scores[rows]) & (spans > -np.inf)
        result[rows][better] = spans[better]
        best_scores[rows] = np.where(better, context[:, None], best_scores[rows])
    return result


def best_spans(table: NDArray[np.float32], count: int) -> list[tuple[int, int, float]]:
    """Return the best spans of `span_scores` as (first token, last token, score), best first.

    Of equal ones, the span that begins first precedes.
    """
    flat, max_tokens = table.ravel(), table.shape[1]
    positions = np.flatnonzero(flat > -np.inf)
    if count < len(positions):
        positions = positions[flat[positions] >= np.partition(flat[positions], -count)[-count]]
    selected = positions[np.argsort(-flat[positions], kind="stable")][:count]
    # A flat place i · longest + n is the span from token i to token i + n.
    return [
        (at // max_tokens, at // max_tokens + at % max_tokens, float(flat[at]))
        for at in selected.tolist()
    ]
