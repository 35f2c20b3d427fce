"""Experiments of the paper: a request, a benchmark with its tasks and grids, and their runs.

Only the best fine-tuning run of an experiment keeps its weights, and finished runs keep no
checkpoints. The feature-based rows of table 7 (section 5.3) train several BiLSTMs on the vectors
of one frozen encoder, which are computed once for all restarts.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from bothways.core.config import reader as configs
from bothways.core.config.values import require_at_least
from bothways.core.errors import ConfigError, ResourceError
from bothways.core.files import local_path
from bothways.core.progress import SILENT, Progress
from bothways.core.terminal import quantity
from bothways.data.text_io import COMPRESSED
from bothways.finetuning.config import FinetuneConfig, paper_finetuning
from bothways.finetuning.data import fingerprints
from bothways.hub.provenance import digest_of_model
from bothways.lab.features.run import FeatureConfig, fit_features, prepare_features
from bothways.lab.sweeps import runs
from bothways.tasks.catalogue import Trainable


@dataclass(frozen=True)
class Published:
    """A row of one of the paper's tables.

    Attributes:
        table: name of the table and the data set, such as "Table 1, test".
        values: values by column, without those that the paper omits.
    """

    system: str
    table: str
    values: Mapping[str, float]


_FILE = resources.files("bothways.lab.paper") / "published.json"
PUBLISHED: dict[str, tuple[Published, ...]] = {
    name: tuple(
        Published(
            system,
            table["table"],
            {
                column: value
                for column, value in zip(table["columns"], values, strict=True)
                if value is not None
            },
        )
        for table in entries
        for system, values in table["rows"].items()
    )
    for name, entries in json.loads(_FILE.read_text(encoding="utf8")).items()
}
"""The published rows by the name of the experiment: tables 1 to 8 of Devlin et al. 2018 (arXiv
1810.04805v2), and of its successors those on pre-training. In the file, null is a value that the
paper omits. All values but perplexities are percentages, as in the papers. Table 5 gives accuracy
for MRPC, which is not one of the columns of GLUE."""


@dataclass(frozen=True)
class Request:
    """What the user asks for.

    Attributes:
        model: a model folder, the folder of a pre-training run, or a Hub id.
        data: folder of the benchmark as distributed, or its data set on the Hub.
        out: folder for runs and results.
        tasks: names of the tasks to run; empty for all.
        seeds: runs per setting; None for the paper's number.
        grid: the paper's grid, or one setting of it.
        limit: maximum number of training examples, the first ones; None for all.
        overrides: settings by dotted path that override the paper's.
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

    def chosen(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the requested tasks of a benchmark, in the order of `names`.

        Raises:
            ConfigError: a requested task is not among them.
        """
        require_names("tasks", self.tasks, names)
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
        if self.grid == "none":
            result.append("one setting instead of the grid")
        return tuple(result)


def require_names(option: str, names: Iterable[str], choices: Collection[str]) -> None:
    """Raise ConfigError if one of the names of an option is not among the choices."""
    for name in names:
        if name not in choices:
            message = f"unknown name {name!r}; there are: {', '.join(choices)}"
            raise ConfigError(message, where=option)


def find_file(data: str, *names: str) -> str | None:
    """Return the first existing file of these names, plain or compressed, in the data folder."""
    folder = local_path(data)
    files = (folder / f"{name}{suffix}" for name in names for suffix in ("", *COMPRESSED))
    return next((str(file) for file in files if file.is_file()), None)


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
    """A task that cannot be run."""

    name: str
    reason: str


MEASURED = "this run"


@dataclass(frozen=True)
class BenchmarkPlan:
    """A benchmark that is ready to run.

    Attributes:
        title: the benchmark with its section in the paper.
        experiments: the tasks in the order of the paper.
        measured: the measured rows by name: the task and metric of each column.
        averaged: the columns whose mean is the column "average"; empty for none.
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


def grid_settings(
    request: Request,
    task: Trainable,
    grid: runs.Grid,
    train: Path | str,
    dev: Path | str,
    metric: str | None = None,
) -> tuple[FinetuneConfig, ...]:
    """Return the settings of each run of a grid; cells that the overrides make equal are merged.

    A run is scored once, at its end, as in google-research/bert.
    """
    method = paper_finetuning(task)
    base = dataclasses.replace(
        method,
        training=dataclasses.replace(method.training, evaluate=None),
        metric=metric,
        model=request.model,
        train=str(train),
        dev=str(dev),
    )
    cells = (
        configs.load(FinetuneConfig, base=settings, overrides=request.overrides)
        for _, settings in runs.grid_cells(base, grid)
    )
    return tuple(dict.fromkeys(cells))


@dataclass(frozen=True)
class CellOutcome:
    """The result of an experiment.

    Attributes:
        counted: those that its metrics are the mean of: the best one, or all restarts of the best
            setting that did not diverge.
    """

    experiment: Experiment
    folder: Path
    series: runs.Series
    counted: tuple[runs.SweepOutcome, ...]

    @property
    def best(self) -> Path | None:
        """The folder of the best run, with its model if it was fine-tuned; None if all diverged."""
        best = self.series.best
        return None if best is None else self.folder / best.name

    @property
    def metrics(self) -> dict[str, float]:
        """Means over the runs that count; empty if all diverged."""
        names = self.counted[0].metrics if self.counted else ()
        return {
            name: statistics.fmean(result.metrics[name] for result in self.counted)
            for name in names
        }


@dataclass(frozen=True)
class FeatureRun(runs.Run):
    """A BiLSTM on the vectors of a frozen encoder.

    Attributes:
        features: the folder of the vectors.
    """

    settings: FeatureConfig
    features: Path

    def digests(self) -> dict[str, str]:
        """Return the sha256 of the data and of the model."""
        settings = self.settings
        sources = {"train": settings.train, "dev": settings.dev}
        model = {"model": digest_of_model(settings.model)}
        return fingerprints(settings.task, sources) | model

    def start(self, folder: Path, sweep: runs.SweepFolder, progress: Progress) -> runs.SweepOutcome:
        """Compute the vectors, unless they are there, and train; nothing is resumed."""
        choices = [self.settings.layers]
        options: Any = {"device": sweep.device, "progress": progress}
        data = prepare_features(self.settings, self.features, choices, **options)
        done = fit_features(data, self.settings, **options)
        metrics, at = dict(done.metrics), done.progress
        return runs.SweepOutcome(self.name, metrics, (), "f1", "highest", at.steps, at.seconds)


def first_runs(experiment: Experiment, folder: Path) -> list[runs.Run]:
    """Return the runs that are known before any is made."""
    seeds = range(experiment.seeds if experiment.restarts == "best" else 1)
    grid = experiment.grid
    return [_restart(experiment, settings, n, folder) for settings in grid for n in seeds]


def _restart(
    experiment: Experiment, settings: FinetuneConfig | FeatureConfig, seed: int, folder: Path
) -> runs.Run:
    """Return a run, whose name has the settings in which the runs of an experiment differ."""
    settings = dataclasses.replace(settings, seed=settings.seed + seed)
    if isinstance(settings, FeatureConfig):  # all restarts read the same vectors
        return FeatureRun(f"seed{settings.seed}", settings, folder / "features")
    rate = getattr(settings.training.optimizer, "lr", 0.0)
    until = str(settings.training.until).replace(" ", "-")
    name = f"lr{rate:g}-batch{settings.batch.n}-{until}-seed{settings.seed}"
    return runs.FinetuneRun(name, settings, experiment.others)


def run(
    experiment: Experiment, out: Path, *, device: str, progress: Progress = SILENT
) -> CellOutcome:
    """Make the runs that are not finished.

    Raises:
        KeyboardInterrupt: a run was interrupted, and has saved.
        ConfigError: a run was finished with other settings, on other data or from another model.
        ResourceError: the best run has lost its weights.
    """
    out = out / "runs" / experiment.name
    folder = runs.SweepFolder(out, True, device, progress, f"{experiment.name}, ", "best")
    series = runs.run_all(first_runs(experiment, out), folder, expected=experiment.cells)
    best, counted = series.best, [series.best]
    if best and experiment.restarts == "mean":
        setting, next_index = experiment.grid[series.runs.index(best)], len(series.runs)
        restarts = [_restart(experiment, setting, seed, out) for seed in range(1, experiment.seeds)]
        series = runs.run_all(restarts, folder, series)
        counted += series.runs[next_index:]
    scored = tuple(run for run in counted if run and run.metrics)
    outcome = CellOutcome(experiment, out, series, scored)
    best_folder, fine_tuned = outcome.best, isinstance(experiment.settings, FinetuneConfig)
    if best_folder and fine_tuned and not (best_folder / "model").exists():
        message = "is the best run now, but its weights were deleted when another run was better"
        raise ResourceError(message, where=best_folder, fix="Delete this folder to run it again.")
    return outcome
