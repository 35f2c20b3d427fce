"""Search for hyper-parameters: every cell of a grid, or trials that optuna proposes.

Each cell is a run in its own folder. The grid "paper" is that of Devlin et al. 2018, appendix A.3;
"glue" that of section 4.1.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from bothways.core.errors import ConfigError, optional
from bothways.finetuning.config import FinetuneConfig, load_config
from bothways.lab.sweeps.runs import (
    FinetuneRun,
    Series,
    SweepFolder,
    keep_best,
    run_all,
    write_sweep_report,
)
from bothways.training.parallel import plan_here

Grid = Mapping[str, tuple[str, ...]]
"""Dotted path of a setting → its values, as texts."""

LONGEST = 200
"""Maximum number of bytes of a folder's name before the hash; file systems allow 255."""

GRIDS: dict[str, Grid] = {
    "paper": {
        "batch.n": ("16", "32"),
        "training.optimizer.lr": ("5e-5", "3e-5", "2e-5"),
        "training.until": ("2 epochs", "3 epochs", "4 epochs"),
    },
    "glue": {
        "batch.n": ("32",),
        "training.optimizer.lr": ("5e-5", "4e-5", "3e-5", "2e-5"),
        "training.until": ("3 epochs",),
    },
}


def parse_grid(text: str) -> Grid:
    """Return the grid of a name, or of "key=value,value key=value".

    Values with spaces are quoted: `training.until="2 epochs,3 epochs"`.

    Raises:
        ConfigError: a part is not a key with values.
    """
    if text in GRIDS:
        return GRIDS[text]
    grid = {}
    try:
        parts = shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            f"{text!r} has an unclosed quote", where="grid", fix="Close it."
        ) from error
    for part in parts:
        key, equals, values = part.partition("=")
        items = tuple(value.strip() for value in values.split(",") if value.strip())
        if len(set(items)) != len(items):
            raise ConfigError(
                f"{part!r} has a value twice", where="grid", fix="Name each value once."
            )
        if not key or not equals or not items or key in grid:
            fix = (
                'Write key=value,value …, such as "training.optimizer.lr=2e-5,3e-5 batch.n=16,32".'
            )
            raise ConfigError(
                f"{part!r} is not a key with values; named grids are {', '.join(GRIDS)}",
                where="grid",
                fix=fix,
            )
        grid[key] = items
    if not grid:
        raise ConfigError(
            "is empty", where="grid", fix=f"Name one of {', '.join(GRIDS)}, or write one."
        )
    return grid


def grid_cells(base: FinetuneConfig, grid: Grid) -> Iterator[tuple[str, FinetuneConfig]]:
    """Yield every combination with the name of its folder.

    Raises:
        ConfigError: a setting is unknown or not allowed.
    """
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        yield folder_name(chosen), _with(base, chosen)


def folder_name(chosen: Mapping[str, str]) -> str:
    """Return the folder name of a cell; a long one ends in a hash.

    "batch.n" 16, "training.optimizer.lr" 5e-5 → "batch.n=16,training.optimizer.lr=5e-5"
    """
    name = ",".join(
        f"{key}={re.sub(r'[^-+.0-9A-Za-z_]+', '-', value)}" for key, value in chosen.items()
    )
    if len(name.encode()) <= LONGEST:
        return name
    beginning = name.encode()[:LONGEST].decode(errors="ignore")
    return f"{beginning}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def _with(base: FinetuneConfig, chosen: Mapping[str, str]) -> FinetuneConfig:
    return load_config(base, [f"{key}={value}" for key, value in chosen.items()])


def search_grid(base: FinetuneConfig, grid: Grid, place: SweepFolder) -> Series:
    """Run every cell; `model` is the best one's, `search.json` lists all results.

    Raises the errors of `runs.run_all`.
    """
    series = run_all([FinetuneRun(*cell) for cell in grid_cells(base, grid)], place)
    if series.finished:
        _conclude(series, place)
    return series


def search_trials(base: FinetuneConfig, space: str, trials: int, place: SweepFolder) -> Series:
    """Run trials, each proposed by optuna's tree-structured Parzen estimator from earlier ones.

    The proposals follow from the seed and the earlier results, so a resumed search needs no other
    record than the runs: it proposes the same settings again, and their runs are finished.

    Args:
        space: "key=low..high", "key=low..high:log" for a range, "key=value,value" for a choice,
            separated by spaces.
        trials: number of trials.

    Raises:
        ConfigError: the space cannot be read, the data has changed since a finished trial, or
            there are several processes, of which only one knows the results.
        ResourceError: optuna is not installed.
    """
    if plan_here().world > 1:
        fix = "Start it without torchrun, or give a --grid."
        raise ConfigError(
            "trials are proposed by one process, and there are several", where="trials", fix=fix
        )
    parts = parse_grid(space)
    study = _study(base.seed)
    series = Series()
    for number in range(trials):
        trial = study.ask()
        chosen = {key: _propose(trial, key, values) for key, values in parts.items()}
        run = FinetuneRun(f"trial-{number}", _with(base, chosen))
        series = run_all([run], place, series, trials)
        if not series.finished:
            return series
        outcome = series.runs[-1]
        if outcome.metrics:
            study.tell(trial, outcome.order)
        else:
            study.tell(trial, state=_failed())
    _conclude(series, place)
    return series


def _conclude(series: Series, place: SweepFolder) -> None:
    """Keep the best model, and write `search.json`."""
    keep_best(series, place)
    best = series.best
    write_sweep_report(
        place.out / "search.json",
        {"best": best.name, "metric": best.metric} if best else {},
        series.runs,
    )


_RANGE = re.compile(r"([^.]+(?:\.\d+)?(?:e[-+]?\d+)?)\.\.([^:]+)(:log)?")


def _propose(trial: Any, key: str, values: tuple[str, ...]) -> str:
    form = _RANGE.fullmatch(values[0]) if len(values) == 1 else None
    if form is None:
        return str(trial.suggest_categorical(key, list(values)))
    try:
        low, high = float(form[1]), float(form[2])
        if all(re.fullmatch(r"-?\d+", end) for end in form.group(1, 2)):
            return str(trial.suggest_int(key, int(low), int(high), log=form[3] is not None))
        return repr(float(trial.suggest_float(key, low, high, log=form[3] is not None)))
    except ValueError as error:
        fix = "Write low..high with low below high (above 0 for :log), such as 1e-5..1e-4:log."
        raise ConfigError(f"{values[0]!r} is not a range", where=f"space.{key}", fix=fix) from error


def _study(seed: int) -> Any:
    with optional("search", "proposing trials"):
        import optuna
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))


def _failed() -> Any:
    from optuna.trial import TrialState

    return TrialState.FAIL
