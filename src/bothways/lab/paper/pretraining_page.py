"""The result of a table on pre-training: `results.json` and a page, measured next to published.

Spread and significance are over the seeds of fine-tuning. A row is one pre-training run: what
another seed of pre-training would change is not in the intervals.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bothways.core.report import sections as s
from bothways.core.runtime.devices import choose_device
from bothways.core.terminal import quantity, time_text
from bothways.lab.paper.pretraining_runs import SCALES, RowOutcome, TableRequest, base_settings
from bothways.lab.paper.pretraining_tables import COLUMNS
from bothways.lab.paper.results_page import write_results
from bothways.pretraining.run_page import BASELINES, POINTS, read_records

CONFIDENCE = 0.95


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


def spread_text(values: Many[float]) -> str | None:
    """Return mean and standard deviation as a text; None without a value."""
    if not values:
        return None
    mean = f"{statistics.fmean(values):.1f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.1f}"


def held_out_values(request: TableRequest, done: RowOutcome) -> dict[str, float]:
    """Return the columns of held-out text: accuracies and F1 in percent, others as they are."""
    metrics = done.pretrained.metrics
    values = {
        title: metrics[name] * (1.0 if name.endswith("perplexity") else 100.0)
        for title, name in request.plan.held_out
        if name in metrics
    }
    return values | dict(done.probes)


def write_table_results(request: TableRequest, rows: Many[RowOutcome]) -> Path:
    """Write `results.json`: measured and published figures, and every run."""
    baseline = rows[0] if rows and rows[0].row == request.plan.rows[0] else None
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
                "row": done.row.name,
                "cell": done.row.cell,
                "method": done.row.method,
                "steps": outcome.steps,
                "seconds": outcome.seconds,
                "held-out": held_out_values(request, done),
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
    cells = {done.row.cell for done in rows}
    base = base_settings(request)
    seeds = request.seeds or SCALES[request.scale].seeds
    limit = request.limit or SCALES[request.scale].limit
    count = "all" if limit is None else f"at most {limit:,}"
    lead = (
        f"{len(cells)} of {len(request.plan.cells)} pre-training runs, {base.training.until} each, "
        f"on {', '.join(request.text)}; fine-tuned with {quantity(seeds, 'seed(s)')} on {count} "
        "examples."
    )
    sources = dict.fromkeys(row.table for row in request.plan.published)
    small = "Models, text and budget are smaller than those of the published figures: compare the "
    remarks = [
        *([f"{small}order of the rows, not the values."] if request.scale == "small" else []),
        *request.plan.notes,
        *(f"{row.name}: {row.note}." for row in request.rows if row.note),
        "Intervals are over the seeds of fine-tuning. Each row is one pre-training run: another "
        "seed of pre-training moved the GLUE average of an ELECTRA-small by 0.57 points (the "
        "standard deviation of 14 runs, in the README of electra_pytorch).",
        *([f"Published figures: {'; '.join(sources)}."] if sources else []),
    ]
    return s.Report(
        "A table on pre-training, run again",
        f"{request.plan.title}: {len(rows)} of {len(request.plan.rows)} rows.",
        lead,
        (
            *_comparison(request, rows),
            *_differences(request, rows),
            *_pretraining_curves(request, rows),
            *_charts(rows),
            _pretraining_runs(request, rows),
            s.Prose("How to read it", remarks),
        ),
        s.colophon(choose_device(device)),
    )


def _comparison(request: TableRequest, rows: Many[RowOutcome]) -> list[s.TableSection]:
    """Return the measured columns next to the published ones, and the other published."""
    there = {row.system: row.values for row in request.plan.published}
    done = {outcome.row.name: outcome for outcome in rows}
    held_out = dict.fromkeys(
        title for outcome in rows for title in held_out_values(request, outcome)
    )
    measured = dict.fromkeys([*held_out, *(column for outcome in rows for column in outcome.tasks)])
    published_columns = dict.fromkeys(column for values in there.values() for column in values)
    names = dict.fromkeys([*(row.name for row in request.plan.rows), *there])
    columns, lines = list[str](), {name: list[s.Cell]([name]) for name in names}
    for column in measured:
        columns.append(column)
        for name, line in lines.items():
            line.append(_measured(request, done.get(name), column))
        if column in published_columns:
            columns.append("published")
            for name, line in lines.items():
                line.append(there.get(name, {}).get(column))
    note = "Measured: mean ± standard deviation over the seeds of fine-tuning, on dev."
    tables = [
        s.TableSection("Measured, and published", ["", *columns], [*lines.values()], note=note)
    ]
    unmeasured = [column for column in published_columns if column not in measured]
    if unmeasured:
        published_rows = [
            [name, *(row.get(column) for column in unmeasured)] for name, row in there.items()
        ]
        tables.append(s.TableSection("Published, not measured", ["", *unmeasured], published_rows))
    return tables


def _measured(request: TableRequest, done: RowOutcome | None, column: str) -> s.Cell:
    if done is None:
        return None
    if not done.pretrained.metrics:
        return "diverged"
    held_out = held_out_values(request, done)
    if column in held_out:
        return round(held_out[column], 2)
    return _with_failures(spread_text(done.values(column)), done, column)


def _with_failures(text: str | None, done: RowOutcome, column: str) -> str | None:
    """Append the number of fine-tuning runs that have probably failed, or diverged."""
    if column not in done.tasks:
        return None
    runs = done.tasks[column].series.runs
    failed = sum(bool(run.failed) or not run.metrics for run in runs)
    return f"{text or ''} ({failed} of {len(runs)} failed)".strip() if failed else text


def _differences(request: TableRequest, rows: Many[RowOutcome]) -> list[s.TableSection]:
    baseline = request.plan.rows[0]
    base, lines = next((done for done in rows if done.row == baseline), None), list[list[s.Cell]]()
    for done in rows:
        if base is not None and done is not base:
            changes = [difference(base.values(x), done.values(x)) for x in base.tasks]
            lines.append([done.row.name, *(str(change) if change else None for change in changes)])
    if base is None or not any(any(line[1:]) for line in lines):
        return []
    note = "In points, with the 95 % interval and the p-value of Welch's t-test over seeds."
    title = f"Difference from {baseline.name}"
    return [s.TableSection(title, ["", *base.tasks], lines, note=note)]


def _records(request: TableRequest, cell: str) -> list[dict[str, Any]]:
    file = request.out / "cells" / cell / "metrics.jsonl"
    return read_records(file) if file.exists() else []


def _pretraining_curves(request: TableRequest, rows: Many[RowOutcome]) -> Iterator[s.Curves]:
    """Yield the held-out loss of each run over time, one chart for each loss."""
    lines: dict[str, list[s.Line]] = {}
    baselines: dict[str, dict[str, float]] = {}
    for cell, outcome in {done.row.cell: done.pretrained for done in rows}.items():
        records = _records(request, cell)
        names = dict.fromkeys(n for r in records for n in r if n.startswith("held-out/loss/"))
        for name in names:
            points = [(r["seconds"] / 60, r[name]) for r in records if name in r][-POINTS:]
            line = s.Line(cell, [x for x, _ in points], [y for _, y in points])
            target = name.removeprefix("held-out/loss/")
            lines.setdefault(target, []).append(line)
            baselines.setdefault(target, {}).update(
                (label, outcome.metrics[f"{prefix}/loss/{target}"])
                for prefix, label in BASELINES.items()
                if f"{prefix}/loss/{target}" in outcome.metrics
            )
    for target, drawn in lines.items():
        yield s.Curves(f"Held-out loss: {target}", "minutes", "nats", drawn, baselines[target])


def _charts(rows: Many[RowOutcome]) -> list[s.ComparisonChart]:
    """Return a chart for each column, one dot for each seed."""
    charts = []
    for column in dict.fromkeys(column for done in rows for column in done.tasks):
        groups = {
            str(_with_failures(done.row.name, done, column)): done.values(column)
            for done in rows
            if done.values(column)
        }
        if groups:
            charts.append(s.ComparisonChart(column, f"{COLUMNS[column][1]}, %", groups))
    return charts


def _pretraining_runs(request: TableRequest, rows: Many[RowOutcome]) -> s.Details:
    lines: list[list[s.Cell]] = []
    for cell, done in {done.row.cell: done.pretrained for done in rows}.items():
        records = _records(request, cell)
        tokens = int(records[-1]["tokens"]) if records else None
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in done.metrics.items())
        lines.append([cell, done.steps, tokens, time_text(done.seconds), metrics or "diverged"])
    columns = ["run", "steps", "tokens", "time", "metrics"]
    return s.Details("Pre-training runs", (s.TableSection("Runs", columns, lines),))
