"""The runs of an experiment: a series in its own folder.

Only the best fine-tuning run of an experiment keeps its weights, and finished runs keep no
checkpoints. The feature-based rows of table 7 (section 5.3) train several BiLSTMs on the vectors
of one frozen encoder, which are computed once for all restarts.
"""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass
from pathlib import Path

from bothways.core.errors import ResourceError
from bothways.core.progress import SILENT, Progress
from bothways.finetuning.config import FinetuneConfig
from bothways.finetuning.data import fingerprints
from bothways.hub.provenance import digest_of_model
from bothways.lab.features.data import FeatureConfig
from bothways.lab.features.run import fit_features, prepare_features
from bothways.lab.paper.experiment import Experiment
from bothways.lab.sweeps.runs import FinetuneRun, Run, Series, SweepFolder, SweepOutcome, run_all


@dataclass(frozen=True)
class CellOutcome:
    """The result of an experiment.

    Attributes:
        folder: folder of its runs.
        series: every run.
        counted: those that its metrics are the mean of: the best one, or all restarts of the best
            setting that did not diverge.
    """

    experiment: Experiment
    folder: Path
    series: Series
    counted: tuple[SweepOutcome, ...]

    @property
    def best(self) -> Path | None:
        """The folder of the best run, which has kept its model if it was fine-tuned.

        None if all runs diverged.
        """
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
class FeatureRun:
    """A BiLSTM on the vectors of a frozen encoder.

    Attributes:
        features: the folder of the vectors.
    """

    name: str
    settings: FeatureConfig
    features: Path

    def digests(self) -> dict[str, str]:
        """Return the sha256 of the data and of the model."""
        settings = self.settings
        sources = {"train": settings.train, "dev": settings.dev}
        model = {"model": digest_of_model(settings.model)}
        return fingerprints(settings.task, sources) | model

    def start(
        self, folder: Path, *, resume: bool, device: str, progress: Progress
    ) -> SweepOutcome | None:
        """Compute the vectors, unless they are there, and train; nothing is resumed."""
        settings = self.settings
        data = prepare_features(
            settings, self.features, [settings.layers], device=device, progress=progress
        )
        done = fit_features(data, settings, device=device, progress=progress)
        at = done.progress
        return SweepOutcome(
            self.name, dict(done.metrics), (), "f1", "highest", at.steps, at.seconds
        )


def place_of(
    experiment: Experiment, out: Path, device: str = "auto", progress: Progress = SILENT
) -> SweepFolder:
    """Return the folder of the runs of an experiment."""
    folder = out / "runs" / experiment.name
    return SweepFolder(folder, True, device, progress, f"{experiment.name}, ", "best")


def first_runs(experiment: Experiment, out: Path) -> list[Run]:
    """Return the runs that are known before any is made."""
    count = experiment.seeds if experiment.restarts == "best" else 1
    return [
        _restart(experiment, settings, seed, out)
        for settings in experiment.grid
        for seed in range(count)
    ]


def restarts(experiment: Experiment, series: Series, out: Path) -> list[Run]:
    """Return the restarts of the best of the first runs, with further seeds."""
    best = series.best
    if experiment.restarts == "best" or best is None:
        return []
    setting = experiment.grid[series.runs.index(best)]
    return [_restart(experiment, setting, seed, out) for seed in range(1, experiment.seeds)]


def _restart(
    experiment: Experiment, settings: FinetuneConfig | FeatureConfig, seed: int, out: Path
) -> Run:
    """Return a run, whose name has the settings in which the runs of an experiment differ."""
    settings = dataclasses.replace(settings, seed=settings.seed + seed)
    if isinstance(settings, FeatureConfig):  # all restarts read the same vectors
        features = place_of(experiment, out).out / "features"
        return FeatureRun(f"seed{settings.seed}", settings, features)
    rate = getattr(settings.training.optimizer, "lr", 0.0)
    until = str(settings.training.until).replace(" ", "-")
    name = f"lr{rate:g}-batch{settings.batch.n}-{until}-seed{settings.seed}"
    return FinetuneRun(name, settings, experiment.others)


def run(
    experiment: Experiment, out: Path, *, device: str, progress: Progress = SILENT
) -> CellOutcome:
    """Make the runs that are not finished.

    Raises:
        KeyboardInterrupt: a run was interrupted, and has saved.
        ConfigError: a run was finished with other settings, on other data or from another model.
        ResourceError: the best run has lost its weights.
    """
    folder = place_of(experiment, out, device, progress)
    grid_runs = run_all(first_runs(experiment, out), folder, expected=experiment.cells)
    seeds = restarts(experiment, grid_runs, out) if grid_runs.finished else []
    series = run_all(seeds, folder, grid_runs) if seeds else grid_runs
    if not series.finished:
        raise KeyboardInterrupt
    counted = tuple(filter(None, [series.best]))
    if experiment.restarts == "mean":
        restarted = series.runs[len(grid_runs.runs) :]
        counted = tuple(run for run in (grid_runs.best, *restarted) if run and run.metrics)
    outcome = CellOutcome(experiment, folder.out, series, counted)
    best, fine_tuned = outcome.best, isinstance(experiment.settings, FinetuneConfig)
    if best and fine_tuned and not (best / "model").exists():
        message = "is the best run now, but its weights were deleted when another run was better"
        raise ResourceError(message, where=best, fix="Delete this folder to run it again.")
    return outcome
