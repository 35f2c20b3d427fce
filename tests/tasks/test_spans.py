"""Windows, tokens of characters, and the best spans against a search through all pairs, as Google's code has it."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from bothways.tasks.question_answering.task import best_spans, characters, covering, span_scores
from bothways.tasks.text_task import owners, windows


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), max_size=8),
    st.integers(0, 40),
    st.integers(1, 8),
)
def test_the_tokens_of_characters_are_those_that_share_one(gaps, start, size):
    offsets, at = [], 0
    for gap, width in gaps:
        offsets.append((at + gap, at + gap + width))
        at += gap + width
    sharing = [
        place for place, (begin, end) in enumerate(offsets) if begin < start + size and end > start
    ]
    found = covering(np.array(offsets, dtype=np.int64).reshape(-1, 2), start, start + size)
    assert found == ((sharing[0], sharing[-1]) if sharing else None)


def test_characters_keep_marks_and_leave_white_space():
    text = " cafe\u0301 noir \u05e9\u05c1\u05dc\u05d5\u05dd"
    offsets = np.array([(0, 5), (6, 11), (11, 13), (14, 17)], dtype=np.int64)
    words = [text[slice(*characters(text, offsets, place, place))] for place in range(4)]
    assert words == ["cafe\u0301", "noir", "\u05e9\u05c1", "\u05dc\u05d5\u05dd"]


def google(
    scores: list[np.ndarray], parts: list[range], longest: int
) -> dict[tuple[int, int], float]:
    """Every span that run_squad.py could name, had it no limit of 20 starts and ends: its first token has the most context in
    the span's window."""
    found = {}
    for score, part in zip(scores, parts, strict=True):
        for first in range(part.start, part.stop):
            best, chosen = -1.0, None
            for other in parts:  # _check_is_max_context
                if other.start <= first < other.stop:
                    size = other.stop - other.start
                    context = min(first - other.start, other.stop - 1 - first) + 0.01 * size
                    if chosen is None or context > best:
                        best, chosen = context, other
            for last in range(first, min(first + longest, part.stop)) if chosen == part else ():
                found[first, last] = score[first - part.start, 0] + score[last - part.start, 1]
    return found


@settings(max_examples=100)
@given(
    tokens=st.integers(1, 25), room=st.integers(1, 12), stride=st.integers(1, 14),
    longest=st.integers(1, 9), count=st.integers(1, 30), seed=st.integers(0, 999),
)  # fmt: skip
def test_spans_are_all_of_googles_and_those_that_windows_cut(
    tokens, room, stride, longest, count, seed
):
    rng, parts = np.random.default_rng(seed), windows(tokens, room, stride)
    scores = [rng.normal(size=(part.stop - part.start, 2)).astype(np.float32) for part in parts]
    table = span_scores(scores, parts, longest)
    every = best_spans(table, tokens * longest)
    found = {(first, last): score for first, last, score in every}
    theirs = google(scores, parts, longest)
    assert found.items() >= theirs.items()
    inside = [itertools.combinations_with_replacement(part, 2) for part in parts]
    pairs = {pair for pair in itertools.chain(*inside) if pair[1] - pair[0] < longest}
    assert found.keys() == pairs
    if len(parts) == 1:
        assert found == theirs
    assert [score for *_, score in every] == sorted(found.values(), reverse=True)
    assert best_spans(table, count) == every[:count]


UNEQUAL = [
    # The second word has one token on its poorer side in both.
    [range(0, 3), range(0, 9)],
    windows(572, 300, 128),  # of the last two, the longer one wins though it has a token less
]


@pytest.mark.parametrize("parts", UNEQUAL)
def test_of_windows_of_unequal_length_the_longer_one_is_ahead_by_a_hundredth_of_its_tokens(parts):
    rng = np.random.default_rng(0)
    scores = [rng.normal(size=(part.stop - part.start, 2)).astype(np.float32) for part in parts]
    # Spans of one token are cut by no window, so each counts where Google's code has it.
    table = span_scores(scores, parts, 1)
    found = {(first, last): score for first, last, score in best_spans(table, len(table))}
    assert found == google(scores, parts, 1)


@settings(max_examples=100)
@given(
    tokens=st.integers(1, 40), longest=st.integers(1, 8), count=st.integers(1, 30),
    values=st.integers(1, 4), seed=st.integers(0, 999),
)  # fmt: skip
def test_among_many_equals_the_first_are_chosen(tokens, longest, count, values, seed):
    rng = np.random.default_rng(seed)
    table = rng.integers(0, values, size=(tokens, longest)).astype(np.float32)
    table[table == 3] = -np.inf
    spans = [(first, first + more, score) for (first, more), score in np.ndenumerate(table)]
    possible = [span for span in spans if span[2] > -np.inf]
    expected = sorted(possible, key=lambda span: -span[2])[:count]  # which leaves equals in order
    assert best_spans(table, count) == expected


@settings(deadline=None)
@given(st.integers(0, 80), st.integers(1, 25), st.integers(1, 40))
def test_each_position_counts_where_it_has_the_most_context(tokens, room, stride):
    parts = windows(tokens, room, stride, full=True)
    starts = [part.start for part in parts]
    assert starts[0] == 0
    assert max(0, tokens - room) == starts[-1]
    assert all(part.stop == min(part.start + room, tokens) for part in parts)
    assert all(step == min(stride, room) for step in np.diff(starts)[:-1])
    assert all(0 < step <= min(stride, room) for step in np.diff(starts))
    owner = owners(np.arange(tokens), parts, room)
    for place, own in enumerate(owner):
        # Below 0: the position is not in the window.
        context = [min(place - start, start + room - 1 - place) for start in starts]
        assert context[own] >= 0
        assert own == int(np.argmax(context))


@given(st.integers(0, 60), st.integers(1, 20), st.integers(1, 25))
def test_windows_are_googles(tokens, room, stride):
    expected, start = [], 0
    while True:  # the loop of convert_examples_to_features in run_squad.py
        length = min(tokens - start, room)
        expected.append(range(start, start + length))
        if start + length == tokens:
            break
        start += min(length, stride)
    assert windows(tokens, room, stride) == expected


def test_no_span_is_longer_than_the_largest_window():
    parts = windows(25, 12, 5)
    scores = [np.zeros((part.stop - part.start, 2), dtype=np.float32) for part in parts]
    assert span_scores(scores, parts, 10**9).shape == (25, 12)
