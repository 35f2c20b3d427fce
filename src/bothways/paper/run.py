"""The benchmarks of the paper, from a request to the report."""

from __future__ import annotations

import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from typing_extensions import assert_never

from bothways.core.errors import DataError, os_errors
from bothways.core.stages import stages
from bothways.core.terminal import say
from bothways.paper import glue, ner, squad, swag
from bothways.paper.cells import CellOutcome, run
from bothways.paper.cost import Cost, cost_table, estimate, estimate_frozen
from bothways.paper.experiment import BenchmarkPlan, Experiment, Frozen, NotRun, Request
from bothways.paper.frozen import run_frozen
from bothways.paper.glue_submission import write_submission
from bothways.paper.results_page import results_report, write_results
from bothways.report.html import write_html
from bothways.report.sections import Report
from bothways.report.terminal import render_report

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
    console: Console | None = None,
) -> ReproduceResult | None:
    """Run a benchmark as in the paper; finished runs in `request.out` are not repeated.

    Args:
        dry_run: only print the cost, without writing to `request.out`; the result is None.
        console: console for the cost and progress; None for silence.

    Raises:
        ConfigError: an unknown task or an invalid setting.
        DataError: data that cannot be read, or no data for any of the tasks.
        KeyboardInterrupt: interrupted; the same call resumes.
        ResourceError: `request.out` holds results of other settings, other data or another model,
            or cannot be written.
    """
    console = console or Console(quiet=True)
    if dry_run:
        with tempfile.TemporaryDirectory() as scratch:
            plan = PLANS[benchmark](dataclasses.replace(request, out=Path(scratch)))
            _print_costs(plan, request, device, console)
        return None
    with os_errors(request.out, "Choose another --out."):
        request.out.mkdir(parents=True, exist_ok=True)
    plan = PLANS[benchmark](request)
    _print_costs(plan, request, device, console)
    outcomes: list[CellOutcome] = []
    for entry in plan.experiments:
        match entry:
            case Experiment():
                outcomes.append(run(entry, request.out, device=device, console=console))
            case Frozen():
                outcomes.append(run_frozen(entry, request.out, device=device, console=console))
            case NotRun():
                continue
            case _:
                assert_never(entry)
        write_results(request, plan, outcomes)
    files: list[Path] = []
    if benchmark in SUBMISSIONS:
        with stages(console) as on_stage:
            files = SUBMISSIONS[benchmark](request, outcomes, device=device, on_stage=on_stage)
    report = results_report(request, plan, outcomes, device=device)
    write_html(report, request.out / "report.html")
    return ReproduceResult(report, tuple(files))


def _print_costs(plan: BenchmarkPlan, request: Request, device: str, console: Console) -> None:
    for entry in plan.experiments:
        if isinstance(entry, NotRun):
            say(console, f"{entry.name} is not run: {entry.reason}")
    experiments = [entry for entry in plan.experiments if isinstance(entry, Experiment)]
    frozen = [entry for entry in plan.experiments if isinstance(entry, Frozen)]
    if not experiments and not frozen:
        what, fix = "has no data for any of the tasks", "Give the folder as distributed."
        raise DataError(what, where=request.data, fix=fix)
    costs, notes = list[Cost](), list[str]()
    with console.status("estimating the cost …"):
        if experiments:
            found, note = estimate(experiments, request.out, device=device)
            costs, notes = [*costs, *found], [*notes, note]
        if frozen:
            found, note = estimate_frozen(frozen, request.out, device=device)
            costs, notes = [*costs, *found], [*notes, note]
    console.print(render_report(cost_table(costs, " ".join(notes))))
