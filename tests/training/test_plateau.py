"""Runs that are made longer from the end of their plateau, and runs by the clock."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bothways.training import loop
from bothways.training.checkpoint import FolderStore, Keep, checkpoints
from bothways.training.run import Event, TrainingPhase
from bothways.training.schedules import WSD, Duration, Hours, Linear, RunState, Schedule, Steps
from toy_training import TRAINING, Toy, ToyStep, metric_lines, run_toy, steps, toy


def run(
    folder: Path,
    until: Duration,
    stop: int = 0,
    schedule: Schedule = WSD(0.0, 0.25),  # noqa: B008
) -> tuple[dict[str, torch.Tensor], RunState]:
    """Train in a folder, to the end or until the checkpoint of a step."""
    training = dataclasses.replace(
        TRAINING, until=until, schedule=schedule, save=Steps(3), evaluate=None, report=Steps(1),
        keep=Keep(1),
    )  # fmt: skip
    training_module = toy()
    folder.mkdir(exist_ok=True)

    def note(event: Event) -> None:
        if event.kind == "checkpoint" and event.progress.steps == stop:
            raise InterruptedError

    store = FolderStore(folder, {"training": {"until": str(until)}}, {"training.until"})
    progress = run_toy(store, training, training_module, on_event=note)
    return training_module.state_dict(), progress


def names(folder: Path) -> list[str]:
    return [path.name for path in checkpoints(folder)]


def test_a_finished_run_is_made_longer_from_its_plateau(tmp_path):
    whole, _ = run(tmp_path / "whole", Steps(32))
    run(tmp_path / "longer", Steps(16))
    assert names(tmp_path / "longer") == ["step-12", "step-16"]
    longer, progress = run(tmp_path / "longer", Steps(32))
    assert progress.steps == 32
    assert all(torch.equal(tensor, longer[name]) for name, tensor in whole.items())
    assert names(tmp_path / "longer") == names(tmp_path / "whole") == ["step-24", "step-32"]
    rates, expected = (
        [line["learning_rate"] for line in metric_lines(tmp_path / name)]
        for name in ("longer", "whole")
    )
    assert rates == expected


@pytest.mark.parametrize("stop", [3, 12, 15])
def test_a_stopped_run_is_made_longer_from_its_plateau(stop, tmp_path):
    whole, _ = run(tmp_path / "whole", Steps(32))
    with pytest.raises(InterruptedError):
        run(tmp_path / "longer", Steps(16), stop)
    # Made longer, stopped on the plateau, and resumed.
    with pytest.raises(InterruptedError):
        run(tmp_path / "longer", Steps(32), 18)
    longer, _ = run(tmp_path / "longer", Steps(32))
    assert all(torch.equal(tensor, longer[name]) for name, tensor in whole.items())


def test_in_its_decay_a_run_resumes_where_it_was(tmp_path):
    whole, _ = run(tmp_path / "whole", Steps(16))
    with pytest.raises(InterruptedError):
        run(tmp_path / "cut", Steps(16), 15)
    assert names(tmp_path / "cut") == ["step-12", "step-15"]
    again, _ = run(tmp_path / "cut", Steps(16))
    assert all(torch.equal(tensor, again[name]) for name, tensor in whole.items())


def test_schedules_without_a_plateau_are_stretched(tmp_path):
    run(tmp_path, Steps(6), schedule=Linear())
    _, progress = run(tmp_path, Steps(12), schedule=Linear())
    assert progress.steps == 12
    assert [line["step"] for line in metric_lines(tmp_path)] == [*range(1, 13)]


@pytest.mark.parametrize("stop", [3, 6, 9, 12])
@pytest.mark.parametrize("schedule", [WSD(0.1, 0.25), Linear(0.1)], ids=lambda value: value.kind)
def test_a_run_by_the_clock_resumes_at_its_time(stop, schedule, tmp_path, monkeypatch):
    """The clock advances by a minute with each step that is read: equal rates, phases and weights."""
    time = {"minutes": 0}

    def clocked(state: RunState, size: int) -> Iterator[ToyStep]:
        for step in steps(state, size):
            time["minutes"] += 1
            yield step

    monkeypatch.setattr(loop.time, "perf_counter", lambda: 60.0 * time["minutes"])

    def session(folder: Path, stop: int = 0) -> Toy:
        training = dataclasses.replace(
            TRAINING, until=Hours(16 / 60), schedule=schedule, save=Steps(3), evaluate=None,
            report=Steps(1), keep=Keep(1),
        )  # fmt: skip
        training_module = toy()
        folder.mkdir(exist_ok=True)

        def note(event: Event) -> None:
            if event.kind == "checkpoint" and event.progress.steps == stop:
                raise InterruptedError

        phases = [
            TrainingPhase(Hours(8 / 60), lambda state: clocked(state, 5)),
            TrainingPhase(Hours(16 / 60), lambda state: clocked(state, 4)),
        ]
        store = FolderStore(folder, {})
        run_toy(store, training, training_module, phases=phases, on_event=note)
        return training_module

    whole = session(tmp_path / "whole").state_dict()
    time["minutes"] += 5  # between the sessions
    with pytest.raises(InterruptedError):
        session(tmp_path / "cut", stop)
    time["minutes"] += 5
    again = session(tmp_path / "cut").state_dict()
    timed = [
        [(line["step"], line["learning_rate"], line["seconds"]) for line in metric_lines(folder)]
        for folder in (tmp_path / "cut", tmp_path / "whole")
    ]
    assert timed[0] == timed[1]
    assert all(torch.equal(tensor, again[name]) for name, tensor in whole.items())
