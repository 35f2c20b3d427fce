"""Measured next to published figures: `results.json` and a report, of a benchmark or of a table.

In a table on pre-training, spread and significance are over the seeds of fine-tuning. A row is one
pre-training run: what another seed of pre-training would change is not in the intervals.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bothways
from bothways.core.files import make_folder, replace_text
from bothways.core.report import sections as s
from bothways.core.runtime.devices import choose_device
from bothways.core.terminal import quantity, time_text
from bothways.lab.paper.experiment import BenchmarkPlan, CellOutcome, NotRun, Request
from bothways.lab.paper.pretraining_runs import SCALES, RowOutcome, TableRequest, base_settings
from bothways.pretraining.run_page import BASELINES, POINTS, read_records

CONFIDENCE = 0.95


def measured(plan: BenchmarkPlan, outcomes: Many[CellOutcome]) -> dict[str, dict[str, float]]:
    """Return the measured rows of the comparison in percent, without values of unfinished tasks."""
    metrics = {outcome.experiment.name: outcome.metrics for outcome in outcomes}
    rows = {
        name: {
            column: 100 * metrics[task][metric]
            for column, (task, metric) in cells.items()
            if metric in metrics.get(task, {})
        }
        for name, cells in plan.measured.items()
    }
    return {name: row | average(row, plan.averaged) for name, row in rows.items()}


def average(row: dict[str, float], averaged: Many[str]) -> dict[str, float]:
    """Return {"average": mean of the averaged columns}, or {} if one of them is absent."""
    if not averaged or any(column not in row for column in averaged):
        return {}
    return {"average": statistics.fmean(row[column] for column in averaged)}


def write_results(file: Path, values: Mapping[str, Any]) -> Path:
    """Write results as JSON, with the version of this library."""
    make_folder(file.parent)
    content = {**values, "bothways": bothways.__version__}
    replace_text(file, json.dumps(content, indent=1, ensure_ascii=False))
    return file


def benchmark_results(
    request: Request, plan: BenchmarkPlan, outcomes: Many[CellOutcome]
) -> dict[str, Any]:
    """Return measured and published figures, every run, and tasks not run, as plain values."""
    tasks: dict[str, Any] = {
        entry.name: {
            "run": False,
            "reason": entry.reason if isinstance(entry, NotRun) else "not yet",
        }
        for entry in plan.experiments
    }
    for outcome in outcomes:
        tasks[outcome.experiment.name] = {
            "run": True,
            "metrics": outcome.metrics,
            "mean of": [str(outcome.folder / result.name) for result in outcome.counted],
            "best": None if outcome.best is None else str(outcome.best),
            "notes": list(outcome.experiment.notes),
            "cells": [
                dataclasses.asdict(result) | {"folder": str(outcome.folder / result.name)}
                for result in outcome.series.runs
            ],
        }
    return {
        "benchmark": plan.title,
        "model": request.model,
        "data": request.data,
        "departures": list(request.departures(plan.seeds)),
        "measured": measured(plan, outcomes),
        "published": [
            {"system": row.system, "table": row.table, **row.values} for row in plan.published
        ],
        "tasks": tasks,
    }


def benchmark_report(
    request: Request, plan: BenchmarkPlan, outcomes: Many[CellOutcome], *, device: str = "auto"
) -> s.Report:
    """Return the report."""
    lead = f"{request.model}, fine-tuned on {request.data}."
    if departures := request.departures(plan.seeds):
        lead += f" Differences from the paper's protocol: {'; '.join(departures)}."
    rows: dict[str, list[s.Cell]] = {
        entry.name: [
            entry.name, "not run", None, entry.reason if isinstance(entry, NotRun) else "not yet"
        ]
        for entry in plan.experiments
    }  # fmt: skip
    runs: list[list[s.Cell]] = []
    for outcome in outcomes:
        name, notes = outcome.experiment.name, "; ".join(outcome.experiment.notes)
        rows[name] = [name, "every run diverged", None, notes]
        if outcome.best is not None:
            count = f"mean of {len(outcome.counted)}: " if len(outcome.counted) > 1 else ""
            rows[name] = [name, _listed(outcome.metrics), count + outcome.best.name, notes]
        for run in outcome.series.runs:
            failed = " (failed)" if run.failed else ""
            result = (_listed(run.metrics) or "diverged") + failed
            runs.append([name, run.name, result, run.steps, round(run.seconds)])
    columns = ["task", "run", "result", "steps", "seconds"]
    return s.Report(
        "The paper's experiments, run again",
        f"{plan.title}: {len(outcomes)} of {len(plan.experiments)} tasks run.",
        lead,
        (
            _comparison(plan, outcomes),
            s.TableSection("Tasks", ["task", "result", "from", "remarks"], list(rows.values())),
            s.Details("Every run", (s.TableSection("Every run", columns, runs),)),
        ),
        s.colophon(choose_device(device)),
    )


def _comparison(plan: BenchmarkPlan, outcomes: Many[CellOutcome]) -> s.TableSection:
    columns = [*plan.columns, *(["average"] if plan.averaged else [])]
    here = {name: row for name, row in measured(plan, outcomes).items() if row}
    there = {f"{row.system} ({row.table})": row.values for row in plan.published}
    table: list[list[s.Cell]] = [["", *columns]]
    for name, row in [*here.items(), *there.items()]:
        table.append([name, *(round(row[x], 1) if x in row else None for x in columns)])
    if len(columns) > len(table) - 1:
        # More columns than rows: transpose, because a page has more height than width.
        table = [list(column) for column in zip(*table, strict=True)]
    head, *rows = table
    note = " ".join(plan.notes)
    return s.TableSection("Measured and published", [str(x or "") for x in head], rows, note=note)


def _listed(metrics: Mapping[str, float]) -> str:
    return ", ".join(
        f"{name} {value:.4g}" for name, value in metrics.items() if not name.endswith("loss")
    )


@dataclass(frozen=True)
class Difference:
    """The difference of a row from the first one, in points of a column.

    Attributes:
        low, high: the 95 % confidence interval (Welch's t), over the seeds of fine-tuning.
        p_value: p-value of the hypothesis of no difference.
    """

    points: float
    low: float
    high: float
    p_value: float

    def __str__(self) -> str:
        return f"{self.points:+.1f} ({self.low:+.1f} to {self.high:+.1f}), p {self.p_value:.2g}"


def difference(base: Many[float], other: Many[float]) -> Difference | None:
    """Return the difference of the means; None without two seeds on each side, or spread.

    Source: Welch 1947: variances may differ.
    """
    from scipy import stats

    # Equal values on both sides have no variance to test with.
    if min(len(base), len(other)) < 2 or (len({*base}) == 1 and len({*other}) == 1):
        return None
    test = stats.ttest_ind(other, base, equal_var=False)
    interval = test.confidence_interval(CONFIDENCE)
    points = statistics.fmean(other) - statistics.fmean(base)
    return Difference(points, float(interval.low), float(interval.high), float(test.pvalue))


def write_table_results(request: TableRequest, rows: Many[RowOutcome]) -> Path:
    """Write `results.json`: measured and published figures, and every run."""
    baseline = rows[0] if rows and rows[0].cell == request.plan.cells[0] else None
    entries = []
    for done in rows:
        columns, outcome = {}, done.pretrained
        for column in done.tasks:
            values, change = done.values(column), None
            if baseline not in (None, done):
                change = difference(baseline.values(column), values)
            columns[column] = {
                "seeds": list(values),
                "mean": statistics.fmean(values) if values else None,
                "difference": None if change is None else dataclasses.asdict(change),
            }
        entries.append(
            {
                "row": done.cell.title,
                "cell": done.cell.name,
                "steps": outcome.steps,
                "seconds": outcome.seconds,
                "held-out": _held_out(request, done),
                "metrics": dict(outcome.metrics),
                "columns": columns,
            }
        )
    results = {
        "table": request.table,
        "title": request.plan.title,
        "scale": request.scale,
        "budget of a pre-training run": str(base_settings(request).training.until),
        "text": list(request.text),
        "rows": entries,
        "published": [dataclasses.asdict(row) for row in request.plan.published],
    }
    return write_results(request.out / "results.json", results)


def table_report(request: TableRequest, rows: Many[RowOutcome], *, device: str) -> s.Report:
    """Return the report."""
    base = base_settings(request)
    seeds = request.seeds or SCALES[request.scale].seeds
    limit = request.limit or SCALES[request.scale].limit
    count = "all" if limit is None else f"at most {limit:,}"
    lead = (
        f"{len(rows)} of {len(request.plan.cells)} pre-training runs, {base.training.until} each, "
        f"on {', '.join(request.text)}; fine-tuned with {quantity(seeds, 'seed(s)')} on {count} "
        "examples."
    )
    sources = dict.fromkeys(row.table for row in request.plan.published)
    small = "Models, text and budget are smaller than those of the published figures: compare the "
    remarks = [
        *([f"{small}order of the rows, not the values."] if request.scale == "small" else []),
        *request.plan.notes,
        *(f"{cell.title}: {cell.note}." for cell in request.chosen if cell.note),
        "Intervals are over the seeds of fine-tuning. Each row is one pre-training run: another "
        "seed of pre-training moved the GLUE average of an ELECTRA-small by 0.57 points (the "
        "standard deviation of 14 runs, in the README of electra_pytorch).",
        *([f"Published figures: {'; '.join(sources)}."] if sources else []),
    ]
    return s.Report(
        "A table on pre-training, run again",
        f"{request.plan.title}: {len(rows)} of {len(request.plan.cells)} rows.",
        lead,
        (
            *_table_comparison(request, rows),
            *_held_out_curves(request, rows),
            _pretraining_runs(request, rows),
            s.Prose("How to read it", remarks),
        ),
        s.colophon(choose_device(device)),
    )


def _held_out(request: TableRequest, done: RowOutcome) -> dict[str, float]:
    """Return the columns of held-out text: accuracies and F1 in percent, others as they are."""
    metrics = done.pretrained.metrics
    return {
        title: metrics[name] * (1.0 if name.endswith("perplexity") else 100.0)
        for title, name in request.plan.held_out
        if name in metrics
    }


def _table_comparison(request: TableRequest, rows: Many[RowOutcome]) -> Iterator[s.TableSection]:
    """Yield measured next to published columns, the other published, and the differences."""
    published = {row.system: row.values for row in request.plan.published}
    done = {outcome.cell.title: outcome for outcome in rows}
    measured = dict.fromkeys(
        [
            *(title for outcome in rows for title in _held_out(request, outcome)),
            *(column for outcome in rows for column in outcome.tasks),
        ]
    )
    columns = dict.fromkeys(column for values in published.values() for column in values)
    names = dict.fromkeys([*(cell.title for cell in request.plan.cells), *published])
    head, lines = [""], {name: list[s.Cell]([name]) for name in names}
    for column in measured:
        head += [column, "published"] if column in columns else [column]
        for name, line in lines.items():
            line.append(_cell_text(request, done[name], column) if name in done else None)
            if column in columns:
                line.append(published.get(name, {}).get(column))
    note = "Measured: mean ± standard deviation over the seeds of fine-tuning, on dev."
    yield s.TableSection("Measured, and published", head, [*lines.values()], note=note)
    if unmeasured := [column for column in columns if column not in measured]:
        values = [[name, *map(row.get, unmeasured)] for name, row in published.items()]
        yield s.TableSection("Published, not measured", ["", *unmeasured], values)
    base = done.get(request.plan.cells[0].title)
    if base is None:
        return
    changes = [
        [done.cell.title, *(difference(base.values(x), done.values(x)) for x in base.tasks)]
        for done in rows
        if done is not base
    ]
    if any(any(line[1:]) for line in changes):
        note = "In points, with the 95 % interval and the p-value of Welch's t-test over seeds."
        texts: list[list[s.Cell]] = [[str(x) if x else None for x in line] for line in changes]
        title = f"Difference from {base.cell.title}"
        yield s.TableSection(title, ["", *base.tasks], texts, note=note)


def _cell_text(request: TableRequest, done: RowOutcome, column: str) -> s.Cell:
    """Return a measured value: "71.3 ± 0.4 (1 of 3 failed)"."""
    if not done.pretrained.metrics:
        return "diverged"
    if (held_out := _held_out(request, done).get(column)) is not None:
        return round(held_out, 2)
    if column not in done.tasks:
        return None
    values, runs = done.values(column), done.tasks[column].series.runs
    text = f"{statistics.fmean(values):.1f}" if values else ""
    text += f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    failed = sum(bool(run.failed) or not run.metrics for run in runs)
    return f"{text} ({failed} of {len(runs)} failed)".strip() if failed else text


def _records(request: TableRequest, done: RowOutcome) -> list[dict[str, Any]]:
    file = request.out / "cells" / done.cell.name / "metrics.jsonl"
    return read_records(file) if file.exists() else []


def _held_out_curves(request: TableRequest, rows: Many[RowOutcome]) -> Iterator[s.Curves]:
    """Yield the held-out loss of each run over time, one chart for each loss."""
    lines: dict[str, list[s.Line]] = {}
    baselines: dict[str, dict[str, float]] = {}
    for done in rows:
        records, metrics = _records(request, done), done.pretrained.metrics
        names = dict.fromkeys(n for r in records for n in r if n.startswith("held-out/loss/"))
        for name in names:
            points = [(r["seconds"] / 60, r[name]) for r in records if name in r][-POINTS:]
            line = s.Line(done.cell.name, [x for x, _ in points], [y for _, y in points])
            target = name.removeprefix("held-out/loss/")
            lines.setdefault(target, []).append(line)
            baselines.setdefault(target, {}).update(
                (label, metrics[f"{prefix}/loss/{target}"])
                for prefix, label in BASELINES.items()
                if f"{prefix}/loss/{target}" in metrics
            )
    for target, drawn in lines.items():
        yield s.Curves(f"Held-out loss: {target}", "minutes", "nats", drawn, baselines[target])


def _pretraining_runs(request: TableRequest, rows: Many[RowOutcome]) -> s.Details:
    lines: list[list[s.Cell]] = []
    for row in rows:
        done, records = row.pretrained, _records(request, row)
        tokens = int(records[-1]["tokens"]) if records else None
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in done.metrics.items())
        time = time_text(done.seconds)
        lines.append([row.cell.name, done.steps, tokens, time, metrics or "diverged"])
    columns = ["run", "steps", "tokens", "time", "metrics"]
    return s.Details("Pre-training runs", (s.TableSection("Runs", columns, lines),))
