import json
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from bothways.core.errors import ConfigError
from bothways.core.source import Cursor
from bothways.training.schedules import Epochs, Hours, RunState, StepRates, Steps, Tokens, duration
from toy_training import ToyStep

DURATIONS = st.one_of(
    st.builds(Steps, st.integers(1, 10**9)),
    st.builds(Tokens, st.integers(1, 10**11)),
    st.builds(Epochs, st.integers(1, 10**6).map(lambda n: n / 64)),
    st.builds(Hours, st.integers(1, 10**6).map(lambda n: n / 64)),
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1000 steps", Steps(1000)),
        ("1 step", Steps(1)),
        ("10_000 steps", Steps(10000)),
        ("2e9 tokens", Tokens(2_000_000_000)),
        (" 3 epochs ", Epochs(3.0)),
        ("2.5epochs", Epochs(2.5)),
        ("0.5 hours", Hours(0.5)),
        ("30 minutes", Hours(0.5)),
        ("90 seconds", Hours(0.025)),
        ("2h", Hours(2)),
        ("30m", Hours(0.5)),
        ("45 s", Hours(0.0125)),
        ("1e4 steps", Steps(10_000)),
    ],
)
def test_a_text_is_read_as_a_duration(text, expected):
    assert duration(text) == expected


@given(DURATIONS)
def test_a_duration_is_read_from_its_own_text(given_duration):
    assert duration(str(given_duration)) == given_duration


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (
            [
                "",
                "1000",
                "steps",
                "ten steps",
                "5 parsecs",
                "1,5 hours",
                "nan hours",
                "5 steps more",
            ],
            r"invalid duration .*\n.* steps, tokens, epochs, hours, minutes, seconds",
        ),
        (["1.5 steps", "0.1 tokens"], "whole numbers"),
        (["0 steps", "-1 steps", "-0.5 hours", "1e999 epochs"], "above 0 and finite"),
    ],
)
def test_a_text_that_is_no_duration_is_refused(texts, message):
    for text in texts:
        with pytest.raises(ConfigError, match=message):
            duration(text)


@given(st.integers(1, 50), st.lists(st.integers(1, 200), min_size=1, max_size=30))
def test_something_is_due_once_for_each_multiple_that_is_reached(every, increments):
    progress, times = RunState(), 0
    for tokens in increments:
        before, progress = progress, progress.after(ToyStep((), Cursor(), tokens, 1, 0.0))
        passed = progress.passed(Tokens(every), before)
        assert passed == any(
            number % every == 0 for number in range(before.tokens + 1, progress.tokens + 1)
        )
        times += passed
    assert times <= progress.tokens // every


def test_parts_of_an_epoch_are_due_where_they_are_no_binary_fractions():
    places = [RunState(epochs=(step + 1) / 10) for step in range(20)]
    assert all(now.passed(Epochs(0.1), before) for before, now in pairwise([RunState(), *places]))


def test_progress_adds_steps_and_a_phase_continues_the_epoch():
    first = (
        RunState()
        .after(ToyStep((), Cursor(2, 0, 5), 100, 4, 2.5))
        .after(ToyStep((), Cursor(2, 0, 9), 50, 4, 2.75))
    )
    assert (first.steps, first.tokens, first.epochs, first.cursor) == (
        2,
        150,
        2.75,
        Cursor(2, 0, 9),
    )
    second = first.next_phase()
    assert (second.phase, second.cursor, second.epochs) == (1, Cursor(2), 2.75)
    assert second.ends == (Cursor(2, 0, 9),)
    assert second.after(ToyStep((), Cursor(2, 0, 3), 10, 1, 2.8)).epochs == 2.8


def test_progress_survives_json():
    ended = RunState(2**53, 2**60, 0.1, 1e9, Cursor(2**40, 0, 9), early=True, plateau=3)
    for state in (ended, ended.next_phase().next_phase()):
        read = RunState.from_json(json.loads(json.dumps(state.to_json())))
        assert read == state
        assert isinstance(read.cursor, Cursor)


def test_durations_are_converted_to_steps_in_every_unit():
    rates = StepRates(tokens=100.0, epochs=0.25, seconds=2.0)
    durations = (Steps(6), Tokens(600), Epochs(1.5), Hours(12 / 3600))
    assert [each.steps(rates) for each in durations] == pytest.approx([6.0] * 4)
    assert Epochs(1.0).steps(StepRates(100.0)) is Hours(1.0).steps(StepRates(100.0)) is None


def test_intervals_count_the_end_of_a_run():
    rates = StepRates(tokens=100.0)
    assert [rates.times(Steps(4), steps) for steps in (1, 8, 8.5)] == [1, 2, 3]
    assert rates.times(None, 8) == rates.times(Hours(1.0), 8) == 1
