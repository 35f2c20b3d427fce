"""Runs that are made longer from the end of their plateau, and runs by the clock."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bothways.core.errors import ConfigError
from bothways.core.progress import Progress
from bothways.training import loop
from bothways.training.checkpoint import Best, FolderStore, Keep, MemoryStore, Store, checkpoints
from bothways.training.run import EarlyStopping, Event, TrainingPhase
from bothways.training.saved_state import Average, use_average
from bothways.training.schedules import WSD, Duration, Hours, Linear, RunState, Schedule, Steps
from toy_training import TRAINING, Toy, ToyStep, equal, metric_lines, run_toy, steps, stop_at, toy

BARE = dataclasses.replace(TRAINING, save=Steps(3), evaluate=None, report=Steps(1), keep=Keep(1))


def run(
    folder: Path,
    until: Duration,
    stop: int = 0,
    schedule: Schedule = WSD(0.0, 0.5),  # noqa: B008
) -> tuple[Toy, RunState]:
    """Train in a folder, to the end or until the checkpoint of a step."""
    training = dataclasses.replace(BARE, until=until, schedule=schedule)
    training_module = toy()
    folder.mkdir(exist_ok=True)
    store = FolderStore(folder, {"training": {"until": str(until)}}, {"training.until"})
    return training_module, run_toy(store, training, training_module, on_event=stop_at(stop))


def names(folder: Path) -> list[str]:
    return [path.name for path in checkpoints(folder)]


def test_a_run_is_made_longer_from_its_plateau(tmp_path):
    """One that is finished, and ones that were stopped before, at and after the end of the plateau."""
    whole, _ = run(tmp_path / "whole", Steps(16))
    for stop in (0, 3, 4, 6):
        folder = tmp_path / f"longer-{stop}"
        if stop:
            with pytest.raises(InterruptedError):
                run(folder, Steps(8), stop)
        else:
            run(folder, Steps(8))
            assert names(folder) == ["step-4", "step-8"]
        # Made longer, stopped on the plateau before the first end, and resumed.
        with pytest.raises(InterruptedError):
            run(folder, Steps(16), 6)
        longer, progress = run(folder, Steps(16))
        assert progress.steps == 16
        assert equal(longer, whole)
    assert names(tmp_path / "longer-0") == names(tmp_path / "whole") == ["step-8", "step-16"]
    of_longer, of_whole = (metric_lines(tmp_path / name) for name in ("longer-0", "whole"))
    rates = [line["learning_rate"] for line in of_longer]
    assert rates == [line["learning_rate"] for line in of_whole]


def test_in_its_decay_a_run_resumes_where_it_was(tmp_path):
    whole, _ = run(tmp_path / "whole", Steps(8))
    with pytest.raises(InterruptedError):
        run(tmp_path / "cut", Steps(8), 6)
    assert names(tmp_path / "cut") == ["step-4", "step-6"]
    again, _ = run(tmp_path / "cut", Steps(8))
    assert equal(again, whole)


def test_schedules_without_a_plateau_are_stretched(tmp_path):
    run(tmp_path, Steps(6), schedule=Linear())
    _, progress = run(tmp_path, Steps(12), schedule=Linear())
    assert progress.steps == 12
    assert [line["step"] for line in metric_lines(tmp_path)] == [*range(1, 13)]


@pytest.mark.parametrize(
    ("schedule", "stop"), [(WSD(0.1, 0.25), 6), (WSD(0.1, 0.25), 12), (Linear(0.1), 9)]
)
def test_a_run_by_the_clock_resumes_at_its_time(stop, schedule, tmp_path, monkeypatch):
    """The clock advances by a minute with each step that is read: equal rates, phases and weights."""
    time = {"minutes": 0}

    def clocked(state: RunState, size: int) -> Iterator[ToyStep]:
        for step in steps(state, size):
            time["minutes"] += 1
            yield step

    monkeypatch.setattr(loop.time, "perf_counter", lambda: 60.0 * time["minutes"])

    def session(folder: Path, stop: int = 0) -> Toy:
        training = dataclasses.replace(BARE, until=Hours(16 / 60), schedule=schedule)
        training_module = toy()
        folder.mkdir(exist_ok=True)
        phases = [
            TrainingPhase(Hours(8 / 60), lambda state: clocked(state, 5)),
            TrainingPhase(Hours(16 / 60), lambda state: clocked(state, 4)),
        ]
        run_toy(folder, training, training_module, phases=phases, on_event=stop_at(stop))
        return training_module

    whole = session(tmp_path / "whole")
    time["minutes"] += 5  # between the sessions
    with pytest.raises(InterruptedError):
        session(tmp_path / "cut", stop)
    time["minutes"] += 5
    again = session(tmp_path / "cut")
    timed = [
        [(line["step"], line["learning_rate"], line["seconds"]) for line in metric_lines(folder)]
        for folder in (tmp_path / "cut", tmp_path / "whole")
    ]
    assert timed[0] == timed[1]
    assert equal(again, whole)


HIGH, LOW = Best("m", "highest"), Best("m", "lowest")
FREE = dataclasses.replace(TRAINING, until=Steps(7), evaluate=Steps(2), keep=Keep())


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
    states = []
    for stop in range(len(values)):
        stopping = EarlyStopping(2, best)
        for number, value in enumerate(values):
            if number == stop:  # resumed here
                stopping, before = EarlyStopping(2, best), stopping
                stopping.restore(before.state())
            stopping.note({best.metric: float(value)})
        states.append(stopping.state())
        assert stopping.over == (waited >= 2)
    assert all(state == states[0] for state in states)
    assert states[0]["early_stopping/waited"] == waited


def run_patiently(folder: Path, values: list[float], best: Best | None = HIGH) -> RunState:
    """A run that evaluates every second step and finds these values, by step."""
    training = dataclasses.replace(
        FREE, until=Steps(14), save=None, keep=Keep(1, best), early_stopping=2
    )
    found = iter(values)
    folder.mkdir(exist_ok=True)
    phases = [TrainingPhase(Steps(7), steps), TrainingPhase(Steps(14), steps)]
    return run_toy(
        folder, training, toy(0.1), phases=phases, evaluation=lambda progress: {"m": next(found)}
    )


def test_a_run_ends_when_nothing_gets_better(tmp_path):
    progress = run_patiently(tmp_path / "run", [0.1, 0.3, 0.2, 0.3, 0.9, 1.0, 1.0])
    assert (progress.steps, progress.early) == (8, True)
    assert progress.finished(Steps(14))
    assert [folder.name for folder in checkpoints(tmp_path / "run")] == ["step-4", "step-8"]
    again = run_patiently(tmp_path / "run", [])  # resumed at its end: nothing is left to do
    assert (again.steps, again.early) == (8, True)


def test_patience_needs_a_metric(tmp_path):
    with pytest.raises(ConfigError, match=r"^training\.early_stopping: .*\n.*training\.keep\.best"):
        run_patiently(tmp_path / "run", [], best=None)


def run_averaged(
    store: Store, stop: int = 0, ema: float | None = 0.8
) -> tuple[Toy, list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    """The training module after a run, its weights after each update, and those of each evaluation."""
    training = dataclasses.replace(
        TRAINING, until=Steps(8), evaluate=Steps(4), save=Steps(1), ema=ema,
        keep=Keep(20, Best("score", "highest")),
    )  # fmt: skip
    training_module, weights, scored = toy(), list[dict[str, torch.Tensor]](), []

    def copied() -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in training_module.named_parameters()}

    def note(event: Event) -> None:
        if event.kind == "step":
            weights.append(copied())
        stop_at(stop)(event)

    def evaluation(progress: object) -> dict[str, float]:
        scored.append(copied())
        return {"score": float(-len(scored))}

    run_toy(store, training, training_module, evaluation=evaluation, on_event=note)  # fmt: skip
    return training_module, weights, scored


def expected(weights: list[dict[str, torch.Tensor]], decay: float) -> dict[str, torch.Tensor]:
    """Σ dᵗ⁻ⁱ wᵢ / Σ dᵗ⁻ⁱ in float64."""
    shares = torch.tensor([decay**n for n in reversed(range(len(weights)))], dtype=torch.float64)
    stacks = {name: torch.stack([w[name].double() for w in weights], -1) for name in weights[0]}
    return {name: stack @ shares / shares.sum() for name, stack in stacks.items()}


def test_the_average_is_evaluated_and_returned_and_changes_no_update():
    training_module, weights, scored = run_averaged(MemoryStore())
    _, plain, _ = run_averaged(MemoryStore(), ema=None)
    assert all(equal(*pair) for pair in zip(weights, plain, strict=True))
    assert len(scored) == 2
    final = dict(training_module.named_parameters())
    for found, count in ((scored[0], 4), (scored[1], 8), (final, 8)):
        for name, weight in expected(weights[:count], 0.8).items():
            torch.testing.assert_close(found[name].double(), weight, rtol=1e-5, atol=1e-7)


def test_the_best_weights_are_the_average_of_their_evaluation(tmp_path):
    for store in (MemoryStore(), FolderStore(tmp_path, {})):
        training_module, _, scored = run_averaged(store)
        store.load_best(training_module, Best("score", "highest"))
        assert equal(dict(training_module.named_parameters()), scored[0])


def test_a_run_that_was_cut_has_the_same_average(tmp_path):
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole, cut = (FolderStore(tmp_path / name, {}) for name in ("whole", "cut"))
    expected, _, _ = run_averaged(whole)
    with pytest.raises(InterruptedError):
        run_averaged(cut, stop=5)
    assert equal(run_averaged(cut)[0], expected)
    finished, weights, _ = run_averaged(cut)
    assert weights == []
    assert equal(finished, expected)


def test_a_frozen_parameter_has_no_average():
    training_module = toy()
    training_module.words.weight.requires_grad_(False)
    average = Average(training_module, 0.5)
    assert "words/weight" not in dict(average.named_buffers())
    assert [*average.parameters()] == []
    use_average(training_module)


@pytest.mark.parametrize(
    ("best", "values", "at", "patience", "end"),
    [
        (HIGH, [0.5, 0.9, 0.1, 0.9], 1, None, 7),  # after steps 2, 4 and 6, and at the end
        (LOW, [0.5, 0.9, 0.1, 0.9], 2, None, 7),
        (HIGH, [math.nan, 0.5, 0.4, math.nan], 1, None, 7),
        (LOW, [math.nan, 0.5, 0.4, math.nan], 2, None, 7),
        (HIGH, [0.5, 0.4, 0.3], 0, 2, 6),
    ],
)
def test_it_ends_with_the_best_weights(best, values, at, patience, end):
    training_module, store, seen = toy(), MemoryStore(), list[torch.Tensor]()

    def evaluation(progress: Progress) -> dict[str, float]:
        seen.append(training_module.inner.weight.detach().clone())
        return {"m": values[len(seen) - 1]}

    training = dataclasses.replace(FREE, early_stopping=patience, keep=Keep(1, best))
    progress = run_toy(store, training, training_module, evaluation=evaluation)
    store.load_best(training_module, best)
    assert len(seen) == len(values)
    assert store.metrics == {"m": values[at]}
    last = training_module.inner.weight
    assert [torch.equal(last, weights) for weights in seen] == [n == at for n in range(len(seen))]
    assert (progress.steps, progress.early) == (end, end < 7)
