"""A series of runs: one folder each, resumable, compared by a metric of the dev data.

The runs differ in seeds, settings (every cell of a grid) or experiments (`paper.experiment`). A
finished run has a `result.json` and is not repeated; a run that diverges counts as failed, and the
series continues.

For the large model on small sets the paper takes the best of several restarts on the dev data
(Devlin et al. 2018, section 4.1). That number hides the spread: Dodge et al. 2020, Mosbach et al.
2020.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import shlex
import shutil
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence as Many
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote_plus

import numpy as np

from bothways.core.config import reader as configs
from bothways.core.config.values import is_integer
from bothways.core.errors import ConfigError, DivergedError, FolderError, ResourceError, argument
from bothways.core.files import make_folder, read_object, replace_folder, replace_text
from bothways.core.progress import SILENT, Part, Progress
from bothways.finetuning.config import FinetuneConfig, load_config
from bothways.finetuning.data import Rows, fingerprints
from bothways.finetuning.run import FinetuneResult, finetune
from bothways.finetuning.splits import parse_part
from bothways.hub.hf_config import RECORD
from bothways.hub.model_card import with_first_limit
from bothways.hub.provenance import digest_of_model, without_places
from bothways.prediction.engine import evaluate_task
from bothways.tasks.base import Direction, Metrics
from bothways.training.checkpoint import MARK, Best, checkpoints
from bothways.training.parallel import is_main, plan_here
from bothways.training.run import OnEvent

RESULT = "result.json"
"""The file that marks the folder of a finished run."""


@dataclass(frozen=True)
class SweepOutcome:
    """The outcome of one run of a series.

    Attributes:
        name: name of its folder.
        metrics: metrics on the dev data; empty for a run that diverged.
        failed: signs that the run has failed.
        metric, direction: metric that compares runs, and its better direction.
        steps, seconds: length of the run; 0 if it diverged.
        digests: the sha256 of its data by name, and of its model under "model".
    """

    name: str
    metrics: Metrics
    failed: tuple[str, ...] = ()
    metric: str = ""
    direction: Direction = "highest"
    steps: int = 0
    seconds: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)

    @property
    def order(self) -> tuple[bool, float]:
        """The sort key of the run by the metric that compares runs, the best first."""
        return Best(self.metric, self.direction).rank(self.metrics[self.metric])


@dataclass(frozen=True)
class Series:
    """Runs in order.

    Attributes:
        runs: the finished ones.
    """

    runs: tuple[SweepOutcome, ...] = ()

    @property
    def scored(self) -> tuple[SweepOutcome, ...]:
        """The runs that have metrics."""
        return tuple(run for run in self.runs if run.metrics)

    @property
    def best(self) -> SweepOutcome | None:
        """The run with the best metric, the first of equals; None if no run has metrics."""
        return min(self.scored, key=lambda run: run.order, default=None)


@dataclass(frozen=True)
class SweepFolder:
    """The folder of a series and the options of its runs.

    Attributes:
        out: the folder of the series.
        resume: continue earlier runs; otherwise the folders of the runs must not exist.
        progress: receives the stages and messages of each run under its number and name.
        title: precedes the numbers of the runs, such as "CoLA, ".
        keep: "all": every run keeps its model and its checkpoints. "best": finished runs keep no
            checkpoints, and only the best one keeps its model.
        reported: notes and warnings that were shown.
    """

    out: Path
    resume: bool = False
    device: str = "auto"
    progress: Progress = SILENT
    title: str = ""
    keep: Literal["all", "best"] = "all"
    reported: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Run:
    """One run of a series.

    Attributes:
        name: name of its folder.
        settings: a configuration: a frozen dataclass.
    """

    name: str
    settings: Any

    def digests(self) -> dict[str, str]:
        """Return the sha256 of the data by name, and of the model under "model"."""
        raise NotImplementedError

    def start(self, folder: Path, sweep: SweepFolder, progress: Progress) -> SweepOutcome:
        """Make the run or resume it.

        Raises:
            DivergedError: a loss or a gradient is not finite.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class FinetuneRun(Run):
    """A fine-tuning run.

    Attributes:
        others: further data that the best weights are scored on; the name is the prefix of the
            metrics.
        rows: training data to read instead of the source in the settings.
        on_event: called after each step, report, evaluation and checkpoint.
    """

    settings: FinetuneConfig
    others: Mapping[str, str] = field(default_factory=dict)
    rows: Rows | None = None
    on_event: OnEvent = field(default=lambda event: None, repr=False)

    def __post_init__(self) -> None:
        if self.settings.dev is None:
            message = "several runs are compared by dev data, and there is none"
            fix = f"Give {argument(dev='FILE')}, or a share such as {argument(dev='20%')}."
            raise ConfigError(message, where="dev", fix=fix)

    def digests(self) -> dict[str, str]:
        """Return the sha256 of the data and of the model."""
        settings = self.settings
        sources = {"train": settings.train, **self.others}
        if settings.dev_part is None:
            sources["dev"] = str(settings.dev)
        model = {"model": digest_of_model(settings.model)}
        return fingerprints(settings.task, sources) | model

    def start(self, folder: Path, sweep: SweepFolder, progress: Progress) -> SweepOutcome:
        """Fine-tune; a failed run is reported."""
        done = finetune(
            self.settings, folder, train=self.rows, resume=sweep.resume, device=sweep.device,
            progress=progress, on_event=self.on_event,
        )  # fmt: skip
        if done.failure is not None:
            progress.message(str(done.failure))
        metric, task_model, at = done.settings.chosen_by, done.task_model, done.progress
        direction = done.settings.directions(task_model.task, task_model.labels)[metric]
        failed = done.failure.failed if done.failure else ()
        metrics = self.finish(done, folder)
        return SweepOutcome(self.name, metrics, failed, metric, direction, at.steps, at.seconds)

    def finish(self, done: FinetuneResult, folder: Path) -> Metrics:
        """Return the metrics of a finished run, those on further data included."""
        metrics = dict(done.metrics)
        for name, source in self.others.items() if metrics else ():  # on the main rank
            examples = done.task_model.task.read(source).examples
            scores = evaluate_task(done.task_model, examples)
            metrics |= {f"{name}/{metric}": value for metric, value in scores.items()}
        return metrics


