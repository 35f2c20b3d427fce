"""An experiment of the paper: a task, a grid of settings, and restarts; and what was asked of all of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bothways.core.atomic_files import replace_file
from bothways.core.config import reader as configs
from bothways.core.config.checks import require_at_least
from bothways.core.errors import ConfigError
from bothways.data.batching import ExampleBudget
from bothways.data.text_io import COMPRESSED
from bothways.finetuning.config import paper_finetuning
from bothways.finetuning.feature_data import FeatureConfig
from bothways.finetuning.prepare import FinetuneConfig
from bothways.paper.published import Published
from bothways.tasks.catalogue import Trainable
from bothways.training.durations import Epochs
from bothways.training.optimizers import BertAdam

Restarts = Literal["best", "mean"]


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        model: a model folder, the folder of a pre-training run, or a Hub id.
        data: the benchmark's folder as distributed, or its data set on the Hub.
        out: where runs and results go.
        tasks: names of those to run; empty for all.
        seeds: runs of a setting; none for as many as the paper has.
        grid: the paper's grid, or one setting of it.
        limit: training examples, the first ones; none for all, as the paper has it.
        overrides: settings by dotted path, over the paper's.
    """

    model: str
    data: str
    out: Path
    tasks: tuple[str, ...] = ()
    seeds: int | None = None
    grid: Literal["paper", "none"] = "paper"
    limit: int | None = None
    overrides: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_at_least(1, seeds=self.seeds, limit=self.limit)

    def chosen(self, known: tuple[str, ...]) -> tuple[str, ...]:
        """Those of the benchmark's tasks that are asked for, in its order. ConfigError for another one."""
        for name in self.tasks:
            if name not in known:
                raise ConfigError(
                    f"{name!r} is none of its tasks: {', '.join(known)}", where="tasks"
                )
        return tuple(name for name in known if not self.tasks or name in self.tasks)

    def departures(self, seeds: int | None) -> tuple[str, ...]:
        """In what a run departs from the paper's protocol, which has so many runs of a setting, if it says how many."""
        result = [*self.overrides]
        if seeds is not None and self.seeds not in (None, seeds):
            result.append(f"{self.seeds} runs of a setting in place of {seeds}")
        if self.limit is not None:
            result.append(f"only the first {self.limit:,} training examples")
        if self.grid == "none":
            result.append("one setting in place of the grid")
        return tuple(result)


def find(request: Request, *names: str) -> str | None:
    """The first of these files that the data has, plain or compressed; none for none of them."""
    folder = Path(request.data).expanduser()
    files = (folder / f"{name}{suffix}" for name in names for suffix in ("", *COMPRESSED))
    return next((str(file) for file in files if file.is_file()), None)


def write_rows(place: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """JSON lines, for a run to read."""
    place.parent.mkdir(parents=True, exist_ok=True)

    def write(file: Path) -> None:
        """A row a line."""
        with file.open("w", encoding="utf8", newline="\n") as stream:
            stream.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    replace_file(place, write)
    return place


@dataclass(frozen=True)
class Experiment:
    """A task that can be run.

    Attributes:
        name: of the task.
        grid: the settings to try, the first seed in each.
        seeds: runs of a setting.
        restarts: "best" runs every setting with every seed and takes the best run on dev data; "mean" chooses the setting by
            its first seed, and takes the mean of that setting's runs.
        others: data that the best weights are scored on beside dev, by a name that their metrics begin with.
        notes: what there is to know about its data.
    """

    name: str
    grid: tuple[FinetuneConfig, ...]
    seeds: int = 1
    restarts: Restarts = "best"
    others: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def cells(self) -> int:
        """How many runs it takes."""
        match self.restarts:
            case "best":
                return len(self.grid) * self.seeds
            case "mean":
                return len(self.grid) + self.seeds - 1


@dataclass(frozen=True)
class Frozen:
    """A task that is run on a frozen encoder's vectors; its result is the mean of its restarts.

    Attributes:
        settings: of the run with the first seed.
    """

    name: str
    settings: FeatureConfig
    seeds: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class NotRun:
    """A task that cannot be run, and why."""

    name: str
    reason: str


MEASURED = "this run"
"""The row of the comparison that most benchmarks have alone."""


@dataclass(frozen=True)
class BenchmarkPlan:
    """A benchmark that is ready to run.

    Attributes:
        title: of the benchmark, with its section in the paper.
        experiments: in the order of the paper.
        columns: of the comparison with the paper.
        measured: its rows that are measured here, by name: for each column the task and the metric that it shows.
        averaged: the columns whose mean is a column "average"; empty for none.
        published: the paper's rows.
        notes: how to read the comparison.
        seeds: runs of a setting in the paper; none where it does not say how many.
    """

    title: str
    experiments: tuple[Experiment | Frozen | NotRun, ...]
    columns: tuple[str, ...]
    measured: Mapping[str, Mapping[str, tuple[str, str]]]
    published: tuple[Published, ...]
    averaged: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seeds: int | None = 1


@dataclass(frozen=True)
class Point:
    """A setting of the paper's grid; `length` in tokens is none for the task's usual one."""

    rate: float
    batch: int
    epochs: float
    length: int | None = None


def grid_of(
    request: Request,
    task: Trainable,
    points: Iterable[Point],
    train: Path | str,
    dev: Path | str,
    metric: str | None = None,
) -> tuple[FinetuneConfig, ...]:
    """The paper's settings for one run at each of these points; what overrides have made equal is one."""
    return tuple(
        dict.fromkeys(_settings(request, task, point, train, dev, metric) for point in points)
    )


def _settings(
    request: Request,
    task: Trainable,
    point: Point,
    train: Path | str,
    dev: Path | str,
    metric: str | None,
) -> FinetuneConfig:
    """Those of one point, scored once, at the end of the run, as google-research/bert does."""
    method = paper_finetuning(task)
    training = dataclasses.replace(
        method.training,
        until=Epochs(point.epochs),
        optimizer=BertAdam(lr=point.rate),
        evaluate=None,
    )
    method = dataclasses.replace(
        method, training=training, batch=ExampleBudget(point.batch), metric=metric
    )
    if point.length is not None:
        method = dataclasses.replace(method, length=point.length)
    base = FinetuneConfig(model=request.model, train=str(train), dev=str(dev), **vars(method))
    return configs.load(FinetuneConfig, base=base, overrides=request.overrides)
