"""A series of fine-tuning runs: one folder each, the best one's model copied, all of it resumable.

The runs differ in seeds (`sweeps.seeds`) or settings (`sweeps.grid`). A finished run is not
repeated; a run that diverges counts as failed, and the series continues.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import statistics
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bothways.core.atomic_files import replace_file, replace_folder
from bothways.core.config import reader as configs
from bothways.core.config.tree import flatten
from bothways.core.errors import ConfigError, DivergedError, FolderError, ResourceError
from bothways.core.json_reader import read_object
from bothways.core.terminal import say
from bothways.finetuning.prepare import FinetuneConfig, fingerprints
from bothways.finetuning.run import finetune
from bothways.hub.hf_config import RECORD
from bothways.hub.model_card import with_first_limit
from bothways.hub.provenance import digest_of_model, without_places
from bothways.tasks.base import Direction, Metrics
from bothways.training.parallel import is_main, plan_here
from bothways.training.run_folder import MARK


@dataclass(frozen=True)
class SweepOutcome:
    """The outcome of one run of a series.

    Attributes:
        name: of its folder.
        metrics: of the dev data; empty for a run that diverged.
        failed: why the run probably failed; empty if there is no sign of failure.
        metric, direction: by which runs are compared.
    """

    name: str
    metrics: Metrics
    failed: tuple[str, ...] = ()
    metric: str = ""
    direction: Direction = "highest"


@dataclass(frozen=True)
class Series:
    """Runs in order.

    Attributes:
        runs: the finished ones.
        finished: False if the last run was interrupted.
    """

    runs: tuple[SweepOutcome, ...]
    finished: bool = True

    @property
    def scored(self) -> tuple[SweepOutcome, ...]:
        """The runs that have metrics."""
        return tuple(run for run in self.runs if run.metrics)

    @property
    def best(self) -> SweepOutcome | None:
        """The run with the best metric, the first of equals; None if no run has metrics."""
        return min(self.scored, key=_order, default=None)


@dataclass(frozen=True)
class SweepFolder:
    """The folder of a series and the options of its runs.

    Attributes:
        out: the folder of the series.
        resume: continue earlier runs; otherwise the folders of the runs must not exist.
        console: receives warnings; None for no output.
    """

    out: Path
    resume: bool = False
    device: str = "auto"
    console: Console | None = None


def _order(run: SweepOutcome) -> float:
    value = run.metrics[run.metric]
    return value if run.direction == "lowest" else -value


def run_all(runs: Iterable[tuple[str, FinetuneConfig]], place: SweepFolder) -> Series:
    """Run settings one after another in named folders, and copy the best model to `model`.

    Raises:
        ConfigError: there is no dev data, or a run was finished with other settings, on other data
            or from another model.
        ResourceError: `out` is the folder of a single run.
        BothwaysError: the errors of `finetune`, except for a loss that is not finite.
    """
    done: list[SweepOutcome] = []
    named = list(runs)
    for name, settings in named if place.resume else ():
        _finished(name, settings, place)  # before any other is trained
    for name, settings in named:
        outcome = run_one(name, settings, place)
        if outcome is None:
            return Series(tuple(done), finished=False)
        done.append(outcome)
        check_data(done, place)
    series = Series(tuple(done))
    keep_best(series, place)
    return series


def run_one(name: str, settings: FinetuneConfig, place: SweepFolder) -> SweepOutcome | None:
    """Run one of a series, unless it is finished; return None if it was interrupted."""
    if settings.dev is None:
        raise ConfigError(
            "several runs are compared by dev data, and there is none",
            where="dev",
            fix="Give --dev.",
        )
    if (place.out / MARK).exists():
        fix = "Choose another folder."
        raise ResourceError(
            "is the folder of a single run, not of several",
            where=place.out,
            fix=fix,
        )
    folder = place.out / name
    outcome = _finished(name, settings, place) if place.resume else None
    if outcome is not None:
        return outcome
    if place.console is not None and is_main(plan_here()):
        say(place.console, f"{name}:")
    try:
        done = finetune(
            settings,
            folder,
            resume=place.resume,
            device=place.device,
            console=place.console,
            several=True,
        )
    except DivergedError as error:
        return SweepOutcome(name, {}, (" ".join(str(error).split()),))
    if not done.finished:
        return None
    metric, failure = settings.chosen_by, done.failure
    direction = done.task.task.directions(done.task.labels)[metric]
    return SweepOutcome(name, done.metrics, failure.failed if failure else (), metric, direction)


def _finished(name: str, settings: FinetuneConfig, place: SweepFolder) -> SweepOutcome | None:
    """Return the recorded outcome of a run, or None if the run is not finished.

    Raises:
        ConfigError: settings, data or model have changed.
    """
    folder = place.out / name
    if not (folder / "model" / RECORD).exists():
        return None
    record = read_object(folder / "model" / RECORD, FolderError)
    given = flatten(without_places(configs.to_dict(settings)))
    recorded = flatten(without_places(record.get("settings", {})))
    # What a run chooses itself is recorded as it was chosen.
    free = {name for name, value in given.items() if value == "auto"}
    free |= {"length"} if settings.length is None else set()
    if {**given, **dict.fromkeys(free)} != {**recorded, **dict.fromkeys(free)}:
        fix = "Give the settings that it was run with, or choose another folder."
        raise ConfigError("this run was finished with other settings", where=folder, fix=fix)
    then, now = _origin(record), fingerprints(settings) | {"model": digest_of_model(settings.model)}
    if changed := [name for name in now if then.get(name) != now[name]]:
        what = f"this run was finished with other content of {' and '.join(changed)}"
        fix = "Delete its folder to run it again, or choose another folder for these runs."
        raise ConfigError(what, where=folder, fix=fix)
    return SweepOutcome(name, record["metrics"], tuple(record["failure"]), **record["chosen_by"])


def check_data(runs: Many[SweepOutcome], place: SweepFolder) -> None:
    """Raise ConfigError if the data of these runs, or models of one name, differ."""
    seen: dict[str, tuple[str, str]] = {}
    for run in runs if is_main(plan_here()) else ():
        file = place.out / run.name / "model" / RECORD
        if not file.exists():  # the run has diverged
            continue
        record = read_object(file, FolderError)
        for what, sha256 in _origin(record).items():
            name = (
                record["base"]["name"] if what == "model" else what
            )  # a search may be over models
            first, by = seen.setdefault(name, (sha256, run.name))
            if first != sha256:
                fix = "Delete the folders of the earlier runs, or choose another folder."
                raise ConfigError(
                    f"{by} and {run.name} had different content of {name}", where=place.out, fix=fix
                )


def _origin(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the sha256 of the data and of the model that a run started from, by its record."""
    data = {name: source["sha256"] for name, source in record["data"].items()}
    return data | {"model": record.get("base", {}).get("sha256", "")}


def keep_best(series: Series, place: SweepFolder) -> None:
    """Copy the best run's model to the folder `model`; of several runs, its card says so."""
    best = series.best
    if best is None or not is_main(plan_here()):
        return
    with replace_folder(place.out / "model") as hidden:
        for file in (place.out / best.name / "model").iterdir():
            shutil.copy2(file, hidden / file.name)
        if len(series.scored) > 1:
            card, values = hidden / "README.md", [run.metrics[best.metric] for run in series.scored]
            limit = (
                f"It was selected as the best of {len(values)} runs by dev {best.metric}, whose "
                f"mean over them is {statistics.fmean(values):.4g}: expect that."
            )
            text = with_first_limit(card.read_text(encoding="utf8"), limit)
            card.write_text(text, encoding="utf8")


def write_sweep_report(file: Path, summary: Mapping[str, Any], runs: Many[SweepOutcome]) -> None:
    """Write a summary and the runs as JSON."""
    if is_main(plan_here()):
        values = {**summary, "runs": [dataclasses.asdict(run) for run in runs]}
        # All runs may have diverged before they wrote anything.
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(
            file,
            lambda hidden: hidden.write_text(json.dumps(values, indent=1) + "\n", encoding="utf8"),
        )
