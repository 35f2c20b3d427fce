"""Measured next to published figures: `results.json` and a report."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import bothways
from bothways.core.atomic_files import make_folder, replace_text
from bothways.core.report import sections as s
from bothways.core.runtime.devices import choose_device
from bothways.lab.paper.cells import CellOutcome
from bothways.lab.paper.experiment import BenchmarkPlan, NotRun, Request


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


def results_report(
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
