"""Windows: every word is answered for once, in the window in which it has the most context."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bothways.tasks.tagging.windows import owners, window_starts


@settings(deadline=None)
@given(st.integers(0, 80), st.integers(1, 25), st.integers(1, 40))
def test_each_place_has_the_window_in_which_it_stands_best(
    tokens: int, room: int, stride: int
) -> None:
    starts = window_starts(tokens, room, stride)
    assert starts[0] == 0
    assert max(0, tokens - room) == starts[-1]
    assert all(0 < step <= min(stride, room) for step in np.diff(starts))
    owner = owners(np.arange(tokens), starts, room)
    for place, own in enumerate(owner):
        context = [
            min(place - start, start + room - 1 - place) for start in starts
        ]  # below 0: not in the window
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
def test_windows_begin_a_stride_apart_and_the_last_ends_with_the_text(
    tokens: int, room: int, stride: int, starts: list[int]
) -> None:
    assert window_starts(tokens, room, stride).tolist() == starts
