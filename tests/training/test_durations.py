"""Durations in other units."""

import pytest

from bothways.training.schedules import Epochs, Hours, StepRates, Steps, Tokens


def test_durations_are_converted_to_steps_in_every_unit():
    rates = StepRates(tokens=100.0, epochs=0.25, seconds=2.0)
    durations = (Steps(6), Tokens(600), Epochs(1.5), Hours(12 / 3600))
    assert [each.steps(rates) for each in durations] == pytest.approx([6.0] * 4)
    assert Epochs(1.0).steps(StepRates(100.0)) is Hours(1.0).steps(StepRates(100.0)) is None


def test_intervals_count_the_end_of_a_run():
    rates = StepRates(tokens=100.0)
    assert [rates.times(Steps(4), steps) for steps in (1, 8, 8.5)] == [1, 2, 3]
    assert rates.times(None, 8) == rates.times(Hours(1.0), 8) == 1
