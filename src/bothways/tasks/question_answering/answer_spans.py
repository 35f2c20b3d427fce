"""From a long text to windows, from characters to tokens, and from scores of tokens back to spans of characters.

Source: google-research/bert run_squad.py (Devlin et al. 2018, section 4.2, gives but the score of a span, start plus end).
Where windows overlap, a span counts in the window in which its first token has the most context. Two things differ from that
code, and both only add spans:

- It looks at the 20 best starts and the 20 best ends of a window and keeps what fits together. Here every start meets every end
  within the longest answer, in one addition, so the best spans are the best of all.
- It drops a span that the window with the most context cuts in two. Here the next window counts.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Offsets = NDArray[np.int64]
Scores = NDArray[np.float32]


@dataclass(frozen=True)
class AnswerWindow:
    """Tokens `[start, stop)` of a text."""

    start: int
    stop: int


def answer_windows(tokens: int, room: int, stride: int) -> list[AnswerWindow]:
    """A text of so many tokens as windows of at most `room`, each `stride` after the one before; at least one."""
    step = min(room, stride)
    count = 1 + max(0, -(-(tokens - room) // step))
    return [
        AnswerWindow(step * number, min(step * number + room, tokens)) for number in range(count)
    ]


def covering(offsets: Offsets, start: int, stop: int) -> tuple[int, int] | None:
    """First and last of the tokens that share a character with `[start, stop)`; none if there are none.

    Args:
        offsets: `(tokens, 2)` begin and end of each token, in characters, in order.
    """
    first = int(np.searchsorted(offsets[:, 1], start, side="right"))
    last = int(np.searchsorted(offsets[:, 0], stop, side="left")) - 1
    return (first, last) if first <= last else None


def characters(text: str, offsets: Offsets, first: int, last: int) -> tuple[int, int]:
    """The characters of the tokens from `first` to `last`: white space at the ends is left out, and a combining mark stays
    with its letter, where the tokenizer dropped it."""
    start, stop = int(offsets[first, 0]), int(offsets[last, 1])
    while stop < len(text) and unicodedata.category(text[stop]).startswith("M"):
        stop += 1
    found = text[start:stop]
    return start + len(found) - len(found.lstrip()), stop - len(found) + len(found.rstrip())


def span_scores(
    scores: Many[Scores], parts: Many[AnswerWindow], longest: int
) -> NDArray[np.float32]:
    """Scores of all spans of a text, `(tokens, longest)`: `[i, n]` is of the n + 1 tokens from i on; −∞ if no window has them.

    Args:
        scores: for each window `(its tokens, 2)`, of a start and of an end.
        parts: the windows, which together are the whole text.
    """
    tokens = parts[-1].stop
    result, held = (
        np.full((tokens, longest), -np.inf, dtype=np.float32),
        np.full((tokens, longest), -np.inf),
    )
    for score, part in zip(scores, parts, strict=True):
        size, rows = part.stop - part.start, slice(part.start, part.stop)
        ends = np.concatenate([score[:, 1], np.full(longest - 1, -np.inf, dtype=np.float32)])
        spans = (
            np.lib.stride_tricks.sliding_window_view(ends, longest)[:size] + score[:, :1]
            if size
            else result[rows]
        )
        context = np.minimum(np.arange(size), np.arange(size)[::-1]) + 0.01 * size
        better = (context[:, None] > held[rows]) & (spans > -np.inf)
        result[rows][better] = spans[better]
        held[rows] = np.where(better, context[:, None], held[rows])
    return result


def best_spans(table: NDArray[np.float32], count: int) -> list[tuple[int, int, float]]:
    """The best of `span_scores`, best first, of equals the one that begins first: (first token, last token, score)."""
    flat, longest = table.ravel(), table.shape[1]
    places = np.flatnonzero(flat > -np.inf)
    if count < len(places):
        places = places[flat[places] >= np.partition(flat[places], -count)[-count]]
    chosen = places[np.argsort(-flat[places], kind="stable")][:count]
    return [
        (at // longest, at // longest + at % longest, float(flat[at])) for at in chosen.tolist()
    ]
