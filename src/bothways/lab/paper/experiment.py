"""Experiments of the paper as values: a request, a task with its grid of settings, a benchmark."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bothways.core.atomic_files import make_folder, replace_file
from bothways.core.config import reader as configs
from bothways.core.config.checks import require_at_least
from bothways.core.errors import ConfigError
from bothways.core.terminal import quantity
from bothways.core.urls import local_path
from bothways.data.batching import ExampleBudget
from bothways.data.text_io import COMPRESSED
from bothways.finetuning.config import FinetuneConfig, paper_finetuning
from bothways.lab.features.data import FeatureConfig
from bothways.lab.paper.published import Published
from bothways.tasks.catalogue import Trainable
from bothways.training.durations import Epochs
from bothways.training.optimizers import BertAdam


@dataclass(frozen=True)
class Request:
    """What the user asks for.

    Attributes:
        model: a model folder, the folder of a pre-training run, or a Hub id.
        data: folder of the benchmark as distributed, or its data set on the Hub.
        out: folder for runs and results.
        tasks: names of the tasks to run; empty for all.
        seeds: runs per setting; None for the paper's number.
        grid: the paper's grid, one setting of it, or for GLUE the settings of ELECTRA.
        limit: maximum number of training examples, the first ones; None for all.
        overrides: settings by dotted path that override the paper's.
    """

    model: str
    data: str
    out: Path
    tasks: tuple[str, ...] = ()
    seeds: int | None = None
    grid: Literal["paper", "none", "electra"] = "paper"
    limit: int | None = None
    overrides: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_at_least(1, seeds=self.seeds, limit=self.limit)

    def chosen(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the requested tasks of a benchmark, in the order of `names`.

        Raises:
            ConfigError: a requested task is not among them.
        """
        for name in self.tasks:
            if name not in names:
                message = f"unknown task {name!r}; the benchmark has: {', '.join(names)}"
                raise ConfigError(message, where="tasks")
        return tuple(name for name in names if not self.tasks or name in self.tasks)

    def departures(self, seeds: int | None) -> tuple[str, ...]:
        """List the differences from the paper's protocol.

        Args:
            seeds: runs per setting in the paper; None if the paper does not say.
        """
        result = [*self.overrides]
        if seeds is not None and self.seeds not in (None, seeds):
            result.append(f"{quantity(self.seeds, 'run(s)')} per setting instead of {seeds}")
        if self.limit is not None:
            result.append(f"only the first {self.limit:,} training examples")
        if self.grid == "electra":
            result.append("the settings of ELECTRA small and base (Clark et al. 2020)")
        if self.grid == "none":
            result.append("one setting instead of the grid")
        return tuple(result)


def find_file(data: str, *names: str) -> str | None:
    """Return the first existing file of these names, plain or compressed, in the data folder."""
    folder = local_path(data)
    files = (folder / f"{name}{suffix}" for name in names for suffix in ("", *COMPRESSED))
    return next((str(file) for file in files if file.is_file()), None)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write rows as JSON lines; return the path."""
    make_folder(path.parent)

    def write(file: Path) -> None:
        """Write one row per line."""
        with file.open("w", encoding="utf8", newline="\n") as stream:
            stream.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    replace_file(path, write)
    return path


@dataclass(frozen=True)
class Experiment:
    """A task to fine-tune on, or to learn on the vectors of a frozen encoder.

    Attributes:
        name: name of the task.
        grid: the settings to try, each with its first seed; of a frozen encoder, one.
        seeds: runs per setting.
        restarts: "best" runs every setting with every seed and takes the best run on dev data;
            "mean" chooses the setting by its first seed and takes the mean of that setting's runs.
        others: further data that the best weights are scored on; the name is the prefix of the
            metrics.
        notes: remarks about the data.
    """

    name: str
    grid: tuple[FinetuneConfig, ...] | tuple[FeatureConfig]
    seeds: int = 1
    restarts: Literal["best", "mean"] = "best"
    others: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def settings(self) -> FinetuneConfig | FeatureConfig:
        """The settings of the first run."""
        return self.grid[0]

    @property
    def cells(self) -> int:
        """Number of runs."""
        count = len(self.grid)
        return count * self.seeds if self.restarts == "best" else count + self.seeds - 1


@dataclass(frozen=True)
class NotRun:
    """A task that cannot be run, with the reason."""

    name: str
    reason: str


MEASURED = "this run"
"""Name of the measured row of most benchmarks."""


@dataclass(frozen=True)
class BenchmarkPlan:
    """A benchmark that is ready to run.

    Attributes:
        title: the benchmark with its section in the paper.
        experiments: the tasks in the order of the paper.
        columns: columns of the comparison with the paper.
        measured: the measured rows by name: the task and metric of each column.
        published: the paper's rows.
        averaged: the columns whose mean is the column "average"; empty for none.
        notes: explanations of the comparison.
        seeds: runs per setting in the paper; None if the paper does not say.
    """

    title: str
    experiments: tuple[Experiment | NotRun, ...]
    columns: tuple[str, ...]
    measured: Mapping[str, Mapping[str, tuple[str, str]]]
    published: tuple[Published, ...]
    averaged: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seeds: int | None = 1


@dataclass(frozen=True)
class GridPoint:
    """A setting of the paper's grid; `length` is in tokens, None for the task's default, and
    `layer_decay` as in `Stability`.
    """

    rate: float
    batch: int
    epochs: float
    length: int | None = None
    layer_decay: float = 1.0


def grid_settings(
    request: Request,
    task: Trainable,
    points: Iterable[GridPoint],
    train: Path | str,
    dev: Path | str,
    metric: str | None = None,
) -> tuple[FinetuneConfig, ...]:
    """Return the settings of one run per point; points that the overrides make equal are merged.

    A run is scored once, at its end, as in google-research/bert.
    """

    def settings(point: GridPoint) -> FinetuneConfig:
        """Return the settings of one point."""
        method = paper_finetuning(task)
        optimizer = BertAdam(lr=point.rate)
        training = dataclasses.replace(
            method.training, until=Epochs(point.epochs), optimizer=optimizer, evaluate=None
        )
        method = dataclasses.replace(
            method,
            training=training,
            batch=ExampleBudget(point.batch),
            metric=metric,
            length=point.length or method.length,
            stability=dataclasses.replace(method.stability, layer_decay=point.layer_decay),
        )
        base = dataclasses.replace(method, model=request.model, train=str(train), dev=str(dev))
        return configs.load(FinetuneConfig, base=base, overrides=request.overrides)

    return tuple(dict.fromkeys(map(settings, points)))
