"""The page of a pre-training run: its curves, its held-out metrics next to baselines, its settings.

The curves come from the run's `metrics.jsonl`; `quickstart` shows the same.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import torch

from bothways._version import __version__
from bothways.core.config.toml import read_toml
from bothways.core.config.tree import flatten
from bothways.core.errors import CheckpointError, ConfigError
from bothways.core.json_reader import parse_object
from bothways.core.report import sections as s
from bothways.core.report.html import write_html
from bothways.core.terminal import quantity, write_stderr
from bothways.pretraining.config import PretrainConfig
from bothways.training.state import RunState

POINTS = 200
"""Maximum number of points of a curve."""
BASELINES = {"unigram": "unigram baseline", "majority": "majority baseline"}
"""Prefixes of the metrics of constant answers, and their names in a chart."""
_UNITS = {"loss": "nats", "accuracy": "share"}

Records = Many[Mapping[str, Any]]
"""The lines of a run's `metrics.jsonl`."""


def read_records(file: Path) -> list[dict[str, Any]]:
    """Return the records of a run, without a last one that was cut by a kill.

    Raises:
        CheckpointError: a line is not a record, or the file is not UTF-8.
    """
    try:
        *lines, tail = file.read_text(encoding="utf8").split("\n")
    except UnicodeDecodeError as error:
        fix = "Correct or delete the last lines."
        raise CheckpointError("is not UTF-8", where=file, fix=fix) from error
    records = [parse_object(line, file, CheckpointError) for line in lines]
    if tail:
        try:
            records.append(parse_object(tail, file, CheckpointError))
        except CheckpointError:
            write_stderr(f"note: {file}: skipped line {len(records) + 1}, which was cut")
    return records


def curves(records: Records, metrics: Mapping[str, float], note: str = "") -> Iterator[s.Curves]:
    """Yield the training and held-out loss and accuracy of each target over the tokens read.

    Args:
        metrics: of the end of the run, with baselines such as "unigram/loss/masked".
        note: for each chart.
    """
    names = dict.fromkeys(
        name for record in records for name in record if name.startswith(("loss/", "accuracy/"))
    )
    for name in names:
        kind, target = name.split("/", 1)
        lines = [
            metric_line("training", records, name),
            metric_line("held-out", records, f"held-out/{name}"),
        ]
        # Of several corpora, "held-out/CORPUS/loss/…".
        keys = dict.fromkeys(key for record in records for key in record)
        held_out = [key[9:] for key in keys if key.startswith("held-out/")]
        for corpus in (k.removesuffix(f"/{name}") for k in held_out if k.endswith(f"/{name}")):
            lines.append(metric_line(f"held-out, {corpus}", records, f"held-out/{corpus}/{name}"))
        baselines = {
            title: metrics[f"{prefix}/{name}"]
            for prefix, title in BASELINES.items()
            if f"{prefix}/{name}" in metrics
        }
        yield s.Curves(
            f"{kind.capitalize()}: {target}",
            "million tokens read",
            _UNITS[kind],
            [line for line in lines if line.x],
            baselines,
            kind == "accuracy",
            note,
        )


def write_run_page(
    file: Path,
    settings: PretrainConfig,
    metrics: Mapping[str, float],
    progress: RunState,
    device: torch.device,
) -> None:
    """Write the page of a finished run next to its `metrics.jsonl`.

    Raises:
        CheckpointError: the records cannot be read.
        ResourceError: the page cannot be written.
    """
    records = read_records(file.with_name("metrics.jsonl"))
    held_out: list[list[Any]] = []
    for key, value in metrics.items():
        if key.startswith("held-out/"):
            name = key.removeprefix("held-out/")
            constant = [f"{k}/{name}" for k in BASELINES if f"{k}/{name}" in metrics]
            held_out.append([name, value, metrics[constant[0]] if constant else None])
    headline = ", ".join(
        f"{name} {s.readable_number(value)}"
        for name, value, _ in held_out
        if isinstance(value, float) and name in {"loss/masked", "perplexity"}
    )
    report = s.Report(
        f"Pre-training: {file.parent.name}",
        headline or f"{progress.steps:,} steps",
        f"{progress.steps:,} steps, {progress.tokens:,} tokens, {progress.epochs:.3g} epochs, "
        f"{progress.seconds / 60:,.1f} minutes.",
        (
            *curves(records, metrics),
            *_course(records),
            s.TableSection("Held-out documents", ["metric", "value", "baseline"], held_out),
            s.Details("Settings", (s.settings_table(settings),)),
        ),
        s.colophon(device),
    )
    write_html(report, file)


def _course(records: Records) -> Iterator[s.Curves]:
    """Yield the learning rate and the gradient norm over the tokens read."""
    for name, title, unit in (
        ("learning_rate", "Learning rate", "peak of all groups"),
        ("gradient_norm", "Gradient norm", "before clipping"),
    ):
        line = metric_line(title.lower(), records, name)
        if line.x:
            yield s.Curves(title, "million tokens read", unit, [line])


def metric_line(title: str, records: Records, name: str) -> s.Line:
    """Return the values of a metric, neighbours averaged so that at most `POINTS` remain."""
    points = [(record["tokens"] / 1e6, record[name]) for record in records if name in record]
    size = max(1, math.ceil(len(points) / POINTS))
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    xs, ys = ([sum(p[axis] for p in group) / len(group) for group in groups] for axis in (0, 1))
    return s.Line(title, xs, ys)


NOT_SET = "–"
"""What is shown for a setting that a run does not have."""


def write_comparison(folders: Many[Path], file: Path) -> None:
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
    keys = dict.fromkeys(key for table in settings.values() for key in table)
    rows = ([key, *(str(table.get(key, NOT_SET)) for table in settings.values())] for key in keys)
    return [row for row in rows if len({*row[1:]}) > 1]


_SPEED = ["run", "steps", "million tokens", "hours", "tokens a second, median"]


def _speed(name: str, records: Records) -> list[Any]:
    newest = records[-1]
    rates = [record["tokens_per_second"] for record in records if "tokens_per_second" in record]
    median = f"{statistics.median(rates):,.0f}" if rates else NOT_SET
    return [name, f"{newest['step']:,}", f"{newest['tokens'] / 1e6:,.3f}",
            f"{newest['seconds'] / 3600:,.3f}", median]  # fmt: skip


def _curves(records: Mapping[str, Records]) -> list[s.Curves]:
    """Return a chart for each metric that two runs or more have: held-out ones first."""
    keys = {
        key: None
        for run_records in records.values()
        for record in run_records
        for key in record
        if key.startswith(("held-out/", "dev/", "loss/", "learning_rate", "tokens_per_second"))
    }
    charts = []
    for key in sorted(keys, key=lambda key: not key.startswith(("held-out/", "dev/"))):
        lines = [metric_line(name, run_records, key) for name, run_records in records.items()]
        lines = [line for line in lines if line.x]
        if len(lines) > 1:
            charts.append(s.Curves(key, "million tokens read", "", lines))
    return charts


def _records(folder: Path) -> list[dict[str, Any]]:
    file = folder / "metrics.jsonl"
    records = read_records(file) if file.is_file() else []
    if not records:
        raise CheckpointError("has no metrics.jsonl with records of a run", where=folder)
    return records


def _names(folders: Many[Path]) -> list[str]:
    """Return the names of the folders; where two are equal, as much of their paths as differs."""
    paths = [folder.absolute().parts for folder in folders]
    for count in range(1, max(map(len, paths)) + 1):
        names = ["/".join(path[-count:]) for path in paths]
        if len({*names}) == len(names):
            return names
    raise ConfigError("a run is named twice", where="runs")
