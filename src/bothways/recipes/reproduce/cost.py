"""What experiments would cost, before any is run: examples, tokens, and time at the speed of this model on this machine.

Examples are counted; tokens per example are those of the first ones; the speed is measured once, on a batch of the first task.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Many
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from bothways.core.batch import pack
from bothways.core.hardware import choose_device
from bothways.core.sequence import Sequence
from bothways.interop.folder import load_model
from bothways.interop.hub import model_folder
from bothways.model.operations import BACKWARD
from bothways.recipes.finetune_setup import FinetuneConfig
from bothways.recipes.reproduce.experiment import Experiment
from bothways.recipes.reproduce.runner import cells, finished
from bothways.report.sections import Cell, Table
from bothways.tasks.definition import Definition
from bothways.tasks.preflight import speed
from bothways.text.tokenizer import Tokenizer
from bothways.training.state import Epochs

SAMPLED = 1000
"""Examples by which the tokens per example are estimated."""
BATCH = 1024
"""Tokens that the speed is measured on."""


@dataclass(frozen=True)
class Cost:
    """Attributes:
    runs, done: of the experiment, and how many of them are finished already.
    examples, tokens: of an epoch of training.
    work: tokens of all runs that are left, those of evaluation counted by what they cost beside training.
    """

    name: str
    runs: int
    done: int
    examples: int
    tokens: float
    work: float


@dataclass(frozen=True)
class _Size:
    """Data: how many examples, how many tokens, and the sequences of the first."""

    examples: int
    tokens: float
    sequences: tuple[Sequence, ...]


def estimate(experiments: Many[Experiment], out: Path, *, device: str) -> tuple[list[Cost], float]:
    """The cost of each experiment, and the tokens per second in training. DataError or FolderError for what cannot be read."""
    settings = experiments[0].grid[0]
    loaded = load_model(model_folder(settings.model), ())
    tokenizer = Tokenizer.load(loaded.folder).for_segments(loaded.model.config.segments)
    sizes = [_sizes(experiment, tokenizer) for experiment in experiments]
    costs = [_cost(experiment, size, out) for experiment, size in zip(experiments, sizes, strict=True)]
    return costs, _speed(settings, sizes[0]["train"], device)


def _sizes(experiment: Experiment, tokenizer: Tokenizer) -> dict[str, _Size]:
    settings = experiment.grid[0]
    sources = {"train": settings.train, "dev": str(settings.dev), **experiment.others}
    return {name: _size(source, settings, tokenizer) for name, source in sources.items()}


def _size(source: str, settings: FinetuneConfig, tokenizer: Tokenizer) -> _Size:
    reading = settings.task.read(source, getattr(settings.task, "columns", None))
    definition: Definition[Any, Any] = reading.definition
    first = list(itertools.islice(reading.examples, SAMPLED))
    count = len(first) + sum(1 for _ in reading.examples)
    inputs = definition.encode(first, tokenizer, definition.labels(first), settings.length)
    sequences = tuple(sequence for item in inputs for sequence in item.sequences)
    return _Size(count, sum(map(len, sequences)) * count / len(first), sequences)


def _cost(experiment: Experiment, sizes: dict[str, _Size], out: Path) -> Cost:
    train = sizes.pop("train")
    known = list(cells(experiment))
    done = sum(finished(experiment, settings, out) is not None for settings in known)
    evaluation = sum(size.tokens for size in sizes.values()) / (1 + BACKWARD)
    sizes["train"] = train
    each = [_epochs(settings) * train.tokens + evaluation for settings in known]
    left = sum(each) / len(each) * (experiment.cells - done)
    return Cost(experiment.name, experiment.cells, done, train.examples, train.tokens, left)


def _epochs(settings: FinetuneConfig) -> float:
    """Of a run; a run that is not measured in epochs is taken for one."""
    until = settings.training.until
    return until.count if isinstance(until, Epochs) else 1.0


def _speed(settings: FinetuneConfig, size: _Size, device: str) -> float:
    definition: Definition[Any, Any] = settings.task.read(settings.train).definition
    labels = definition.labels(settings.task.read(settings.train).examples)
    heads = definition.heads(labels, settings.dropout)
    loaded = load_model(model_folder(settings.model), heads, {head.kind for head in heads} - {"pooler"} | {*settings.fresh})
    tokenizer = Tokenizer.load(loaded.folder).for_segments(loaded.model.config.segments)
    task = definition.task(loaded.model, tokenizer, labels, settings.length)
    sequences = sorted(size.sequences, key=len)
    batch = pack(sequences[:: max(1, sum(map(len, sequences)) // BATCH)])
    return speed(task.to(choose_device(device)), batch, settings.training.precision)


def table(costs: Many[Cost], rate: float) -> Table:
    """The costs, one experiment a row, with their sum."""
    rows: list[list[Cell]] = [
        [cost.name, cost.runs, cost.done, cost.examples, round(cost.tokens), _time(cost.work / rate)] for cost in costs
    ]
    work = sum(cost.work for cost in costs)
    total: list[Cell] = ["all", sum(c.runs for c in costs), sum(c.done for c in costs), None, None, _time(work / rate)]
    columns = ["task", "runs", "done before", "training examples", "tokens per epoch, about", "time left, about"]
    note = f"At {rate:,.0f} tokens a second in training, as measured now; evaluation is included."
    return Table("What it would take", columns, [*rows, total], total=True, note=note)


def _time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
