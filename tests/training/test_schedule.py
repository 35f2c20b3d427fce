import json
from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_polynomial_decay_schedule_with_warmup,
)

from bothways.core.errors import ConfigError
from bothways.core.source import Cursor
from bothways.training.schedules import (
    WSD,
    Constant,
    Cosine,
    Epochs,
    GoogleLinear,
    Hours,
    Linear,
    Polynomial,
    RunState,
    StepRates,
    Steps,
    Tokens,
    duration,
    rate_factor,
)
from toy_training import ToyStep

SCHEDULES = [Linear, GoogleLinear, Constant, Polynomial, Cosine, WSD]


def rates(schedule, total):
    at = rate_factor(schedule, Steps(total))
    return [at(RunState(steps=step)) for step in range(total + 1)]


@given(
    st.integers(2, 60).flatmap(lambda total: st.tuples(st.just(total), st.integers(1, total - 1)))
)
def test_the_schedules_are_those_of_transformers(sizes):
    total, warmup = sizes
    rise = Steps(warmup)
    cubic = {"num_training_steps": total, "lr_end": 0.1, "power": 3.0}
    for schedule, make, settings in (
        (Linear(rise), get_linear_schedule_with_warmup, {"num_training_steps": total}),
        (Constant(rise), get_constant_schedule_with_warmup, {}),
        (Cosine(rise, 0.0), get_cosine_schedule_with_warmup, {"num_training_steps": total}),
        (Polynomial(rise, 3.0, 0.1), get_polynomial_decay_schedule_with_warmup, cubic),
    ):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        scheduler, expected = make(optimizer, warmup, **settings), []
        for _ in range(total + 1):
            expected.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        assert rates(schedule, total) == pytest.approx(expected, abs=1e-12)


@given(
    st.integers(2, 60).flatmap(lambda total: st.tuples(st.just(total), st.integers(0, total - 1)))
)
def test_google_linear_is_polynomial_decay_with_warmup_put_in_its_place(sizes):
    total, warmup = sizes
    expected = []
    for step in range(total + 1):
        decayed = (1.0 - 0.0) * (1 - min(step, total) / total) ** 1.0 + 0.0
        is_warmup = float(step < warmup)
        expected.append((1 - is_warmup) * decayed + is_warmup * (step / warmup if warmup else 0.0))
    found = rates(GoogleLinear(Steps(warmup) if warmup else 0.0), total)
    assert found == pytest.approx(expected, abs=1e-12)


def test_wsd_rises_stays_and_falls():
    expected = [0, 0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]
    assert rates(WSD(Steps(2), Steps(4)), 10) == pytest.approx(expected)
    assert rates(WSD(0.0, 0.0), 3) == [1, 1, 1, 1]


@pytest.mark.parametrize("floor", [0.0, 0.1, 1.0])
def test_floors_are_shares_of_the_peak(floor):
    """At 0, half of the warm-up, its end, the middle of what follows, and the end."""
    places = (0, 2, 4, 12, 20)
    down = {Cosine: 0.5, Polynomial: 0.5**2, WSD: 1 - 0.5**0.5}
    for schedule in (
        Cosine(Steps(4), floor),
        Polynomial(Steps(4), 2.0, floor),
        WSD(Steps(4), Steps(16), "sqrt", floor),
    ):
        found = rates(schedule, 20)
        half = floor + (1 - floor) * down[type(schedule)]
        assert [found[place] for place in places] == pytest.approx([0, 0.5, 1, half, floor])


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda: Cosine(floor=1.5), "floor"),
        (lambda: WSD(floor=-0.1), "floor"),
        (lambda: Polynomial(floor=float("nan")), "floor"),
        (lambda: Polynomial(power=0.0), "power"),
    ],
)
def test_shapes_out_of_range_are_refused(make, where):
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.where == f"training.schedule.{where}"


@pytest.mark.parametrize("run", [Steps(3), Epochs(3.0), Epochs(0.7), Tokens(10**9), Hours(1 / 3)])
@pytest.mark.parametrize("tenths", range(1, 10))
def test_shares_may_fill_the_run(run, tenths):
    at = rate_factor(WSD(tenths / 10, 1 - tenths / 10), run)
    assert at(RunState()) == 0
    end = RunState(steps=3, tokens=10**9, epochs=3.0, seconds=1200.0)
    assert at(end) == pytest.approx(0, abs=1e-12)
    rate_factor(WSD(tenths / 10, (10 - tenths) / 10), run)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("run", "part", "halfway"),
    [
        (Tokens(1000), Tokens(100), RunState(tokens=500)),
        (Epochs(4.0), Epochs(0.4), RunState(epochs=2.0)),
        (Hours(2.0), Hours(0.2), RunState(seconds=3600.0)),
    ],
)
def test_any_unit_gives_the_same_shape(schedule, run, part, halfway):
    expected = rate_factor(schedule(0.1), Steps(1000))(RunState(steps=500))
    assert rate_factor(schedule(part), run)(halfway) == pytest.approx(expected)
    assert rate_factor(schedule(0.1), run)(halfway) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_rate_stays_between_0_and_the_peak_past_the_end_too(schedule):
    at = rate_factor(schedule(0.3), Steps(10))
    assert all(0 <= at(RunState(steps=step)) <= 1 for step in range(30))
    assert at(RunState(steps=30)) == at(RunState(steps=10))


@pytest.mark.parametrize(
    ("schedule", "run", "message"),
    [
        (Linear(1.0), Steps(10), "must be at least 0 and below 1, not 1.0"),
        (Linear(-0.1), Steps(10), "must be at least 0 and below 1, not -0.1"),
        (Linear(Tokens(5)), Steps(10), r"in tokens \(5 tokens\), the run in steps \(10 steps\)"),
        (Linear(Steps(10)), Steps(10), "as long as the run"),
        (WSD(0.5, 0.6), Steps(10), "longer than the run"),
        (WSD(0.2, 0.8 + 1e-14), Epochs(3.0), "longer than the run"),
        (WSD(Tokens(2 * 10**14), Tokens(8 * 10**14 + 1)), Tokens(10**15), "longer than the run"),
    ],
)
def test_a_part_that_does_not_fit_the_run_is_refused(schedule, run, message):
    with pytest.raises(ConfigError, match=message) as caught:
        rate_factor(schedule, run)
    assert caught.value.where.startswith("training.schedule")


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


@pytest.mark.parametrize(
    "text", ["2 hours", "0.25 hours", "20 minutes", "95 seconds", "0.5 epochs", "1000 steps"]
)
def test_a_duration_is_printed_as_it_may_be_written(text):
    assert str(duration(text)) == text


@given(DURATIONS)
def test_a_duration_is_read_from_its_own_text(drawn):
    assert duration(str(drawn)) == drawn


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
        (
            ["1.5 steps", "0.1 tokens", "1.000 steps", "1.25e1 steps", "1e999 tokens"],
            r"(steps|tokens) are whole numbers\n  Write 1000",
        ),
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
    first = RunState().after(ToyStep((), Cursor(2, 0, 5), 100, 4, 2.5))
    first = first.after(ToyStep((), Cursor(2, 0, 9), 50, 4, 2.75))
    assert first == RunState(2, 150, 2.75, 0.0, Cursor(2, 0, 9))
    second = first.next_phase()
    assert second == RunState(2, 150, 2.75, 0.0, Cursor(2), 1, (Cursor(2, 0, 9),))
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
