"""A run in memory: which weights it ends with, what it evaluates, and when patience ends it."""

import dataclasses
import math

import pytest
import torch

from bothways.core.progress import Progress
from bothways.training.checkpoint import Best, Keep, MemoryStore
from bothways.training.run import Event
from bothways.training.schedules import RunState, Steps
from toy_training import TRAINING, run_toy, toy

FREE = dataclasses.replace(TRAINING, until=Steps(7), evaluate=Steps(2), keep=Keep())
HIGH, LOW = Best("m", "highest"), Best("m", "lowest")


def run(
    best: Best, values: list[float], patience: int | None = None
) -> tuple[MemoryStore, RunState, list[torch.Tensor], torch.Tensor]:
    """What it came to, the weights at each evaluation, and those at the end; the evaluations find these values."""
    training_module, seen = toy(), list[torch.Tensor]()

    def evaluation(progress: Progress) -> dict[str, float]:
        seen.append(training_module.inner.weight.detach().clone())
        return {"m": values[len(seen) - 1]}

    store = MemoryStore()
    training = dataclasses.replace(FREE, early_stopping=patience, keep=Keep(1, best))
    progress = run_toy(store, training, training_module, evaluation=evaluation)
    store.load_best(training_module, best)
    return store, progress, seen, training_module.inner.weight.detach()


@pytest.mark.parametrize(("best", "at"), [(HIGH, 1), (LOW, 2)])
def test_it_ends_with_the_best_weights(best, at):
    store, progress, seen, last = run(best, [0.5, 0.9, 0.1, 0.9])
    assert len(store.history) == len(seen) == 4, "after steps 2, 4 and 6, and at the end"
    assert store.metrics == {"m": [0.5, 0.9, 0.1, 0.9][at]}
    assert torch.equal(last, seen[at])
    assert not any(torch.equal(last, other) for place, other in enumerate(seen) if place != at)
    assert (progress.steps, progress.early) == (7, False)


@pytest.mark.parametrize(("best", "at"), [(HIGH, 1), (LOW, 2)])
def test_no_number_is_worse_than_any_number(best, at):
    values = [math.nan, 0.5, 0.4, math.nan]
    store, _, seen, last = run(best, values)
    assert store.metrics == {"m": values[at]}
    assert torch.equal(last, seen[at])


def test_patience_ends_it():
    _, progress, seen, last = run(HIGH, [0.5, 0.4, 0.3, 0.2], patience=2)
    assert (progress.steps, progress.early) == (6, True)
    assert len(seen) == 3
    assert torch.equal(last, seen[0])


def test_without_an_evaluation_the_last_weights_stay():
    training_module, told = toy(), list[int]()
    before = training_module.inner.weight.detach().clone()

    def on_event(event: Event) -> None:
        if event.kind == "step":
            told.append(event.progress.steps)

    store = MemoryStore()
    run_toy(store, FREE, training_module, on_event=on_event)
    assert (store.history, store.metrics, told) == ([], {}, [1, 2, 3, 4, 5, 6, 7])
    assert not torch.equal(before, training_module.inner.weight)
