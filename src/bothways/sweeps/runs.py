"""Several fine-tuning runs beside each other: one folder each, the best one's model copied, all of it resumable.

A series is of seeds (`recipes.seeds`) or of settings (`recipes.search`). A run that is finished is not run again; one that
diverges counts as failed, and the series goes on.
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
    """What one run of a series came to.

    Attributes:
        name: of its folder.
        metrics: of the dev data; empty for a run that diverged.
        failed: why it is to be thought of as failed; empty if nothing says so.
        metric, direction: by which it is compared.
    """

    name: str
    metrics: Metrics
    failed: tuple[str, ...] = ()
    metric: str = ""
    direction: Direction = "highest"


@dataclass(frozen=True)
class Series:
    """Runs in their order.

    Attributes:
        runs: those that came to their end.
        finished: whether all did; if not, the last one was interrupted.
    """

    runs: tuple[SweepOutcome, ...]
    finished: bool = True

    @property
    def scored(self) -> tuple[SweepOutcome, ...]:
        """The runs that have metrics."""
        return tuple(run for run in self.runs if run.metrics)

    @property
    def best(self) -> SweepOutcome | None:
        """The run with the best metric, of equals the first; none if none has any."""
        return min(self.scored, key=_order, default=None)


@dataclass(frozen=True)
class SweepFolder:
    """Where and how the runs of a series run.

    Attributes:
        out: the folder of all of them.
        resume: go on with what is there; without, none of the runs may be there.
        console: where warnings go; none for nowhere.
    """

    out: Path
    resume: bool = False
    device: str = "auto"
    console: Console | None = None


def _order(run: SweepOutcome) -> float:
    value = run.metrics[run.metric]
    return value if run.direction == "lowest" else -value


def run_all(runs: Iterable[tuple[str, FinetuneConfig]], place: SweepFolder) -> Series:
    """Run settings one after another, each in the folder of its name, and copy the best one's model to `model`.

    Raises:
        ConfigError: there is no dev data, or a run was finished with other settings, on other data or from another model.
        ResourceError: `out` is the folder of a single run.
        BothwaysError: what `finetune` raises, but for a loss that is not finite.
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
    """Run one of a series, unless it is finished; none if it was interrupted."""
    if settings.dev is None:
        raise ConfigError(
            "several runs are compared by dev data, and there is none",
            where="dev",
            fix="Give --dev.",
        )
    if (place.out / MARK).exists():
        fix = "Choose another folder."
        raise ResourceError(
            "is the folder of a single run, where several are to have theirs",
            where=place.out,
            fix=fix,
        )
    folder = place.out / name
    found = _finished(name, settings, place) if place.resume else None
    if found is not None:
        return found
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
    if not done.progress.finished(settings.training.until):
        return None
    metric, failure = settings.chosen_by, done.failure
    direction = done.task.task.directions(done.task.labels)[metric]
    return SweepOutcome(name, done.metrics, failure.failed if failure else (), metric, direction)


def _finished(name: str, settings: FinetuneConfig, place: SweepFolder) -> SweepOutcome | None:
    """What the record of a run says, if it is finished; ConfigError if settings, data or model were other ones."""
    folder = place.out / name
    if not (folder / "model" / RECORD).exists():
        return None
    said = read_object(folder / "model" / RECORD, FolderError)
    if without_places(said.get("settings", {})) != without_places(configs.to_dict(settings)):
        fix = "Give the settings that it was run with, or choose another folder."
        raise ConfigError("this run was finished with other settings", where=folder, fix=fix)
    then, now = _origin(said), fingerprints(settings) | {"model": digest_of_model(settings.model)}
    if changed := [name for name in now if then.get(name) != now[name]]:
        what = f"this run was finished with another content of {' and '.join(changed)} than there is now"
        fix = "Delete its folder to run it again, or choose another folder for these runs."
        raise ConfigError(what, where=folder, fix=fix)
    return SweepOutcome(name, said["metrics"], tuple(said["failure"]), **said["chosen_by"])


def check_data(runs: Many[SweepOutcome], place: SweepFolder) -> None:
    """Raises ConfigError: not all of these runs had the same data, or models that have one name are not the same."""
    seen: dict[str, tuple[str, str]] = {}
    for run in runs if is_main(plan_here()) else ():
        record = place.out / run.name / "model" / RECORD
        if not record.exists():  # one that has diverged has none
            continue
        said = read_object(record, FolderError)
        for what, found in _origin(said).items():
            name = said["base"]["name"] if what == "model" else what  # a search may be over models
            first, by = seen.setdefault(name, (found, run.name))
            if first != found:
                fix = "Delete the folders of the runs on the former, or choose another."
                raise ConfigError(
                    f"{by} and {run.name} had another content of {name}", where=place.out, fix=fix
                )


def _origin(said: Mapping[str, Any]) -> dict[str, str]:
    """The sha256 of the data and of the model that a run began with, by its record."""
    data = {name: source["sha256"] for name, source in said["data"].items()}
    return data | {"model": said.get("base", {}).get("sha256", "")}


def keep_best(series: Series, place: SweepFolder) -> None:
    """Copy the best run's model to the folder `model` of the series; of several, its card says so."""
    best = series.best
    if best is None or not is_main(plan_here()):
        return
    with replace_folder(place.out / "model") as hidden:
        for file in (place.out / best.name / "model").iterdir():
            shutil.copy2(file, hidden / file.name)
        if len(series.scored) > 1:
            card, values = hidden / "README.md", [run.metrics[best.metric] for run in series.scored]
            limit = (
                f"It was selected as the best of {len(values)} runs by dev {best.metric}, whose mean "
                f"over them is {statistics.fmean(values):.4g}: expect that."
            )
            text = with_first_limit(card.read_text(encoding="utf8"), limit)
            card.write_text(text, encoding="utf8")


def write_sweep_report(file: Path, summary: Mapping[str, Any], runs: Many[SweepOutcome]) -> None:
    """A summary and the runs, as JSON."""
    if is_main(plan_here()):
        values = {**summary, "runs": [dataclasses.asdict(run) for run in runs]}
        file.parent.mkdir(
            parents=True, exist_ok=True
        )  # all runs may have diverged before they wrote anything
        replace_file(
            file,
            lambda hidden: hidden.write_text(json.dumps(values, indent=1) + "\n", encoding="utf8"),
        )
