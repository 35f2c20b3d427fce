"""Windows: every token is in one, and counts in the window in which it has the most context."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bothways.tasks.text_task import TextWindow, owners, windows


@settings(deadline=None)
@given(st.integers(0, 80), st.integers(1, 25), st.integers(1, 40))
def test_each_position_counts_where_it_has_the_most_context(tokens, room, stride):
    parts = windows(tokens, room, stride, full=True)
    starts = [part.start for part in parts]
    assert starts[0] == 0
    assert max(0, tokens - room) == starts[-1]
    assert all(part.stop == min(part.start + room, tokens) for part in parts)
    assert all(0 < step <= min(stride, room) for step in np.diff(starts))
    owner = owners(np.arange(tokens), parts, room)
    for place, own in enumerate(owner):
        # Below 0: the position is not in the window.
        context = [min(place - start, start + room - 1 - place) for start in starts]
        assert context[own] >= 0
        assert own == int(np.argmax(context))


@pytest.mark.parametrize(
    ("tokens", "room", "stride", "starts"),
    [
        (0, 5, 2, [0]),
        (5, 5, 2, [0]),
        (6, 5, 2, [0, 1]),
        (9, 5, 2, [0, 2, 4]),
        (11, 4, 9, [0, 4, 7]),
    ],
)
def test_full_windows_begin_a_stride_apart_and_the_last_ends_with_the_text(
    tokens, room, stride, starts
):
    assert [part.start for part in windows(tokens, room, stride, full=True)] == starts


@given(st.integers(0, 60), st.integers(1, 20), st.integers(1, 25))
def test_windows_are_googles(tokens, room, stride):
    expected, start = [], 0
    while True:  # the loop of convert_examples_to_features in run_squad.py
        length = min(tokens - start, room)
        expected.append(TextWindow(start, start + length))
        if start + length == tokens:
            break
        start += min(length, stride)
    assert windows(tokens, room, stride) == expected
