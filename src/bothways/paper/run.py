"""The benchmarks of the paper, and how one of them is run from its plan to its report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from typing_extensions import assert_never

from bothways.core.errors import DataError, os_errors
from bothways.core.stages import OnStage, stages
from bothways.core.terminal import say
from bothways.paper import glue, ner, squad, swag
from bothways.paper.cells import CellOutcome, run
from bothways.paper.cost import Cost, estimate, table
from bothways.paper.experiment import BenchmarkPlan, Experiment, Frozen, NotRun, Request
from bothways.paper.frozen import run_frozen
from bothways.paper.frozen_cost import estimate_frozen
from bothways.paper.glue_submission import write_submission
from bothways.paper.results_page import results_report, write_results
from bothways.report.html import write_html
from bothways.report.sections import Report
from bothways.report.terminal import render_report

Benchmark = Literal["glue", "squad", "swag", "ner"]


@dataclass(frozen=True)
class ReproduceResult:
    """What is left of it.

    Attributes:
        report: measured beside published.
        files: what was written beside `results.json` and `report.html`.
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
    """Run a benchmark as the paper does; what is finished in `request.out` is not run again.

    Args:
        dry_run: only say what it would take; the result is none then.
        console: where costs and progress are said; none for nowhere.

    Raises:
        ConfigError: a task that the benchmark does not have, or a setting that cannot be.
        DataError: data that cannot be read, or none for any of the tasks.
        KeyboardInterrupt: interrupted; the same call goes on.
        ResourceError: `request.out` holds results of other settings, other data or another model, or cannot be
            written.
    """
    console = console or Console(quiet=True)
    with os_errors(request.out, "Choose another --out."):
        request.out.mkdir(parents=True, exist_ok=True)
    planned = plan_of(benchmark, request)
    _say_costs(planned, request, device, console)
    if dry_run:
        return None
    outcomes: list[CellOutcome] = []
    for entry in planned.experiments:
        match entry:
            case Experiment():
                outcomes.append(run(entry, request.out, device=device, console=console))
            case Frozen():
                outcomes.append(run_frozen(entry, request.out, device=device, console=console))
            case NotRun():
                continue
            case _:
                assert_never(entry)
        write_results(request, planned, outcomes)
    with stages(console) as on_stage:
        files = _finish(benchmark, request, outcomes, device, on_stage)
    report = results_report(request, planned, outcomes, device=device)
    write_html(report, request.out / "report.html")
    return ReproduceResult(report, tuple(files))


def _say_costs(plan: BenchmarkPlan, request: Request, device: str, console: Console) -> None:
    for entry in plan.experiments:
        if isinstance(entry, NotRun):
            say(console, f"{entry.name} is not run: {entry.reason}")
    experiments = [entry for entry in plan.experiments if isinstance(entry, Experiment)]
    frozen = [entry for entry in plan.experiments if isinstance(entry, Frozen)]
    if not experiments and not frozen:
        raise DataError(
            "holds the data of none of the tasks",
            where=request.data,
            fix="Give the folder as distributed.",
        )
    costs, notes = list[Cost](), list[str]()
    with console.status("counting what it would take …"):
        if experiments:
            found, note = estimate(experiments, request.out, device=device)
            costs, notes = [*costs, *found], [*notes, note]
        if frozen:
            found, note = estimate_frozen(frozen, request.out, device=device)
            costs, notes = [*costs, *found], [*notes, note]
    console.print(render_report(table(costs, " ".join(notes))))


def plan_of(benchmark: Benchmark, request: Request) -> BenchmarkPlan:
    """What a benchmark has to run."""
    match benchmark:
        case "glue":
            return glue.glue_plan(request)
        case "squad":
            return squad.squad_plan(request)
        case "swag":
            return swag.swag_plan(request)
        case "ner":
            return ner.ner_plan(request)
        case _:
            assert_never(benchmark)


def _finish(
    benchmark: Benchmark,
    request: Request,
    outcomes: list[CellOutcome],
    device: str,
    on_stage: OnStage,
) -> list[Path]:
    """What is handed in elsewhere."""
    match benchmark:
        case "glue":
            return write_submission(request, outcomes, device=device, on_stage=on_stage)
        case "squad":
            return squad.write_squad_predictions(
                request, outcomes, device=device, on_stage=on_stage
            )
        case "swag" | "ner":
            return []
        case _:
            assert_never(benchmark)
