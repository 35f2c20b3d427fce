"""Early stopping: when it stops, and that a resumed count is an unbroken one."""

import dataclasses
import math
from pathlib import Path

import pytest

from bothways.core.errors import ConfigError
from bothways.training.checkpoint import Best, Keep, checkpoints
from bothways.training.run import EarlyStopping, TrainingPhase
from bothways.training.schedules import RunState, Steps
from toy_training import TRAINING, run_toy, steps, toy

HIGH, LOW = Best("m", "highest"), Best("m", "lowest")


@pytest.mark.parametrize(
    ("best", "values", "waited"),
    [
        (HIGH, [1, 2, 3], 0),
        (HIGH, [1, 1, 1], 2),  # equal is not better
        (HIGH, [3, 1, 2], 2),
        (HIGH, [1, 0, 2, 1], 1),
        (LOW, [1, 2, 0.5, 0.6], 1),
        (LOW, [math.nan, 2, math.nan], 1),
        (HIGH, [math.nan, math.nan], 2),
    ],
)
def test_what_is_counted(best, values, waited):
    for stop in range(len(values)):
        whole, broken = EarlyStopping(2, best), EarlyStopping(2, best)
        for value in values[:stop]:
            broken.note({best.metric: float(value)})
        again = EarlyStopping(2, best)
        again.restore(broken.state())
        for value in values:
            whole.note({best.metric: float(value)})
        for value in values[stop:]:
            again.note({best.metric: float(value)})
        assert again.state() == whole.state()
        assert whole.state()["early_stopping/waited"] == waited
        assert whole.over == (waited >= 2)


def test_without_patience_nothing_is_counted():
    waiting = EarlyStopping(None, None)
    waiting.note({"loss": 1.0})
    assert (waiting.state(), waiting.over) == ({}, False)


def run(
    folder: Path,
    values: list[float],
    *,
    patience: int | None = 2,
    until: int = 14,
    best: Best | None = HIGH,
) -> RunState:
    """A run that evaluates every second step and finds these values, by step."""
    training = dataclasses.replace(
        TRAINING,
        until=Steps(until),
        evaluate=Steps(2),
        save=None,
        keep=Keep(1, best),
        early_stopping=patience,
    )
    found = iter(values)
    folder.mkdir(exist_ok=True)
    phases = [TrainingPhase(Steps(7), steps), TrainingPhase(Steps(until), steps)]
    return run_toy(
        folder, training, toy(0.1), phases=phases, evaluation=lambda progress: {"m": next(found)}
    )


def test_a_run_ends_when_nothing_gets_better(tmp_path):
    progress = run(tmp_path / "run", [0.1, 0.3, 0.2, 0.3, 0.9, 1.0, 1.0])
    assert (progress.steps, progress.early) == (8, True)
    assert progress.finished(Steps(14))
    assert [folder.name for folder in checkpoints(tmp_path / "run")] == ["step-4", "step-8"]
    again = run(tmp_path / "run", [])  # resumed at its end: nothing is left to do
    assert (again.steps, again.early) == (8, True)


def test_a_run_that_gets_better_in_time_goes_on(tmp_path):
    progress = run(tmp_path / "run", [0.1, 0.3, 0.2, 0.4, 0.3, 0.5, 0.1])
    assert (progress.steps, progress.early) == (14, False)


def test_the_end_of_a_run_is_no_early_end(tmp_path):
    progress = run(tmp_path / "run", [0.5, 0.4, 0.3], until=6, patience=2)
    assert (progress.steps, progress.early, progress.finished(Steps(6))) == (6, False, True)


def test_patience_needs_a_metric_and_a_number(tmp_path):
    with pytest.raises(ConfigError, match=r"^training\.early_stopping: early stopping needs"):
        run(tmp_path / "run", [], best=None)
    with pytest.raises(ConfigError, match=r"^training\.early_stopping: must be at least 1, not 0"):
        run(tmp_path / "run", [], patience=0)
