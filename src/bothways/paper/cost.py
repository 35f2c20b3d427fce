"""What experiments would cost, before any is run: examples, tokens, and time at the speed of this model on this machine.

Examples are counted; tokens per example are those of the first ones; the speed is measured once, on a batch of the first task.
What runs on frozen features is in `frozen_cost`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Many
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from bothways.core.batch import pack
from bothways.core.sequence import Sequence
from bothways.finetuning.prepare import FinetuneConfig, load_for
from bothways.hub.model_folder import load_model
from bothways.hub.resolve import resolve_run
from bothways.model.flops import BACKWARD
from bothways.paper.cells import cell_restarts, cells, is_cell_finished
from bothways.paper.experiment import Experiment
from bothways.preflight.machine import speed
from bothways.report.sections import Cell, TableSection
from bothways.runtime.devices import choose_device
from bothways.tasks.base import EncodedExample, Task
from bothways.tasks.catalogue import Trainable
from bothways.text.tokenizer import Tokenizer
from bothways.training.durations import Epochs

SAMPLED = 1000
"""Examples by which the tokens per example are estimated."""
BATCH = 1024
"""Tokens that the speed is measured on."""


@dataclass(frozen=True)
class Cost:
    """Attributes:
    runs, done: of the experiment, and how many of them are finished already.
    examples, tokens: of the training data.
    seconds: of all runs that are left, evaluation included.
    """

    name: str
    runs: int
    done: int
    examples: int
    tokens: float
    seconds: float


@dataclass(frozen=True)
class Size:
    """Data: how many examples, how many tokens, what the first ones became, and the labels that they have."""

    examples: int
    tokens: float
    inputs: tuple[EncodedExample, ...]
    labels: tuple[str, ...]

    @property
    def sequences(self) -> list[Sequence]:
        """Of the first examples."""
        return [sequence for item in self.inputs for sequence in item.sequences]


def estimate(experiments: Many[Experiment], out: Path, *, device: str) -> tuple[list[Cost], str]:
    """The cost of each experiment, and how it was measured. DataError or FolderError for what cannot be read."""
    settings = experiments[0].grid[0]
    loaded = load_model(resolve_run(settings.model), ())
    tokenizer = loaded.tokenizer()
    sizes = [_sizes(experiment, tokenizer) for experiment in experiments]
    rate = _speed(settings, sizes[0]["train"], device)
    costs = [
        _cost(experiment, size, rate, out)
        for experiment, size in zip(experiments, sizes, strict=True)
    ]
    return (
        costs,
        f"At {rate:,.0f} tokens a second in training, as measured now; evaluation is included.",
    )


def _sizes(experiment: Experiment, tokenizer: Tokenizer) -> dict[str, Size]:
    settings = experiment.grid[0]
    sources = {"train": settings.train, "dev": str(settings.dev), **experiment.others}
    return {
        name: size_of(source, settings.task, settings.length, tokenizer)
        for name, source in sources.items()
    }


def size_of(source: str, task: Trainable, length: int, tokenizer: Tokenizer) -> Size:
    """The examples of a source are counted, its tokens estimated by the first ones. DataError for what cannot be read."""
    reading = task.read(source, getattr(task, "columns", None))
    definition: Task[Any, Any] = reading.task
    first = list(itertools.islice(reading.examples, SAMPLED))
    count = len(first) + sum(1 for _ in reading.examples)
    labels = definition.labels(first)
    inputs = tuple(definition.encode(first, tokenizer, labels, length))
    tokens = sum(len(sequence) for item in inputs for sequence in item.sequences)
    return Size(count, tokens * count / len(first), inputs, labels)


def _cost(experiment: Experiment, sizes: dict[str, Size], rate: float, out: Path) -> Cost:
    train = sizes["train"]
    known = list(cells(experiment))
    found = [
        result
        for settings in known
        if (result := is_cell_finished(experiment, settings, out)) is not None
    ]
    done = len(found)
    if done == len(known):
        done += sum(
            is_cell_finished(experiment, settings, out) is not None
            for settings in cell_restarts(experiment, found)
        )
    evaluation = sum(size.tokens for name, size in sizes.items() if name != "train") / (
        1 + BACKWARD
    )
    each = [_epochs(settings) * train.tokens + evaluation for settings in known]
    left = sum(each) / len(each) * (experiment.cells - done)
    return Cost(experiment.name, experiment.cells, done, train.examples, train.tokens, left / rate)


def _epochs(settings: FinetuneConfig) -> float:
    """Of a run; a run that is not measured in epochs is taken for one."""
    until = settings.training.until
    return until.count if isinstance(until, Epochs) else 1.0


def _speed(settings: FinetuneConfig, size: Size, device: str) -> float:
    definition: Task[Any, Any] = settings.task.read(settings.train).task
    labels = definition.labels(settings.task.read(settings.train).examples)
    loaded = load_for(settings, definition.heads(labels, settings.dropout))
    tokenizer = loaded.tokenizer()
    task = definition.learner(loaded.model, tokenizer, labels, settings.length)
    sequences = sorted(size.sequences, key=len)
    batch = pack(sequences[:: max(1, sum(map(len, sequences)) // BATCH)])
    return speed(task.to(choose_device(device)), batch, settings.training.precision)


def table(costs: Many[Cost], note: str) -> TableSection:
    """The costs, one experiment a row, with their sum."""
    rows: list[list[Cell]] = [
        [cost.name, cost.runs, cost.done, cost.examples, round(cost.tokens), _time(cost.seconds)]
        for cost in costs
    ]
    seconds = sum(cost.seconds for cost in costs)
    total: list[Cell] = [
        "all",
        sum(c.runs for c in costs),
        sum(c.done for c in costs),
        None,
        None,
        _time(seconds),
    ]
    columns = [
        "task",
        "runs",
        "done before",
        "training examples",
        "their tokens, about",
        "time left, about",
    ]
    return TableSection("What it would take", columns, [*rows, total], total=True, note=note)


def _time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