def run_all(
    runs: Iterable[Run], folder: SweepFolder, previous: Series = Series(), expected: int = 0
) -> Series:
    """Make runs one after another in named folders; return those of `previous` and these.

    Args:
        expected: number of runs of the whole series; 0 if these are the last ones.

    Raises:
        ConfigError: a run was finished with other settings, on other data or from another model.
        ResourceError: `folder.out` is the folder of a single run.
        BothwaysError: the errors of `Run.start`, except for a loss that is not finite.
    """
    if (folder.out / MARK).exists():
        message = "is the folder of a single run, not of several"
        raise ResourceError(message, where=folder.out, fix="Choose another folder.")
    planned, done = list(runs), list(previous.runs)
    for run in planned if folder.resume else ():
        read_finished(run, folder)  # before any other is trained
    expected = max(expected, len(done) + len(planned))
    for run in planned:
        title = f"{folder.title}run {len(done) + 1} of {expected}, {run.name}"
        done.append(_run(run, folder, title))
        _check_digests(done, folder)
        if folder.keep == "best" and is_main(plan_here()):
            best = Series(tuple(done)).best
            for finished in done:
                for checkpoint in checkpoints(folder.out / finished.name):
                    shutil.rmtree(checkpoint)
                if best is not None and finished.name != best.name:
                    shutil.rmtree(folder.out / finished.name / "model", ignore_errors=True)
    return Series(tuple(done))


def _run(run: Run, sweep_folder: SweepFolder, title: str) -> SweepOutcome:
    """Make a run, unless it is finished."""
    progress = sweep_folder.progress if is_main(plan_here()) else SILENT
    run_progress, folder = Part(progress, title, sweep_folder.reported), sweep_folder.out / run.name
    outcome = read_finished(run, sweep_folder) if sweep_folder.resume else None
    if outcome is not None:
        run_progress.message("done before")
        return outcome
    digests = run.digests()
    try:
        result = run.start(folder, sweep_folder, run_progress)
    except DivergedError as error:
        result = SweepOutcome(run.name, {}, (" ".join(str(error).split()),))
        run_progress.message(result.failed[0])
    settings = json.loads(json.dumps(configs.to_dict(run.settings)))
    outcome = dataclasses.replace(result, settings=settings, digests=digests)
    _write_json(folder / RESULT, dataclasses.asdict(outcome))
    return outcome


