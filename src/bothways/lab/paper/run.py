"""The benchmarks of the paper, from a request to the report."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bothways.core.errors import ConfigError, DataError, os_errors
from bothways.core.progress import SILENT, Progress
from bothways.core.report.html import write_html
from bothways.core.report.sections import Report, TableSection
from bothways.lab.paper import glue, ner, squad, swag
from bothways.lab.paper.cells import CellOutcome, run
from bothways.lab.paper.cost import cost_table, estimate
from bothways.lab.paper.experiment import BenchmarkPlan, NotRun, Request
from bothways.lab.paper.glue_submission import write_submission
from bothways.lab.paper.results_page import benchmark_results, results_report, write_results

Benchmark = Literal["glue", "squad", "swag", "ner"]
PLANS = {
    "glue": glue.glue_plan,
    "squad": squad.squad_plan,
    "swag": swag.swag_plan,
    "ner": ner.ner_plan,
}
"""Plans of the benchmarks."""
SUBMISSIONS = {"glue": write_submission, "squad": squad.write_squad_predictions}
"""Writers of the files that leaderboards and official scorers take."""


@dataclass(frozen=True)
class ReproduceResult:
    """The result of a benchmark.

    Attributes:
        report: measured next to published figures.
        files: files written in addition to `results.json` and `report.html`.
    """

    report: Report
    files: tuple[Path, ...]


def reproduce(
    benchmark: Benchmark,
    request: Request,
    *,
    dry_run: bool = False,
    device: str = "auto",
    progress: Progress = SILENT,
    on_cost: Callable[[TableSection], object] = lambda table: None,
) -> ReproduceResult | None:
    """Run a benchmark as in the paper; finished runs in `request.out` are not repeated.

    Args:
        dry_run: only estimate the cost, without writing to `request.out`; the result is None.
        on_cost: receives the estimated cost before the first run.

    Raises:
        ConfigError: an unknown task or an invalid setting, or ELECTRA's settings for another
            benchmark than GLUE; a run in `request.out` was finished
            with other settings, on other data or from another model.
        DataError: data that cannot be read, or no data for any of the tasks.
        KeyboardInterrupt: interrupted; the same call resumes.
        ResourceError: `request.out` cannot be written, or a best run has lost its weights.
    """
    if request.grid == "electra" and benchmark != "glue":
        message, fix = "'electra' is for GLUE alone", "Choose paper or none."
        raise ConfigError(message, where="grid", fix=fix)
    if dry_run:
        with tempfile.TemporaryDirectory() as scratch:
            plan = PLANS[benchmark](dataclasses.replace(request, out=Path(scratch)))
            on_cost(_costs(plan, request, device, progress))
        return None
    with os_errors(request.out, "Choose another --out."):
        request.out.mkdir(parents=True, exist_ok=True)
    plan = PLANS[benchmark](request)
    on_cost(_costs(plan, request, device, progress))
    outcomes: list[CellOutcome] = []
    for entry in plan.experiments:
        if isinstance(entry, NotRun):
            continue
        outcomes.append(run(entry, request.out, device=device, progress=progress))
        results = benchmark_results(request, plan, outcomes)
        write_results(request.out / "results.json", results)
    files: list[Path] = []
    if benchmark in SUBMISSIONS:
        files = SUBMISSIONS[benchmark](request, outcomes, device=device, progress=progress)
    report = results_report(request, plan, outcomes, device=device)
    write_html(report, request.out / "report.html")
    return ReproduceResult(report, tuple(files))


def _costs(plan: BenchmarkPlan, request: Request, device: str, progress: Progress) -> TableSection:
    """Return the estimated cost of the experiments; report those that are not run."""
    for entry in plan.experiments:
        if isinstance(entry, NotRun):
            progress.message(f"{entry.name} is not run: {entry.reason}")
    entries = [entry for entry in plan.experiments if not isinstance(entry, NotRun)]
    if not entries:
        message, fix = "has no data for any of the tasks", "Give the folder as distributed."
        raise DataError(message, where=request.data, fix=fix)
    progress.stage("estimating the cost")
    return cost_table(*estimate(entries, request.out, device=device))
