"""Several runs on one page: their curves, the settings in which they differ, their speed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

from bothways._version import __version__
from bothways.core.config.toml import read_toml
from bothways.core.config.tree import flatten
from bothways.core.errors import CheckpointError, ConfigError
from bothways.core.report import sections as s
from bothways.core.report.html import write_html
from bothways.core.terminal import quantity
from bothways.pretraining.run_page import Records, metric_line, read_records

NOT_SET = "–"
"""What is shown for a setting that a run does not have."""


def compare_runs(folders: Many[Path], file: Path) -> None:
    """Write a page that compares runs by their records and settings.

    Args:
        folders: of pre-training or fine-tuning runs, finished or not; two at least.

    Raises:
        CheckpointError: a folder has no records, or they cannot be read.
        ConfigError: there are fewer than two runs.
        ResourceError: the page cannot be written.
    """
    if len(folders) < 2:
        raise ConfigError(f"two runs or more can be compared, not {len(folders)}", where="runs")
    names = _names(folders)
    records = {name: _records(folder) for name, folder in zip(names, folders, strict=True)}
    settings = {
        name: flatten(read_toml(folder / "config.toml"))
        if (folder / "config.toml").exists()
        else {}
        for name, folder in zip(names, folders, strict=True)
    }
    report = s.Report(
        "Runs: " + ", ".join(names),
        quantity(len(names), "run(s)"),
        "Curves over the tokens read.",
        (
            s.TableSection("Speed", _SPEED, [_speed(name, records[name]) for name in names]),
            s.TableSection("Settings that differ", ["setting", *names], differences(settings)),
            *_curves(records),
        ),
        f"bothways {__version__}",
    )
    write_html(report, file)


def differences(settings: Mapping[str, Mapping[str, Any]]) -> list[list[Any]]:
    """Return a row for each setting that is not the same in all runs: its name and the values."""
    keys = dict.fromkeys(key for each in settings.values() for key in each)
    rows = ([key, *(str(each.get(key, NOT_SET)) for each in settings.values())] for key in keys)
    return [row for row in rows if len({*row[1:]}) > 1]


_SPEED = ["run", "steps", "million tokens", "hours", "tokens a second, median"]


def _speed(name: str, records: Records) -> list[Any]:
    last = records[-1]
    rates = [record["tokens_per_second"] for record in records if "tokens_per_second" in record]
    median = f"{statistics.median(rates):,.0f}" if rates else NOT_SET
    return [name, f"{last['step']:,}", f"{last['tokens'] / 1e6:,.3f}",
            f"{last['seconds'] / 3600:,.3f}", median]  # fmt: skip


def _curves(records: Mapping[str, Records]) -> list[s.Curves]:
    """Return a chart for each metric that two runs or more have: held-out ones first."""
    found = {
        key: None
        for kept in records.values()
        for record in kept
        for key in record
        if key.startswith(("held-out/", "dev/", "loss/", "learning_rate", "tokens_per_second"))
    }
    charts = []
    for key in sorted(found, key=lambda key: not key.startswith(("held-out/", "dev/"))):
        lines = [metric_line(name, kept, key) for name, kept in records.items()]
        lines = [line for line in lines if line.x]
        if len(lines) > 1:
            charts.append(s.Curves(key, "million tokens read", "", lines))
    return charts


def _records(folder: Path) -> list[dict[str, Any]]:
    file = folder / "metrics.jsonl"
    found = read_records(file) if file.is_file() else []
    if not found:
        raise CheckpointError("has no metrics.jsonl with records of a run", where=folder)
    return found


def _names(folders: Many[Path]) -> list[str]:
    """Return the names of the folders; where two are equal, as much of their paths as differs."""
    parts = [folder.absolute().parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len({*names}) == len(names):
            return names
    raise ConfigError("a run is named twice", where="runs")
