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
    Steps,
    Tokens,
    duration,
    rate_factor,
)

SCHEDULES = [Linear, GoogleLinear, Constant, Polynomial, Cosine, WSD]


def rates(schedule, total):
    at = rate_factor(schedule, Steps(total))
    return [at(RunState(steps=step)) for step in range(total + 1)]


@pytest.mark.parametrize(
    "text", ["2 hours", "0.25 hours", "20 minutes", "95 seconds", "0.5 epochs", "1000 steps"]
)
def test_a_duration_is_printed_as_it_may_be_written(text):
    assert str(duration(text)) == text


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
