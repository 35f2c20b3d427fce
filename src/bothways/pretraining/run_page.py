"""The page of a pre-training run: its curves, its held-out metrics next to baselines, its settings.

The curves come from the run's `metrics.jsonl`; `quickstart` shows the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence as Many
from pathlib import Path
from typing import Any

import torch

from bothways.core.errors import CheckpointError
from bothways.core.files import parse_object, read_utf8
from bothways.core.report import sections as s
from bothways.core.report.html import write_html
from bothways.core.terminal import write_stderr
from bothways.pretraining.config import PretrainConfig
from bothways.training.schedules import RunState

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
    text = read_utf8(file, CheckpointError, "Correct or delete the last lines.")
    *lines, tail = text.split("\n")
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
    lead: s.Report | None = None,
) -> None:
    """Write the page of a finished run next to its `metrics.jsonl`.

    Args:
        lead: the title, the headline and the first sections of another kind of run.

    Raises:
        CheckpointError: the records cannot be read.
        ResourceError: the page cannot be written.
    """
    records = read_records(file.with_name("metrics.jsonl"))
    held_out: list[list[Any]] = []
    for key, value in metrics.items():
        if key.startswith("held-out/"):
            name = key.removeprefix("held-out/")
            # The baseline of this metric, if it has one: unigrams or the majority.
            constant = [f"{k}/{name}" for k in BASELINES if f"{k}/{name}" in metrics]
            held_out.append([name, value, metrics[constant[0]] if constant else None])
    headline = ", ".join(
        f"{name} {s.readable_number(value)}"
        for name, value, _ in held_out
        if isinstance(value, float) and name in {"loss/masked", "perplexity"}
    )
    charts = [*curves(records, metrics)]
    for name in (name for name in metrics if name.startswith("probe/")):
        target = name.removeprefix("probe/accuracy/")
        baselines = {BASELINES["majority"]: metrics[f"majority/probe/{target}"]}
        lines, title = [metric_line(target, records, name)], f"Probe: {target}"
        charts.append(s.Curves(title, "million tokens read", "share", lines, baselines, True))
    for name, title, unit in (
        ("learning_rate", "Learning rate", "peak of all groups"),
        ("gradient_norm", "Gradient norm", "before clipping"),
    ):
        line = metric_line(title.lower(), records, name)
        if line.x:
            charts.append(s.Curves(title, "million tokens read", unit, [line]))
    lead = lead or s.Report("Pre-training", headline, "", ())
    report = s.Report(
        f"{lead.title}: {file.parent.name}",
        lead.headline or f"{progress.steps:,} steps",
        f"{progress.steps:,} steps, {progress.tokens:,} tokens, {progress.epochs:.3g} epochs, "
        f"{progress.seconds / 60:,.1f} minutes.",
        (
            *lead.sections,
            *charts,
            s.TableSection("Held-out documents", ["metric", "value", "baseline"], held_out),
            s.Details("Settings", (s.settings_table(settings),)),
        ),
        s.colophon(device),
    )
    write_html(report, file)


def metric_line(title: str, records: Records, name: str) -> s.Line:
    """Return the values of a metric, neighbours averaged so that at most `POINTS` remain."""
    points = [(record["tokens"] / 1e6, record[name]) for record in records if name in record]
    size = max(1, math.ceil(len(points) / POINTS))
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    xs, ys = ([sum(p[axis] for p in group) / len(group) for group in groups] for axis in (0, 1))
    return s.Line(title, xs, ys)
