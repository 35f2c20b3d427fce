"""Measured next to published figures: `results.json` and a report."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

from typing_extensions import assert_never

import bothways
from bothways.core.atomic_files import make_folder, replace_text
from bothways.core.report import sections as s
from bothways.core.runtime.devices import choose_device
from bothways.lab.paper.cells import CellOutcome
from bothways.lab.paper.experiment import BenchmarkPlan, Experiment, Frozen, NotRun, Request
from bothways.lab.sweeps.runs import SweepOutcome


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


def write_results(request: Request, plan: BenchmarkPlan, outcomes: Many[CellOutcome]) -> Path:
    """Write `results.json`: measured and published figures, every run, and tasks not run."""
    done = {outcome.experiment.name: outcome for outcome in outcomes}
    values = {
        "benchmark": plan.title,
        "model": request.model,
        "data": request.data,
        "departures": list(request.departures(plan.seeds)),
        "measured": measured(plan, outcomes),
        "published": [
            {"system": row.system, "table": row.table, **row.values} for row in plan.published
        ],
        "tasks": {entry.name: _entry(entry, done.get(entry.name)) for entry in plan.experiments},
        "bothways": bothways.__version__,
    }
    make_folder(request.out)
    file, text = request.out / "results.json", json.dumps(values, indent=1, ensure_ascii=False)
    replace_text(file, text)
    return file


def _entry(entry: Experiment | Frozen | NotRun, outcome: CellOutcome | None) -> dict[str, Any]:
    match entry:
        case NotRun(_, reason):
            return {"run": False, "reason": reason}
        case Experiment() | Frozen():
            if outcome is None:
                return {"run": False, "reason": "not yet"}
            return {
                "run": True,
                "metrics": outcome.metrics,
                "mean of": [str(outcome.folder / result.name) for result in outcome.counted],
                "best": None if outcome.best is None else str(outcome.best),
                "notes": list(entry.notes),
                "cells": [
                    dataclasses.asdict(result) | {"folder": str(outcome.folder / result.name)}
                    for result in outcome.series.runs
                ],
            }
        case _:
            assert_never(entry)


def results_report(
    request: Request, plan: BenchmarkPlan, outcomes: Many[CellOutcome], *, device: str = "auto"
) -> s.Report:
    """Return the report."""
    run, total = len(outcomes), len(plan.experiments)
    headline = f"{plan.title}: {run} of {total} tasks run."
    lead = f"{request.model}, fine-tuned on {request.data}."
    if departures := request.departures(plan.seeds):
        lead += f" Differences from the paper's protocol: {'; '.join(departures)}."
    return s.Report(
        "The paper's experiments, run again",
        headline,
        lead,
        (
            _comparison(plan, outcomes),
            _tasks(plan, outcomes),
            s.Details("Every run", (_cells(outcomes),)),
        ),
        s.colophon(choose_device(device)),
    )


def _comparison(plan: BenchmarkPlan, outcomes: Many[CellOutcome]) -> s.TableSection:
    columns = [*plan.columns, *(["average"] if plan.averaged else [])]
    here = {name: row for name, row in measured(plan, outcomes).items() if row}
    there = {f"{row.system} ({row.table})": row.values for row in plan.published}
    rows: list[list[s.Cell]] = [
        [name, *(_rounded(row.get(column)) for column in columns)]
        for name, row in [*here.items(), *there.items()]
    ]
    note = " ".join(plan.notes)
    if len(columns) <= len(rows):
        return s.TableSection("Measured and published", ["", *columns], rows, note=note)
    # More columns than rows: transpose, because a page has more height than width.
    transposed: list[list[s.Cell]] = [
        [column, *(row[index] for row in rows)] for index, column in enumerate(columns, 1)
    ]
    return s.TableSection(
        "Measured and published", ["", *(str(row[0]) for row in rows)], transposed, note=note
    )


def _rounded(value: float | None) -> s.Cell:
    return None if value is None else round(value, 1)


def _tasks(plan: BenchmarkPlan, outcomes: Many[CellOutcome]) -> s.TableSection:
    done = {outcome.experiment.name: outcome for outcome in outcomes}
    rows = [_task(entry, done.get(entry.name)) for entry in plan.experiments]
    return s.TableSection("Tasks", ["task", "result", "from", "remarks"], rows)


def _task(entry: Experiment | Frozen | NotRun, outcome: CellOutcome | None) -> list[s.Cell]:
    match entry:
        case NotRun(name, reason):
            return [name, "not run", None, reason]
        case Experiment(name) | Frozen(name):
            if outcome is None:
                return [name, "not run", None, "not yet"]
            if outcome.best is None:
                return [name, "every run diverged", None, "; ".join(entry.notes)]
            of = f"mean of {len(outcome.counted)}: " if len(outcome.counted) > 1 else ""
            return [
                name,
                _listed(outcome.metrics),
                of + outcome.best.name,
                "; ".join(entry.notes),
            ]
        case _:
            assert_never(entry)


def _listed(metrics: dict[str, float]) -> str:
    return ", ".join(
        f"{name} {value:.4g}" for name, value in metrics.items() if not name.endswith("loss")
    )


def _cells(outcomes: Many[CellOutcome]) -> s.TableSection:
    rows: list[list[s.Cell]] = [
        _cell(outcome, result) for outcome in outcomes for result in outcome.series.runs
    ]
    return s.TableSection("Every run", ["task", "run", "result", "steps", "seconds"], rows)


def _cell(outcome: CellOutcome, result: SweepOutcome) -> list[s.Cell]:
    words = (_listed(dict(result.metrics)) or "diverged") + (" (failed)" if result.failed else "")
    return [outcome.experiment.name, result.name, words, result.steps, round(result.seconds)]
