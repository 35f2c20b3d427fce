"""What a benchmark came to, beside what the paper published: `results.json` and a report."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence as Many
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from typing_extensions import assert_never

import bothways
from bothways.core.atomic_files import replace_file
from bothways.paper.cells import CellOutcome, CellResult
from bothways.paper.experiment import BenchmarkPlan, Experiment, Frozen, NotRun, Request
from bothways.report import sections as s
from bothways.runtime.devices import choose_device, describe_device


def measured(plan: BenchmarkPlan, outcomes: Many[CellOutcome]) -> dict[str, dict[str, float]]:
    """The comparison's measured rows, in the paper's units; those of tasks that were not run are absent, as is the average."""
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
    """The mean of the averaged columns under "average", if all of them are there."""
    if not averaged or any(column not in row for column in averaged):
        return {}
    return {"average": statistics.fmean(row[column] for column in averaged)}


def write_results(request: Request, plan: BenchmarkPlan, outcomes: Many[CellOutcome]) -> Path:
    """`results.json`: measured and published, every cell, and what was not run."""
    file = request.out / "results.json"
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
    request.out.mkdir(parents=True, exist_ok=True)
    replace_file(
        file,
        lambda place: place.write_text(
            json.dumps(values, indent=1, ensure_ascii=False), encoding="utf8"
        ),
    )
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
                "mean of": [str(result.folder) for result in outcome.counted],
                "best": None if outcome.best is None else str(outcome.best.folder),
                "notes": list(entry.notes),
                "cells": [
                    vars(result) | {"folder": str(result.folder)} for result in outcome.results
                ],
            }
        case _:
            assert_never(entry)


def results_report(
    request: Request, plan: BenchmarkPlan, outcomes: Many[CellOutcome], *, device: str = "auto"
) -> s.Report:
    """The report of what was run."""
    run, every = len(outcomes), len(plan.experiments)
    headline = f"{plan.title}: {run} of {every} tasks run."
    lead = f"{request.model}, fine-tuned on {request.data}."
    if departures := request.departures(plan.seeds):
        lead += f" Not the paper's protocol: {'; '.join(departures)}."
    return s.Report(
        "The paper's experiments, run again",
        headline,
        lead,
        (
            _comparison(plan, outcomes),
            _tasks(plan, outcomes),
            s.Details("Every run", (_cells(outcomes),)),
        ),
        f"bothways {bothways.__version__}, {datetime.now(timezone.utc):%Y-%m-%d}, {describe_device(_device(device))}",
    )


def _device(name: str) -> torch.device:
    return choose_device(name)


def _comparison(plan: BenchmarkPlan, outcomes: Many[CellOutcome]) -> s.TableSection:
    columns = [*plan.columns, *(["average"] if plan.averaged else [])]
    here = measured(plan, outcomes).items()
    rows: list[list[s.Cell]] = [
        [name, *(_points(row.get(c)) for c in columns)] for name, row in here
    ]
    rows += [
        [f"{p.system} ({p.table})", *(_points(p.values.get(c)) for c in columns)]
        for p in plan.published
    ]
    note = " ".join(plan.notes)
    if len(columns) <= len(rows):
        return s.TableSection("Measured and published", ["", *columns], rows, note=note)
    # The longer side goes down the page.
    turned: list[list[s.Cell]] = [
        [column, *(row[place] for row in rows)] for place, column in enumerate(columns, 1)
    ]
    return s.TableSection(
        "Measured and published", ["", *(str(row[0]) for row in rows)], turned, note=note
    )


def _points(value: float | None) -> s.Cell:
    return None if value is None else round(value, 1)


def _tasks(plan: BenchmarkPlan, outcomes: Many[CellOutcome]) -> s.TableSection:
    done = {outcome.experiment.name: outcome for outcome in outcomes}
    rows = [_task(entry, done.get(entry.name)) for entry in plan.experiments]
    return s.TableSection("Every task", ["task", "result", "from", "remarks"], rows)


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
                _words(outcome.metrics),
                of + outcome.best.folder.name,
                "; ".join(entry.notes),
            ]
        case _:
            assert_never(entry)


def _words(metrics: dict[str, float]) -> str:
    return ", ".join(
        f"{name} {value:.4g}" for name, value in metrics.items() if not name.endswith("loss")
    )


def _cells(outcomes: Many[CellOutcome]) -> s.TableSection:
    rows: list[list[s.Cell]] = [
        _cell(outcome, result) for outcome in outcomes for result in outcome.results
    ]
    return s.TableSection("Every run", ["task", "run", "result", "steps", "seconds"], rows)


def _cell(outcome: CellOutcome, result: CellResult) -> list[s.Cell]:
    words = (_words(dict(result.metrics)) or "diverged") + (" (failed)" if result.failure else "")
    return [outcome.experiment.name, result.folder.name, words, result.steps, round(result.seconds)]