def read_finished(run: Run, sweep_folder: SweepFolder) -> SweepOutcome | None:
    """Return the recorded outcome of a run, or None if the run is not finished.

    Raises:
        ConfigError: settings, data or model have changed.
    """
    folder = sweep_folder.out / run.name
    if not (folder / RESULT).exists():
        return None
    values = read_object(folder / RESULT, FolderError)
    try:
        outcome = SweepOutcome(**{**values, "failed": tuple(values["failed"])})
    except (KeyError, TypeError) as error:
        fix = "Delete its folder to run it again."
        raise FolderError("is not the result of a run", where=folder / RESULT, fix=fix) from error
    if _decisive(outcome.settings) != _decisive(configs.to_dict(run.settings)):
        fix = "Give the settings that it was run with, or choose another folder."
        raise ConfigError("this run was finished with other settings", where=folder, fix=fix)
    digests = run.digests()
    if changed := [name for name in digests if outcome.digests.get(name) != digests[name]]:
        message = f"this run was finished with other content of {' and '.join(changed)}"
        fix = "Delete its folder to run it again, or choose another folder for these runs."
        raise ConfigError(message, where=folder, fix=fix)
    lost = outcome.metrics and not (folder / "model" / RECORD).exists()
    return None if lost and sweep_folder.keep == "all" else outcome


