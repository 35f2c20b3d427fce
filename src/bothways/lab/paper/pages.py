"""Measured next to published figures: `results.json` and a report, of a benchmark or of a table.

In a table on pre-training, spread and significance are over the seeds of pre-training, where rows
have several, and else over those of fine-tuning: what another seed of pre-training would change is
not in such intervals.

`fit_scaling` fits L = E + A / N^α + B / D^β by least squares, in nats: for given exponents the rest
is linear in numbers that are not negative, so only the exponents are searched. Intervals are
percentiles of a bootstrap of the residuals, which keeps the sizes of the runs. Where all runs have
as many tokens (or parameters), this term cannot be told from E and is part of it.

Source: Hoffmann et al. 2022 (approach 3, where the loss is Huber's, of logarithms); Kaplan et al.
2020 (N without the embedding tables).
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence as Many
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64
from numpy.typing import NDArray

import bothways
from bothways.core.errors import argument, render
from bothways.core.files import make_folder, replace_text
from bothways.core.report import sections as s
from bothways.core.runtime.devices import choose_device
from bothways.core.terminal import quantity, time_text
from bothways.lab.paper.experiment import BenchmarkPlan, CellOutcome, NotRun, Request
from bothways.lab.paper.pretraining_runs import SCALES, RowOutcome, TableRequest, base_settings
from bothways.lab.sweeps.runs import SweepOutcome
from bothways.model.parameters import parameter_table
from bothways.pretraining.run import BASELINES, POINTS
from bothways.tasks.metrics import error_reduction, errors_text
from bothways.training.trackers import read_records


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


def _write_results(folder: Path, values: Mapping[str, Any]) -> Path:
    """Write results as JSON, with the version of this library."""
    make_folder(folder)
    file, content = folder / "results.json", {**values, "bothways": bothways.__version__}
    replace_text(file, json.dumps(content, indent=1, ensure_ascii=False))
    return file


def write_benchmark_results(
    request: Request, plan: BenchmarkPlan, outcomes: Many[CellOutcome]
) -> Path:
    """Write `results.json`: measured and published figures, every run, and tasks not run."""
    reasons = {x.name: x.reason if isinstance(x, NotRun) else "not yet" for x in plan.experiments}
    tasks: dict[str, Any] = {name: {"run": False, "reason": x} for name, x in reasons.items()}
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
    published = [{"system": x.system, "table": x.table, **x.values} for x in plan.published]
    results = {
        "benchmark": plan.title,
        "model": request.model,
        "data": request.data,
        "departures": list(request.departures(plan.seeds)),
        "measured": measured(plan, outcomes),
        "published": published,
        "tasks": tasks,
    }
    return _write_results(request.out, results)


def benchmark_report(
    request: Request, plan: BenchmarkPlan, outcomes: Many[CellOutcome], *, device: str = "auto"
) -> s.Report:
    """Return the report."""
    lead = f"{request.model}, fine-tuned on {request.data}."
    if departures := request.departures(plan.seeds):
        lead += f" Differences from the paper's protocol: {'; '.join(departures)}."
    rows, runs = dict[str, list[s.Cell]](), list[list[s.Cell]]()
    for entry in plan.experiments:
        reason = entry.reason if isinstance(entry, NotRun) else "not yet"
        rows[entry.name] = [entry.name, "not run", None, reason]
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
    figures: list[tuple[str, Mapping[str, float]]] = [
        *((name, row) for name, row in measured(plan, outcomes).items() if row),
        *((f"{row.system} ({row.table})", row.values) for row in plan.published),
    ]
    columns = [*plan.columns, *(["average"] if plan.averaged else [])]
    table: list[list[s.Cell]] = [["", *columns]]
    for name, values in figures:
        table.append([name, *(round(values[x], 1) if x in values else None for x in columns)])
    if len(columns) > len(table) - 1:
        # More columns than rows: transpose, because a page has more height than width.
        table = [list(column) for column in zip(*table, strict=True)]
    head, *lines = table
    note = " ".join(plan.notes)
    names, run_columns = [str(x or "") for x in head], ["task", "run", "result", "steps", "seconds"]
    return s.Report(
        "The paper's experiments, run again",
        f"{plan.title}: {len(outcomes)} of {len(plan.experiments)} tasks run.",
        lead,
        (
            s.TableSection("Measured and published", names, lines, note=note),
            s.TableSection("Tasks", ["task", "result", "from", "remarks"], [*rows.values()]),
            s.Details("Every run", (s.TableSection("Every run", run_columns, runs),)),
        ),
        s.colophon(choose_device(device)),
    )


def _listed(metrics: Mapping[str, float]) -> str:
    return ", ".join(
        f"{name} {value:.4g}" for name, value in metrics.items() if not name.endswith("loss")
    )


@dataclass(frozen=True)
class Difference:
    """The difference of a row from the first one, in points of a column.

    Attributes:
        error_reduction: the same difference relative to the errors of the first row.
        low, high: the 95 % confidence interval of the points (Welch's t), over seeds.
    """

    points: float
    error_reduction: float | None
    low: float
    high: float
    p_value: float

    def __str__(self) -> str:
        errors = f", {errors_text(self.error_reduction)}" if self.error_reduction else ""
        interval = f"{self.low:+.1f} to {self.high:+.1f}"
        return f"{self.points:+.1f} ({interval}){errors}, p {self.p_value:.2g}"


def difference(base: Many[float], other: Many[float], best: float = 100.0) -> Difference | None:
    """Return the difference of the means; None without two seeds on each side, or spread.

    Args:
        best: the value without errors.

    Source: Welch 1947: variances may differ.
    """
    from scipy import stats

    # Equal values on both sides have no variance to test with.
    if min(len(base), len(other)) < 2 or (len({*base}) == 1 and len({*other}) == 1):
        return None
    test = stats.ttest_ind(other, base, equal_var=False)
    interval = test.confidence_interval(0.95)
    old, new = statistics.fmean(base), statistics.fmean(other)
    ends = float(interval.low), float(interval.high)
    return Difference(new - old, error_reduction(old, new, best), *ends, float(test.pvalue))


def write_table_results(request: TableRequest, rows: Many[RowOutcome]) -> Path:
    """Write `results.json`: measured and published figures, and every run."""
    baseline = rows[0] if rows and rows[0].cell == request.plan.cells[0] else None
    entries = []
    for done in rows:
        columns = {}
        for column in _columns(request, done):
            values, change = _values(request, done, column), None
            if baseline not in (None, done):
                change = _change(request, baseline, done, column)
            columns[column] = {
                "seeds": list(values),
                "mean": statistics.fmean(values) if values else None,
                "difference": None if change is None else dataclasses.asdict(change),
            }
        names = ("metrics", "failed", "steps", "seconds")
        runs = [{name: getattr(run, name) for name in names} for run in done.pretrained]
        entry = {"row": done.cell.title, "cell": done.cell.name, "pre-training": runs}
        entries.append({**entry, "columns": columns})
    results: dict[str, Any] = {
        "table": request.table,
        "title": request.plan.title,
        "scale": request.scale,
        "budget of a pre-training run": str(base_settings(request).training.until),
        "text": list(request.text),
        "rows": entries,
        "published": [dataclasses.asdict(row) for row in request.plan.published],
    }
    if request.plan.fitted and rows:
        results["fit"] = dataclasses.asdict(_scaling(request, rows)[0])
    return _write_results(request.out, results)


def table_report(request: TableRequest, rows: Many[RowOutcome], *, device: str) -> s.Report:
    """Return the report."""
    base = base_settings(request)
    seeds = request.seeds or SCALES[request.scale].seeds
    limit = request.limit or SCALES[request.scale].limit
    count = "all" if limit is None else f"at most {limit:,}"
    lead = (
        f"{len(rows)} of {len(request.plan.cells)} rows, each with "
        f"{quantity(request.pretraining_seeds, 'pre-training run(s)')} of {base.training.until} "
        f"on {', '.join(request.text)}; fine-tuned with {quantity(seeds, 'seed(s)')} on {count} "
        "examples."
    )
    sources = dict.fromkeys(row.table for row in request.plan.published)
    small = "Models, text and budget are smaller than those of the published figures: compare the "
    remarks = [
        *([f"{small}order of the rows, not the values."] if request.scale == "small" else []),
        *request.plan.notes,
        *(f"{cell.title}: {cell.note}." for cell in request.chosen if cell.note),
        "Intervals are over the seeds of pre-training: of each model the mean of its fine-tuning "
        "runs counts once."
        if request.pretraining_seeds > 1
        else "Intervals are over the seeds of fine-tuning. Each row is one pre-training run: "
        "another seed of pre-training moved the GLUE average of an ELECTRA-small by 0.57 points "
        "(the standard deviation of 14 runs, in the README of electra_pytorch); "
        f"{render(argument(pretraining_seeds=3))} measures it.",
        *([f"Published figures: {'; '.join(sources)}."] if sources else []),
    ]
    return s.Report(
        "A table on pre-training, run again",
        f"{request.plan.title}: {len(rows)} of {len(request.plan.cells)} rows.",
        lead,
        (
            *_table_comparison(request, rows),
            *_scaling_sections(request, rows),
            *_run_sections(request, rows),
            s.Prose("How to read it", remarks),
        ),
        s.colophon(choose_device(device)),
    )


def _columns(request: TableRequest, done: RowOutcome) -> list[str]:
    """Return the columns that a row has: held-out text, then tasks."""
    held_out = [title for title, name in request.plan.held_out if done.held_out(name)]
    return [*held_out, *done.tasks]


def _values(request: TableRequest, done: RowOutcome, column: str) -> tuple[float, ...]:
    """Return a column of each run: perplexities as they are, all others in percent."""
    name = dict(request.plan.held_out).get(column)
    if name is None:
        return done.values(column)
    factor = 1.0 if name.endswith("perplexity") else 100.0
    return tuple(factor * value for value in done.held_out(name))


def _change(
    request: TableRequest, base: RowOutcome, done: RowOutcome, column: str
) -> Difference | None:
    perplexity = dict(request.plan.held_out).get(column, "").endswith("perplexity")
    old, new = _values(request, base, column), _values(request, done, column)
    return difference(old, new, 1.0 if perplexity else 100.0)


def _table_comparison(request: TableRequest, rows: Many[RowOutcome]) -> Iterator[s.TableSection]:
    """Yield measured next to published columns, the other published, and the differences."""
    published = {row.system: row.values for row in request.plan.published}
    done = {outcome.cell.title: outcome for outcome in rows}
    held_out = [t for t, name in request.plan.held_out if any(r.held_out(name) for r in rows)]
    measured = dict.fromkeys([*held_out, *(column for r in rows for column in r.tasks)])
    columns = dict.fromkeys(column for values in published.values() for column in values)
    names = [*(cell.title for cell in request.plan.cells), *published]
    head, lines = [""], {name: list[s.Cell]([name]) for name in names}
    for column in measured:
        head += [column, "published"] if column in columns else [column]
        for name, line in lines.items():
            line.append(_cell_text(request, done[name], column) if name in done else None)
            if column in columns:
                line.append(published.get(name, {}).get(column))
    seeds = "pre-training" if request.pretraining_seeds > 1 else "fine-tuning"
    note = f"Measured: mean ± standard deviation over the seeds of {seeds}, on dev."
    yield s.TableSection("Measured, and published", head, [*lines.values()], note=note)
    if unmeasured := [column for column in columns if column not in measured]:
        values = [[name, *map(row.get, unmeasured)] for name, row in published.items()]
        yield s.TableSection("Published, not measured", ["", *unmeasured], values)
    base = done.get(request.plan.cells[0].title)
    if base is None:
        return
    compared = _columns(request, base)
    changes = [
        [done.cell.title, *(_change(request, base, done, x) for x in compared)]
        for done in rows
        if done is not base
    ]
    if any(any(line[1:]) for line in changes):
        note = (
            "In points, with the 95 % interval, the relative difference in errors, and the p-value "
            f"of Welch's t-test over the seeds of {seeds}; without a correction for the number of "
            "tests."
        )
        texts: list[list[s.Cell]] = [[str(x) if x else None for x in line] for line in changes]
        title = f"Difference from {base.cell.title}"
        yield s.TableSection(title, ["", *compared], texts, note=note)


def _cell_text(request: TableRequest, done: RowOutcome, column: str) -> s.Cell:
    """Return a measured value: "71.3 ± 0.4 (1 of 3 failed)"."""
    failures = [run for run in done.pretrained if not run.metrics]
    if len(failures) == len(done.pretrained):
        return "diverged"
    values, runs = _values(request, done, column), done.pretrained
    if column in done.tasks:
        fine_tuned = (run for outcome in done.tasks[column] for run in outcome.series.runs)
        runs = (*failures, *fine_tuned)
    elif not values:
        return None
    digits = 1 if column in done.tasks else 2
    text = f"{statistics.fmean(values):.{digits}f}" if values else ""
    text += f" ± {float(np.std(values, ddof=1)):.{digits}f}" if len(values) > 1 else ""
    failed = sum(bool(run.failed) or not run.metrics for run in runs)
    return f"{text} ({failed} of {len(runs)} failed)".strip() if failed else text


def _scaling(
    request: TableRequest, rows: Many[RowOutcome]
) -> tuple[ScalingFit, dict[str, NDArray[np.float64]], list[str]]:
    """Fit the losses of all runs; return the fit, what it fits, and the names of excluded runs.

    A run that diverged has no loss, and one at the level of word frequencies has learned nothing
    that a power law could describe.
    """
    base, metric, excluded = base_settings(request), request.plan.fitted, list[str]()
    columns = dict[str, list[float]](loss=[], parameters=[], tokens=[], share=[])
    for done in rows:
        entries = parameter_table(done.cell.settings(base).encoder).entries
        parameters = sum(x.count for x in entries if not x.part.endswith("embedding"))
        for run in done.pretrained:
            loss = run.metrics.get(metric, math.inf)
            frequencies = run.metrics.get(metric.replace("held-out", "unigram"), math.inf)
            records = _records(request, run)
            if not (math.isfinite(loss) and loss <= 0.99 * frequencies and records):
                excluded.append(run.name)
                continue
            numbers = (loss, parameters, records[-1]["tokens"], done.cell.share)
            for values, number in zip(columns.values(), numbers, strict=True):
                values.append(float(number))
    points = {name: np.array(values) for name, values in columns.items()}
    sizes = {name: points[name] for name in ("parameters", "tokens")}
    return fit_scaling(points["loss"], sizes), points, excluded


def _scaling_sections(request: TableRequest, rows: Many[RowOutcome]) -> Iterator[s.Section]:
    """Yield the fit of the loss by parameters and tokens, if the table has one."""
    if not request.plan.fitted:
        return
    title = "Loss by parameters and tokens"
    fit, points, excluded = _scaling(request, rows)
    note = "Least squares of L = E + A / N^α + B / D^β in nats; N counts no embedding tables. "
    if excluded:
        note += f"Excluded, diverged or at the level of word frequencies: {', '.join(excluded)}. "
    if fit.irreducible is None:
        yield s.Prose(title, [f"No fit: {fit.problem}. {note}"])
        return
    named = {"E, nats": fit.irreducible}
    for term, letters in (("parameters", "Aα"), ("tokens", "Bβ")):
        if term in fit.exponents:
            centre = f"{term} at {fit.centres[term]:,.3g}, nats"
            centre += f" ({letters[0]} / centre^{letters[1]})"
            named |= {f"{letters[1]}, {term}": fit.exponents[term], centre: fit.nats[term]}
    lines: list[list[s.Cell]] = [
        [name, f"{x.value:.3g}", f"{x.low:.3g} to {x.high:.3g}"] for name, x in named.items()
    ]
    note += (
        f"{quantity(len(points['loss']), 'run(s)')}, residuals of {fit.deviation:.2g} nats; 95 % "
        "intervals by a bootstrap of the residuals."
    )
    note += f" Do not extrapolate: {fit.problem}." if fit.problem else ""
    yield s.TableSection(title, ["", "estimate", "95 % interval"], lines, note=note)
    curves = list[s.Line]()
    for share in sorted({*points["share"]}, reverse=True):
        chosen = points["share"] == share
        order = np.argsort(points["parameters"][chosen])
        sizes = {name: points[name][chosen][order] for name in ("parameters", "tokens")}
        x, measured = sizes["parameters"] / 1e6, points["loss"][chosen][order]
        fitted = [fit.loss(parameters=n, tokens=d) for n, d in zip(*sizes.values(), strict=True)]
        curves += [s.Line(f"{share:.0%} of the budget", x.tolist(), measured.tolist())]
        curves += [s.Line(f"fitted, {share:.0%}", x.tolist(), fitted)]
    yield s.Curves(f"{title}, fitted", "million parameters", "nats", curves)


def _records(request: TableRequest, run: SweepOutcome) -> list[dict[str, Any]]:
    file = request.out / "cells" / run.name / "metrics.jsonl"
    return read_records(file) if file.exists() else []


def _run_sections(request: TableRequest, rows: Many[RowOutcome]) -> Iterator[s.Section]:
    """Yield the held-out loss of each run over time, a chart for each loss, and a table of runs."""
    lines: dict[str, list[s.Line]] = {}
    baselines: dict[str, dict[str, float]] = {}
    runs: list[list[s.Cell]] = []
    for run in (run for done in rows for run in done.pretrained):
        records, metrics = _records(request, run), run.metrics
        tokens = int(records[-1]["tokens"]) if records else None
        values = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        runs.append([run.name, run.steps, tokens, time_text(run.seconds), values or "diverged"])
        names = dict.fromkeys(n for r in records for n in r if n.startswith("held-out/loss/"))
        for name in names:
            points = [(r["seconds"] / 60, r[name]) for r in records if name in r][-POINTS:]
            line = s.Line(run.name, [x for x, _ in points], [y for _, y in points])
            target = name.removeprefix("held-out/loss/")
            lines.setdefault(target, []).append(line)
            baselines.setdefault(target, {}).update(
                (label, metrics[f"{prefix}/loss/{target}"])
                for prefix, label in BASELINES.items()
                if f"{prefix}/loss/{target}" in metrics
            )
    for target, drawn in lines.items():
        yield s.Curves(f"Held-out loss: {target}", "minutes", "nats", drawn, baselines[target])
    columns = ["run", "steps", "tokens", "time", "metrics"]
    yield s.Details("Pre-training runs", (s.TableSection("Runs", columns, runs),))


RESAMPLES = 200
"""Bootstrap samples of the intervals."""
EXPONENTS = (0.02, 3.0)
"""The exponents that are searched; an interval that reaches an end determines nothing."""
_LEVEL = 1.1
"""The ratio from which two numbers of parameters or tokens are different ones."""
_TOGETHER = 0.95
"""The correlation of log N and log D from which their effects cannot be told apart."""


@dataclass(frozen=True)
class Estimate:
    """A fitted number with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class ScalingFit:
    """The fit of losses by parameters and tokens.

    Attributes:
        problem: what the runs do not determine; "" if they determine all.
        irreducible: E, in nats; None without a fit.
        exponents: α under "parameters", β under "tokens", of the terms that vary.
        nats: the value of each term at its centre.
        centres: the geometric means of parameters and tokens.
        deviation: the standard deviation of the residuals, in nats.
    """

    problem: str
    irreducible: Estimate | None = None
    exponents: Mapping[str, Estimate] = field(default_factory=dict)
    nats: Mapping[str, Estimate] = field(default_factory=dict)
    centres: Mapping[str, float] = field(default_factory=dict)
    deviation: float = math.nan

    def loss(self, **sizes: float) -> float:
        """Return the fitted loss of a run, by its `parameters` and `tokens`."""
        assert self.irreducible is not None
        terms = (
            nats.value * (sizes[name] / self.centres[name]) ** -self.exponents[name].value
            for name, nats in self.nats.items()
        )
        return float(self.irreducible.value + sum(terms))


def fit_scaling(
    losses: Float64[np.ndarray, " runs"], sizes: Mapping[str, Float64[np.ndarray, " runs"]]
) -> ScalingFit:
    """Fit the losses of runs, in nats."""
    levels = {
        name: 1 + int((np.diff(np.sort(np.log(values))) > math.log(_LEVEL)).sum())
        for name, values in sizes.items()
    }
    names = [name for name, count in levels.items() if count > 1]
    different = len({*zip(*(sizes[name] for name in names or sizes), strict=True)})
    if different < (needed := max(4, 2 * len(names) + 2)):
        return ScalingFit(
            f"a fit needs {needed} runs of different sizes, and there are {different}"
        )
    if few := [name for name in names if levels[name] == 2]:
        return ScalingFit(f"an exponent needs three different numbers of {' and '.join(few)}")
    centres = {name: float(np.exp(np.log(sizes[name]).mean())) for name in names}
    scaled = np.stack([np.log(sizes[name] / centres[name]) for name in names])
    if len(names) == 2 and abs(np.corrcoef(scaled)[0, 1]) > _TOGETHER:
        return ScalingFit("parameters and tokens vary together, so their effects are not separable")
    powers, linear = _solve(scaled, losses)
    fitted = _design(scaled, powers) @ linear
    residuals, freedom = losses - fitted, len(losses) - 2 * len(names) - 1
    spread = residuals * math.sqrt(len(losses) / freedom)
    draws = np.random.default_rng(0)
    noisy = (fitted + draws.choice(spread, len(losses)) for _ in range(RESAMPLES))
    samples = [np.concatenate(_solve(scaled, values, powers)) for values in noisy]
    low, high = np.quantile(np.array(samples), [0.025, 0.975], axis=0)
    estimates = [Estimate(*map(float, x)) for x in zip([*powers, *linear], low, high, strict=True)]
    exponents = dict(zip(names, estimates, strict=False))
    unknown = [
        name
        for name, x in exponents.items()
        if x.low < 1.05 * EXPONENTS[0] or x.high > 0.95 * EXPONENTS[1]
    ]
    return ScalingFit(
        f"the runs do not determine the exponent of {' and '.join(unknown)}" if unknown else "",
        estimates[len(names)],
        exponents,
        dict(zip(names, estimates[len(names) + 1 :], strict=True)),
        centres,
        float(np.sqrt((residuals**2).sum() / freedom)),
    )


def _design(
    scaled: Float64[np.ndarray, "terms runs"], powers: Float64[np.ndarray, " terms"]
) -> Float64[np.ndarray, "runs columns"]:
    """Return a column of ones, and the power of each term."""
    columns = np.vstack([np.ones(scaled.shape[1]), np.exp(-powers[:, None] * scaled)])
    return np.ascontiguousarray(columns.T)


def _solve(
    scaled: Float64[np.ndarray, "terms runs"],
    losses: Float64[np.ndarray, " runs"],
    start: Float64[np.ndarray, " terms"] | None = None,
) -> tuple[Float64[np.ndarray, " terms"], Float64[np.ndarray, " columns"]]:
    """Return the exponents and the linear numbers of least squares, from the best of a grid.

    Args:
        start: exponents to try, too, with a grid that is coarser.
    """
    from scipy import optimize

    def error(logarithms: Float64[np.ndarray, " terms"]) -> float:
        return float(optimize.nnls(_design(scaled, np.exp(logarithms)), losses)[1])

    bounds = low, high = math.log(EXPONENTS[0]), math.log(EXPONENTS[1])
    grid = np.meshgrid(*[np.linspace(low, high, 12 if start is None else 4)] * len(scaled))
    starts = [np.log(start)] if start is not None else []
    starts += [np.array(point) for point in zip(*map(np.ravel, grid), strict=True)]
    best = optimize.minimize(
        error, min(starts, key=error), method="Nelder-Mead", bounds=[bounds] * len(scaled)
    )
    powers = np.exp(best.x)
    return powers, optimize.nnls(_design(scaled, powers), losses)[0]
