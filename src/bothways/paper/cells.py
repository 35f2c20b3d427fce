"""Experiments, cell by cell: each cell is a fine-tuning run in its own folder with its result.

A finished cell is read from its result, an interrupted one is resumed, and one that diverged
counts as failed. Only the best cell of an experiment keeps its weights, and finished cells keep no
checkpoints.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bothways.core.atomic_files import replace_file
from bothways.core.config import reader as configs
from bothways.core.errors import DivergedError, ResourceError
from bothways.core.terminal import say
from bothways.finetuning.prepare import FinetuneConfig
from bothways.finetuning.run import FinetuneResult, finetune
from bothways.hub.provenance import digest_of_file, digest_of_model, without_places
from bothways.paper.experiment import Experiment, Frozen
from bothways.prediction.engine import evaluate_task
from bothways.tasks.base import Task
from bothways.training.checkpoint import checkpoints

RESULT = "result.json"


@dataclass(frozen=True)
class CellResult:
    """The result of a cell.

    Attributes:
        folder: of the cell; `folder / "model"` is there for the best cell alone.
        settings: of the run, in plain values.
        data: the sha256 of its files, by name, and of the model that it began with under "model".
        metrics: metrics on dev data, and on other data under "name/metric"; empty if diverged.
        value: value of the selection metric, negated if lower is better; `None` if diverged.
        steps, seconds: of the run; 0 for one that diverged.
        failure: why the run is to be thought of as failed; empty if nothing says so.
    """

    folder: Path
    settings: Mapping[str, Any]
    data: Mapping[str, str]
    metrics: Mapping[str, float]
    value: float | None
    steps: int
    seconds: float
    failure: str


@dataclass(frozen=True)
class CellOutcome:
    """The result of an experiment.

    Attributes:
        results: of every cell that was run.
        counted: those that its metrics are the mean of: the best one, or all restarts of the best
            setting that did not diverge.
    """

    experiment: Experiment | Frozen
    results: tuple[CellResult, ...]
    counted: tuple[CellResult, ...]

    @property
    def best(self) -> CellResult | None:
        """The best cell, which has kept its weights if it was fine-tuned; none if all diverged."""
        return best_of(self.results)

    @property
    def metrics(self) -> dict[str, float]:
        """Means over the cells that count; empty if all diverged."""
        names = self.counted[0].metrics if self.counted else ()
        return {
            name: sum(result.metrics[name] for result in self.counted) / len(self.counted)
            for name in names
        }


def best_of(results: Iterable[CellResult]) -> CellResult | None:
    """Return the first of the best results; `None` if all runs diverged."""
    scored = ((result.value, result) for result in results if result.value is not None)
    return max(scored, key=lambda pair: pair[0], default=(None, None))[1]


def cell_folder(out: Path, experiment: Experiment, settings: FinetuneConfig) -> Path:
    """Return the folder of a cell, named by the settings in which cells differ."""
    rate = getattr(settings.training.optimizer, "lr", 0.0)
    batch, until = settings.batch.n, str(settings.training.until).replace(" ", "-")
    return out / "runs" / experiment.name / f"lr{rate:g}-batch{batch}-{until}-seed{settings.seed}"


def cells(experiment: Experiment) -> Iterator[FinetuneConfig]:
    """Return the settings of all cells that are known before any run."""
    for settings in experiment.grid:
        for seed in range(experiment.seeds if experiment.restarts == "best" else 1):
            yield dataclasses.replace(settings, seed=settings.seed + seed)


def cell_restarts(experiment: Experiment, results: Many[CellResult]) -> list[FinetuneConfig]:
    """Return the settings of restarts: the best setting with further seeds."""
    best = best_of(results)
    if experiment.restarts == "best" or best is None:
        return []
    chosen = experiment.grid[results.index(best)]
    return [
        dataclasses.replace(chosen, seed=chosen.seed + seed) for seed in range(1, experiment.seeds)
    ]


def run(experiment: Experiment, out: Path, *, device: str, console: Console) -> CellOutcome:
    """Run what is not yet run; errors as `recipes.finetune`.

    Raises:
        KeyboardInterrupt: a run was interrupted, and has saved.
        ResourceError: a cell's folder holds the result of other settings, other data or another
            model, or the best one has lost its weights.
    """
    results: list[CellResult] = []
    for settings in cells(experiment):
        results.append(_cell(experiment, settings, out, len(results), device, console))
        _keep_best(results)
    best = best_of(results)
    if best is None:
        return CellOutcome(experiment, tuple(results), ())
    counted = [best]
    for settings in cell_restarts(experiment, results):
        results.append(_cell(experiment, settings, out, len(results), device, console))
        counted += scored(results[-1:])
        best = _keep_best(results) or best
    if not (best.folder / "model").exists():
        what = "is the best run now, but its weights were deleted when another run was better"
        raise ResourceError(what, where=best.folder, fix="Delete this folder to run it again.")
    return CellOutcome(experiment, tuple(results), tuple(counted))


def scored(results: Iterable[CellResult]) -> list[CellResult]:
    """Return the results that did not diverge."""
    return [result for result in results if result.value is not None]


def _cell(
    experiment: Experiment,
    settings: FinetuneConfig,
    out: Path,
    number: int,
    device: str,
    console: Console,
) -> CellResult:
    folder = cell_folder(out, experiment, settings)
    found = is_cell_finished(experiment, settings, out)
    place = f"{experiment.name}, run {number + 1} of {experiment.cells}: {folder.name}"
    if found is not None:
        say(console, f"{place}: done before")
        return found
    say(console, place)
    try:
        said = None if number else console
        done = finetune(settings, folder, resume=True, device=device, console=said, several=True)
        if done.folder is None:
            raise KeyboardInterrupt
        result = _scored(done, experiment, settings, folder)
    except DivergedError as error:
        result = diverged(error, folder, *identity(settings, _sources(experiment, settings)))
    if result.failure and (
        number or result.value is None
    ):  # what the first run says of itself, it has said
        say(console, f"warning: {result.failure}")
    write_result(result)
    for checkpoint in checkpoints(folder):
        shutil.rmtree(checkpoint)
    return result


def _scored(
    done: FinetuneResult, experiment: Experiment, settings: FinetuneConfig, folder: Path
) -> CellResult:
    definition: Task[Any, Any] = done.task.task
    metrics = dict(done.metrics)
    for name, source in experiment.others.items():
        reading = definition.read(source)
        metrics |= {
            f"{name}/{metric}": value
            for metric, value in evaluate_task(done.task, reading.examples).items()
        }
    lowest = definition.directions(done.task.labels)[settings.chosen_by] == "lowest"
    value = done.metrics[settings.chosen_by] * (-1 if lowest else 1)
    plain, data = identity(settings, _sources(experiment, settings))
    failure = done.failure.message(several=True) if done.failure else ""
    return CellResult(
        folder, plain, data, metrics, value, done.progress.steps, done.progress.seconds, failure
    )


def diverged(
    error: DivergedError, folder: Path, settings: Mapping[str, Any], data: Mapping[str, str]
) -> CellResult:
    """Return the result of a run whose loss was not finite."""
    return CellResult(folder, settings, data, {}, None, 0, 0.0, " ".join(str(error).split()))


def is_cell_finished(
    experiment: Experiment, settings: FinetuneConfig, out: Path
) -> CellResult | None:
    """Return the result of a finished cell, or `None`.

    Raises:
        ResourceError: it belongs to other settings, other data or another model.
    """
    return read_result(
        cell_folder(out, experiment, settings), settings, _sources(experiment, settings)
    )


def write_result(result: CellResult) -> None:
    """Write a result into its folder, which marks the cell as finished."""
    result.folder.mkdir(parents=True, exist_ok=True)
    values = {name: value for name, value in vars(result).items() if name != "folder"}
    replace_file(
        result.folder / RESULT,
        lambda file: file.write_text(json.dumps(values, indent=1), encoding="utf8"),
    )


def read_result(folder: Path, settings: Any, sources: Mapping[str, str]) -> CellResult | None:
    """Return the result in a folder, or `None` if there is none.

    Raises:
        ResourceError: it belongs to other settings, other data or another model.
    """
    if not (folder / RESULT).is_file():
        return None
    result = CellResult(folder, **json.loads((folder / RESULT).read_text(encoding="utf8")))
    mine, data = identity(settings, sources)
    if (without_places(result.settings), result.data) != (without_places(mine), data):
        what = "holds the result of other settings, of other data or of another model"
        raise ResourceError(
            what, where=folder, fix="Choose another --out, or delete this folder to run it again."
        )
    return result


def _sources(experiment: Experiment, settings: FinetuneConfig) -> dict[str, str]:
    return {"train": settings.train, "dev": str(settings.dev), **experiment.others}


def identity(settings: Any, sources: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings as plain values, and the sha256 of the data files and of the model."""
    data = {name: digest_of_file(Path(source)) for name, source in sources.items()} | {
        "model": digest_of_model(settings.model)
    }
    return json.loads(json.dumps(configs.to_dict(settings))), data


def _keep_best(results: list[CellResult]) -> CellResult | None:
    """Delete the weights of all results but the best; return the best."""
    best = best_of(results)
    for result in results:
        if best is not None and result.folder != best.folder:
            shutil.rmtree(result.folder / "model", ignore_errors=True)
    return best