def _decisive(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run without paths; dev data that is split from others has none."""
    fraction = parse_part(settings.get("dev"))
    return without_places(settings) | ({} if fraction is None else {"dev": str(fraction)})


def _check_digests(runs: Many[SweepOutcome], folder: SweepFolder) -> None:
    """Raise ConfigError if the data of these runs, or models of one name, differ."""
    digests: dict[str, tuple[str, str]] = {}
    for run in runs:
        for data_name, sha256 in run.digests.items():
            # A search may be over models.
            name = str(run.settings["model"]) if data_name == "model" else data_name
            expected, by = digests.setdefault(name, (sha256, run.name))
            if expected != sha256:
                fix = "Delete the folders of the earlier runs, or choose another folder."
                problem = f"{by} and {run.name} had different content of {name}"
                raise ConfigError(problem, where=folder.out, fix=fix)


def keep_best(series: Series, out: Path) -> None:
    """Copy the best run's model to the folder `model`; of several runs, its card says so."""
    best = series.best
    if best is None or not is_main(plan_here()):
        return
    with replace_folder(out / "model") as hidden:
        shutil.copytree(out / best.name / "model", hidden, dirs_exist_ok=True)
        if len(series.scored) > 1:
            card, values = hidden / "README.md", [run.metrics[best.metric] for run in series.scored]
            limit = f"It was selected as the best of {len(values)} runs by dev {best.metric}, "
            limit += f"whose mean over them is {statistics.fmean(values):.4g}: expect that."
            text = with_first_limit(card.read_text(encoding="utf8"), limit)
            card.write_text(text, encoding="utf8")


def write_sweep_report(file: Path, summary: Mapping[str, Any], series: Series) -> None:
    """Write a summary and the runs of a series as JSON."""
    _write_json(file, {**summary, "runs": [dataclasses.asdict(run) for run in series.runs]})


def _write_json(file: Path, values: Mapping[str, Any]) -> None:
    """Write values as JSON, on the main rank."""
    if is_main(plan_here()):
        make_folder(file.parent)  # a run may have diverged before it wrote anything
        replace_text(file, json.dumps(values, indent=1) + "\n")


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write rows as JSON lines; return the path."""
    make_folder(path.parent)
    replace_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


MOST_RUNS = 10_000
"""Maximum number of runs of a series."""


@dataclass(frozen=True)
class SeedSpread:
    """The metric over the seeds; runs that diverged are excluded.

    Attributes:
        metric: name of the metric that chooses the best run.
        mean, median, best: values of the metric.
        deviation: the standard deviation, with n − 1; None for a single run.
        failed: number of runs that failed or diverged; those that failed without diverging count
            in the metric.
    """

    metric: str
    mean: float
    median: float
    best: float
    deviation: float | None
    failed: int


def parse_seeds(text: str, start: int = 0) -> tuple[int, ...]:
    """Return the seeds that a text names: "5" → five from `start` on; "3,14,15" → these; "7," → 7.

    Raises:
        ConfigError: the text has another form, a number of seeds below 1, or a seed twice.
    """
    numbers = [number.strip() for number in text.split(",")]
    if len(numbers) == 1 and is_integer(numbers[0]) and int(numbers[0]):
        if int(numbers[0]) > MOST_RUNS:
            message = f"{text.strip()!r} is more than {MOST_RUNS:,} runs"
            fix = "Write a smaller number, or one seed with a comma, such as 12345,."
            raise ConfigError(message, where="seeds", fix=fix)
        return tuple(range(start, start + int(numbers[0])))
    if len(numbers) > 1 and not numbers[-1]:
        numbers.pop()
    seeds = tuple(int(number) for number in numbers if is_integer(number))
    if "," not in text or len(seeds) != len(numbers) or len(set(seeds)) != len(seeds):
        fix = "Write a number of seeds, such as 5, or the seeds, such as 3,14,15."
        raise ConfigError(f"{text!r} does not name seeds", where="seeds", fix=fix)
    return seeds


def finetune_seeds(settings: FinetuneConfig, seeds: Many[int], folder: SweepFolder) -> Series:
    """Fine-tune once per seed, in `seed-N`.

    `model` is the best run's, `seeds.json` lists all results. A seed is the head's and, unless
    `order_seed` is set, of the order of the data and dropout. Raises the errors of `run_all`.
    """
    planned = [
        FinetuneRun(f"seed-{seed}", dataclasses.replace(settings, seed=seed)) for seed in seeds
    ]
    series = run_all(planned, folder)
    keep_best(series, folder.out)
    spread = seed_spread(series)
    summary = {} if spread is None else dataclasses.asdict(spread)
    write_sweep_report(folder.out / "seeds.json", summary, series)
    return series


def seed_spread(series: Series) -> SeedSpread | None:
    """Return the spread of the metric over the runs; None if all diverged."""
    best = series.best
    if best is None:
        return None
    values = [run.metrics[best.metric] for run in series.scored]
    return SeedSpread(
        best.metric,
        statistics.fmean(values),
        statistics.median(values),
        best.metrics[best.metric],
        float(np.std(values, ddof=1)) if len(values) > 1 else None,
        sum(bool(run.failed) for run in series.runs),
    )


Grid = Mapping[str, tuple[str, ...]]
"""Dotted path of a setting → its values, as texts."""

LONGEST = 200
"""Maximum number of bytes of a folder's name before the hash; file systems allow 255."""

GRIDS: dict[str, Grid] = {  # Devlin et al. 2018, appendix A.3
    "paper": {
        "batch.n": ("16", "32"),
        "training.optimizer.lr": ("5e-5", "3e-5", "2e-5"),
        "training.until": ("2 epochs", "3 epochs", "4 epochs"),
    },
}


def parse_grid(text: str) -> Grid:
    """Parse the name of a grid, or "key=value,value key=value".

    Values with spaces are quoted: `training.until="2 epochs,3 epochs"`.

    Raises:
        ConfigError: a part is not a key with values.
    """
    if text in GRIDS:
        return GRIDS[text]
    fix = 'Write key=value,value …, such as "training.optimizer.lr=2e-5,3e-5 batch.n=16,32".'
    grid, names = dict[str, tuple[str, ...]](), ", ".join(GRIDS)
    try:
        words = shlex.split(text)
    except ValueError as error:
        message = f"{text!r} has an unclosed quote"
        raise ConfigError(message, where="grid", fix="Close it.") from error
    for word in words:
        key, _, values = word.partition("=")
        items = tuple(value.strip() for value in values.split(",") if value.strip())
        if len({*items}) != len(items):
            message = f"{word!r} has a value twice"
            raise ConfigError(message, where="grid", fix="Name each value once.")
        if not key or not items or key in grid:
            message = f"{word!r} is not a key with values; named grids are {names}"
            raise ConfigError(message, where="grid", fix=fix)
        grid[key] = items
    if not grid:
        raise ConfigError("is empty", where="grid", fix=f"Name one of {names}, or write one.")
    return grid


def grid_cells(base: FinetuneConfig, grid: Grid) -> Iterator[tuple[str, FinetuneConfig]]:
    """Yield every combination with the name of its folder.

    Raises:
        ConfigError: a setting is unknown or not allowed.
    """
    for values in itertools.product(*grid.values()):
        cell = dict(zip(grid, values, strict=True))
        overrides = [f"{key}={value}" for key, value in cell.items()]
        yield folder_name(cell), load_config(base, overrides)


def folder_name(cell: Mapping[str, str]) -> str:
    """Return the folder name of a cell; a long one ends in a hash.

    "batch.n" 16, "training.optimizer.lr" 5e-5 → "batch.n=16,training.optimizer.lr=5e-5"
    """
    # Values that differ have names that differ: one run would overwrite the other.
    escaped = {key: quote_plus(value, errors="surrogatepass") for key, value in cell.items()}
    name = ",".join(f"{key}={value}" for key, value in escaped.items())
    if len(name.encode()) <= LONGEST:
        return name
    beginning = name.encode()[:LONGEST].decode(errors="ignore")
    return f"{beginning}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def sweep_grid(base: FinetuneConfig, grid: Grid, folder: SweepFolder) -> Series:
    """Run every cell; `model` is the best one's, `sweep.json` lists all results.

    Raises the errors of `run_all`.
    """
    series = run_all([FinetuneRun(*cell) for cell in grid_cells(base, grid)], folder)
    keep_best(series, folder.out)
    summary = {"best": series.best.name, "metric": series.best.metric} if series.best else {}
    write_sweep_report(folder.out / "sweep.json", summary, series)
    return series
