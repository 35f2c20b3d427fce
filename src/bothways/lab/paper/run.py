"""The benchmarks of the paper, from a request to the report."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from bothways.core.errors import DataError, os_errors
from bothways.core.progress import SILENT, Progress
from bothways.core.report.html import write_html
from bothways.core.report.sections import Report, TableSection
from bothways.lab.paper import benchmarks, experiment, glue, pages
from bothways.lab.paper.cost import estimate
from bothways.lab.paper.experiment import BenchmarkPlan, Experiment, NotRun, Request

Benchmark = Literal["glue", "squad", "swag", "ner"]
PLANS: Mapping[Benchmark, Callable[[Request], BenchmarkPlan]] = {
    "glue": glue.glue_plan,
    "squad": benchmarks.squad_plan,
    "swag": benchmarks.swag_plan,
    "ner": benchmarks.ner_plan,
}
"""Plans of the benchmarks."""


def reproduce(
    benchmark: Benchmark,
    request: Request,
    *,
    dry_run: bool = False,
    device: str = "auto",
    progress: Progress = SILENT,
    on_cost: Callable[[TableSection], object] = lambda table: None,
) -> Report | None:
    """Run a benchmark as in the paper, and report; finished runs in `request.out` are not repeated.

    Args:
        dry_run: only estimate the cost, without writing to `request.out`; the result is None.
        on_cost: receives the estimated cost before the first run.

    Raises:
        ConfigError: an unknown task or an invalid setting; a run in `request.out` was finished
            with other settings, on other data or from another model.
        DataError: data that cannot be read, or no data for any of the tasks.
        KeyboardInterrupt: interrupted; the same call resumes.
        ResourceError: `request.out` cannot be written, or a best run has lost its weights.
    """
    if dry_run:
        with tempfile.TemporaryDirectory() as scratch:
            plan = PLANS[benchmark](dataclasses.replace(request, out=Path(scratch)))
            on_cost(estimate(_runnable(plan, request, progress), request.out, device=device))
        return None
    with os_errors(request.out, "Choose another --out."):
        request.out.mkdir(parents=True, exist_ok=True)
    plan = PLANS[benchmark](request)
    entries = _runnable(plan, request, progress)
    on_cost(estimate(entries, request.out, device=device))
    outcomes: list[experiment.CellOutcome] = []
    for entry in entries:
        outcomes.append(experiment.run(entry, request.out, device=device, progress=progress))
        results = pages.benchmark_results(request, plan, outcomes)
        pages.write_results(request.out / "results.json", results)
    report = pages.benchmark_report(request, plan, outcomes, device=device)
    write_html(report, request.out / "report.html")
    return report


def _runnable(plan: BenchmarkPlan, request: Request, progress: Progress) -> list[Experiment]:
    """Return the experiments that have data; report the others."""
    for entry in plan.experiments:
        if isinstance(entry, NotRun):
            progress.message(f"{entry.name} is not run: {entry.reason}")
    entries = [entry for entry in plan.experiments if isinstance(entry, Experiment)]
    if not entries:
        message, fix = "has no data for any of the tasks", "Give the folder as distributed."
        raise DataError(message, where=request.data, fix=fix)
    progress.stage("estimating the cost")
    return entries
