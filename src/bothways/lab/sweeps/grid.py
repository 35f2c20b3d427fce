"""Sweeps over hyper-parameters: every cell of a grid.

Each cell is a run in its own folder. The grid "paper" is that of Devlin et al. 2018, appendix A.3.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import shlex
from collections.abc import Iterator, Mapping

from bothways.core.errors import ConfigError
from bothways.finetuning.config import FinetuneConfig, load_config
from bothways.lab.sweeps import runs

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
}


def parse_grid(text: str) -> Grid:
    """Parse the name of a grid, or "key=value,value key=value".

    Values with spaces are quoted: `training.until="2 epochs,3 epochs"`.

    Raises:
        ConfigError: a part is not a key with values.
    """
    if text in GRIDS:
        return GRIDS[text]
    form = 'Write key=value,value …, such as "training.optimizer.lr=2e-5,3e-5 batch.n=16,32".'

    def mistake(message: str, fix: str = form) -> ConfigError:
        """Return the error."""
        return ConfigError(message, where="grid", fix=fix)

    grid: dict[str, tuple[str, ...]] = {}
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise mistake(f"{text!r} has an unclosed quote", "Close it.") from error
    for word in words:
        key, equals, values = word.partition("=")
        items = tuple(value.strip() for value in values.split(",") if value.strip())
        if len(set(items)) != len(items):
            raise mistake(f"{word!r} has a value twice", "Name each value once.")
        if not key or not equals or not items or key in grid:
            names = ", ".join(GRIDS)
            raise mistake(f"{word!r} is not a key with values; named grids are {names}")
        grid[key] = items
    if not grid:
        raise mistake("is empty", f"Name one of {', '.join(GRIDS)}, or write one.")
    return grid


def grid_cells(base: FinetuneConfig, grid: Grid) -> Iterator[tuple[str, FinetuneConfig]]:
    """Yield every combination with the name of its folder.

    Raises:
        ConfigError: a setting is unknown or not allowed.
    """
    for values in itertools.product(*grid.values()):
        cell = dict(zip(grid, values, strict=True))
        yield (
            folder_name(cell),
            load_config(base, [f"{key}={value}" for key, value in cell.items()]),
        )


def folder_name(cell: Mapping[str, str]) -> str:
    """Return the folder name of a cell; a long one ends in a hash.

    "batch.n" 16, "training.optimizer.lr" 5e-5 → "batch.n=16,training.optimizer.lr=5e-5"
    """
    name = ",".join(
        f"{key}={re.sub(r'[^-+.0-9A-Za-z_]+', '-', value)}" for key, value in cell.items()
    )
    if len(name.encode()) <= LONGEST:
        return name
    beginning = name.encode()[:LONGEST].decode(errors="ignore")
    return f"{beginning}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def sweep_grid(base: FinetuneConfig, grid: Grid, folder: runs.SweepFolder) -> runs.Series:
    """Run every cell; `model` is the best one's, `sweep.json` lists all results.

    Raises the errors of `runs.run_all`.
    """
    series = runs.run_all([runs.FinetuneRun(*cell) for cell in grid_cells(base, grid)], folder)
    runs.keep_best(series, folder.out)
    summary = {"best": series.best.name, "metric": series.best.metric} if series.best else {}
    runs.write_sweep_report(folder.out / "sweep.json", summary, series)
    return series
