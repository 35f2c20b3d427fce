"""Forecast of experiments before they run: examples, tokens, and time on this machine.

Examples are counted and tokens per example estimated from the first ones. The speed of fine-tuning
is measured once, on a batch of the first task.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bothways.core.batch import pack
from bothways.core.report.sections import Cell, TableSection
from bothways.core.runtime.devices import choose_device
from bothways.core.sequence import Sequence
from bothways.core.terminal import time_text
from bothways.finetuning.config import FinetuneConfig
from bothways.finetuning.prepare import load_for
from bothways.hub.model_folder import load_model
from bothways.hub.resolve import resolve_run
from bothways.lab.paper.cells import first_runs, place_of, restarts
from bothways.lab.paper.experiment import Experiment, Frozen
from bothways.lab.sweeps.runs import Series, read_finished
from bothways.model.flops import BACKWARD
from bothways.tasks.base import EncodedExample, Task
from bothways.tasks.catalogue import Trainable
from bothways.text.tokenizer import Tokenizer
from bothways.training.durations import Epochs
from bothways.training.preflight.machine import speed

SAMPLED = 1000
"""Number of examples from which tokens per example are estimated."""
BATCH = 1024
"""Tokens of the batch on which the speed is measured."""


@dataclass(frozen=True)
class Cost:
    """The cost of an experiment.

    Attributes:
        runs, done: number of runs, and of those that are finished.
        examples, tokens: size of the training data.
        seconds: duration of the remaining runs, evaluation included; None if it is not measured.
    """

    name: str
    runs: int
    done: int
    examples: int
    tokens: float
    seconds: float | None


@dataclass(frozen=True)
class DataSize:
    """Size of a data set: counts, the encoded first examples, and their labels."""

    examples: int
    tokens: float
    encoded: tuple[EncodedExample, ...]
    labels: tuple[str, ...]

    @property
    def sequences(self) -> list[Sequence]:
        """Sequences of the first examples."""
        return [sequence for item in self.encoded for sequence in item.sequences]


def data_size(source: str, task: Trainable, length: int, tokenizer: Tokenizer) -> DataSize:
    """Count the examples of a source and estimate its tokens from the first ones.

    Raises:
        DataError: the source cannot be read.
    """
    reading = task.read(source, getattr(task, "columns", None))
    task_read: Task[Any, Any] = reading.task
    sample = list(itertools.islice(reading.examples, SAMPLED))
    count = len(sample) + sum(1 for _ in reading.examples)
    labels = task_read.labels(sample)
    encoded = tuple(task_read.encode(sample, tokenizer, labels, length))
    tokens = sum(len(sequence) for item in encoded for sequence in item.sequences)
    return DataSize(count, tokens * count / len(sample), encoded, labels)


def estimate(experiments: Many[Experiment], out: Path, *, device: str) -> tuple[list[Cost], str]:
    """Return the cost of each experiment and a note on the measurement.

    Raises:
        DataError: the data cannot be read.
        FolderError: the model cannot be opened.
    """
    settings = experiments[0].grid[0]
    tokenizer = load_model(resolve_run(settings.model), ()).tokenizer()
    sizes = []
    for experiment in experiments:
        run = experiment.grid[0]
        length = run.length or run.task.length
        sources = {"train": run.train, "dev": str(run.dev), **experiment.others}
        sizes.append(
            {name: data_size(x, run.task, length, tokenizer) for name, x in sources.items()}
        )
    rate = _training_speed(settings, sizes[0]["train"], device)
    costs = [
        _cost(experiment, size, rate, out)
        for experiment, size in zip(experiments, sizes, strict=True)
    ]
    return costs, f"At {rate:,.0f} training tokens per second, as measured; evaluation is included."


def _cost(experiment: Experiment, sizes: dict[str, DataSize], rate: float, out: Path) -> Cost:
    train, done = sizes["train"], _finished(experiment, out)
    scored = sum(size.tokens for name, size in sizes.items() if name != "train")
    epochs = statistics.fmean(map(_epochs, experiment.grid))
    left = (epochs * train.tokens + scored / (1 + BACKWARD)) * (experiment.cells - done)
    return Cost(experiment.name, experiment.cells, done, train.examples, train.tokens, left / rate)


def _finished(experiment: Experiment | Frozen, out: Path) -> int:
    """Return the number of finished runs."""
    folder, grid_runs = place_of(experiment, out), first_runs(experiment, out)
    done = [outcome for run in grid_runs if (outcome := read_finished(run, folder)) is not None]
    # Only if all of these are finished is the best setting known, which is restarted.
    seeds = restarts(experiment, Series(tuple(done))) if len(done) == len(grid_runs) else []
    return len(done) + sum(read_finished(run, folder) is not None for run in seeds)


def _epochs(settings: FinetuneConfig) -> float:
    """Return the epochs of a run, 1 if it is not measured in epochs."""
    until = settings.training.until
    return until.count if isinstance(until, Epochs) else 1.0


def _training_speed(settings: FinetuneConfig, size: DataSize, device: str) -> float:
    task: Task[Any, Any] = settings.task.read(settings.train).task
    labels = task.labels(settings.task.read(settings.train).examples)
    loaded = load_for(settings, task.heads(labels, settings.dropout))
    task_model = task.bind(
        loaded.model, loaded.tokenizer(), labels, (settings.length or settings.task.length)
    )
    sequences = sorted(size.sequences, key=len)
    batch = pack(sequences[:: max(1, sum(map(len, sequences)) // BATCH)])
    return speed(task_model.to(choose_device(device)), batch, settings.training.precision)


def frozen_cost(experiment: Frozen, out: Path) -> Cost:
    """Return the size of an experiment on frozen features, whose time is not measured."""
    settings = experiment.settings
    loaded = load_model(resolve_run(settings.model), ())
    length = (settings.length or settings.task.length) or loaded.model.config.max_positions
    size = data_size(settings.train, settings.task, length, loaded.tokenizer())
    done = _finished(experiment, out)
    return Cost(experiment.name, experiment.seeds, done, size.examples, size.tokens, None)


def duration_text(seconds: float | None) -> str:
    """Format a duration; a dash if it is not measured."""
    return "–" if seconds is None else time_text(seconds)


def cost_table(costs: Many[Cost], note: str) -> TableSection:
    """Return the costs as a table, one experiment per row, with their sum."""
    rows: list[list[Cell]] = [
        [c.name, c.runs, c.done, c.examples, round(c.tokens), duration_text(c.seconds)]
        for c in costs
    ]
    seconds = sum(cost.seconds or 0.0 for cost in costs)
    runs, done = sum(cost.runs for cost in costs), sum(cost.done for cost in costs)
    rows.append(["all", runs, done, None, None, time_text(seconds)])
    columns = ["task", "runs", "finished", "training examples", "tokens (≈)", "time left (≈)"]
    return TableSection("Estimated cost", columns, rows, total=True, note=note)
