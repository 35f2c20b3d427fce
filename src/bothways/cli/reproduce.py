"""`bothways reproduce`: published experiments, measured next to published."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from bothways.cli.options import Device, PaperSettings, StartModel, keeping, say_kernels
from bothways.core.terminal import output_console, say

if TYPE_CHECKING:
    from bothways.core.report.sections import TableSection
    from bothways.lab.paper.run import Benchmark


@Parameter(name="*")
@dataclass(frozen=True)
class BenchmarkOptions:
    """Options of the benchmarks.

    Parameters
    ----------
    data
        Folder of the benchmark as distributed, or for GLUE hub:owner/name, a data set on the Hub.
    out
        Folder for runs, results.json, report.html and leaderboard submissions.
    tasks
        Comma-separated names of tasks; default: all with data.
    seeds
        Runs per setting; default: as in the paper.
    grid
        paper: every setting of the paper's grid; none: one setting; electra: for GLUE, those of
        ELECTRA small and base.
    limit
        Maximum number of training examples; the report states it.
    dry_run
        Only print the cost.
    """

    model: StartModel
    data: str
    out: Path = Path("reproduced")
    tasks: str | None = None
    seeds: int | None = None
    grid: Literal["paper", "none", "electra"] = "paper"
    limit: int | None = None
    dry_run: bool = False
    device: Device = "auto"


def glue(*overrides: PaperSettings, options: BenchmarkOptions) -> None:
    """Fine-tune on GLUE as in table 1 of the paper and compare.

    Prints the cost first: runs, examples, tokens, and time on this machine. The same command
    resumes an interrupted run.
    """
    _reproduce("glue", overrides, options)


def squad(*overrides: PaperSettings, options: BenchmarkOptions) -> None:
    """Fine-tune on SQuAD as in tables 2 and 3 of the paper and compare; see `reproduce glue`."""
    _reproduce("squad", overrides, options)


def swag(*overrides: PaperSettings, options: BenchmarkOptions) -> None:
    """Fine-tune on SWAG as in table 4 of the paper and compare; see `reproduce glue`."""
    _reproduce("swag", overrides, options)


def ner(*overrides: PaperSettings, options: BenchmarkOptions) -> None:
    """Fine-tune and read frozen features on CoNLL-2003 as in table 7; see `reproduce glue`."""
    _reproduce("ner", overrides, options)


def _reproduce(benchmark: Benchmark, overrides: tuple[str, ...], options: BenchmarkOptions) -> None:
    """Run a benchmark and print the comparison."""
    from bothways.core.bar import error_console, terminal_progress
    from bothways.core.report.terminal import render_report, show
    from bothways.lab.paper import run as benchmarks
    from bothways.lab.paper.experiment import Request

    console = error_console()
    out, device = options.out, options.device
    request = Request(
        options.model,
        options.data,
        out,
        _names(options.tasks),
        options.seeds,
        options.grid,
        options.limit,
        overrides,
    )
    costs: list[TableSection] = []  # of a dry run, whose result they are

    def report_cost(table: TableSection) -> None:
        """Print what begins, above the bar."""
        console.print(render_report(table))

    if not options.dry_run:
        say_kernels(device)
    with keeping(out, console), terminal_progress(console) as progress:
        done = benchmarks.reproduce(
            benchmark,
            request,
            dry_run=options.dry_run,
            device=device,
            progress=progress,
            on_cost=costs.append if options.dry_run else report_cost,
        )
    for table in costs:
        output_console().print(render_report(table))
    if done is None:
        return
    show(done.report, output_console())
    for file in (*done.files, out / "results.json", out / "report.html"):
        say(console, f"Written: {file}")


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",")) if text else ()


def pretraining(  # noqa: PLR0913 – one option per question
    table: str,
    /,
    *overrides: str,
    text: Annotated[list[str], Parameter(consume_multiple=True, negative=())],
    data: str,
    out: Path = Path("reproduced"),
    scale: Literal["small", "paper"] | None = None,
    budget: str | None = None,
    cells: str | None = None,
    tasks: str | None = None,
    seeds: int | None = None,
    limit: int | None = None,
    finetuning: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative=())] = (),
    dry_run: bool = False,
    device: Device = "auto",
) -> None:
    """Pre-train every row of a published table on the same text and budget, fine-tune, compare.

    Prints the cost first. The same command resumes an interrupted run.

    Parameters
    ----------
    table
        bert-5 (tasks), bert-6 (sizes), bert-8 (masks), masking-rate, roberta-1 (static masks),
        roberta-2 (input formats), albert-sentences, albert-sharing, electra or steps.
    overrides
        Settings of every pre-training run by dotted path, such as training.optimizer.lr=5e-4.
    text
        Text files, folders or patterns to pre-train on.
    data
        Folder with GLUE's folders as distributed, SQuAD for questions, CoNLL-2003 for entities.
    out
        Folder for runs, results.json and report.html.
    scale
        small: a third of the layers and a quarter of the width; paper: the published sizes and
        settings. By default small without a GPU.
    budget
        Length of each pre-training run: "20 minutes" gives all equal time, "5000 steps" equal
        updates, "1e9 tokens" equal text. Default: 5 minutes (small), or the paper's.
    cells
        Comma-separated names of pre-training runs; default: all.
    tasks
        Comma-separated columns: MNLI-m, QNLI, QQP, MRPC, SST-2, CoLA, STS-B, RTE, SQuAD 1.1 F1,
        SQuAD 2.0 F1, NER, NER features. Default: all columns that have data.
    seeds
        Fine-tuning runs of each row and column; default: 3 (small) or 5.
    limit
        Maximum number of training examples; default: 4000 (small) or all.
    finetuning
        Settings of fine-tuning by dotted path.
    dry_run
        Only print the cost.
    """
    from bothways.core.bar import error_console, terminal_progress
    from bothways.core.report.html import write_html
    from bothways.core.report.terminal import render_report, show
    from bothways.core.runtime.devices import choose_device
    from bothways.lab.paper.cost import table_cost
    from bothways.lab.paper.pretraining_page import table_report, write_table_results
    from bothways.lab.paper.pretraining_runs import TableRequest, run_table
    from bothways.training.durations import duration

    default_scale: Literal["small", "paper"] = (
        "small" if choose_device(device).type == "cpu" else "paper"
    )
    request = TableRequest(
        table, tuple(text), data, out, scale or default_scale,
        None if budget is None else duration(budget),
        _names(tasks), _names(cells), seeds, limit, overrides, finetuning,
    )  # fmt: skip
    console = error_console()
    with terminal_progress(console) as progress:
        cost = render_report(table_cost(request, device=device, progress=progress))
    (output_console() if dry_run else console).print(cost)
    if dry_run:
        return
    say_kernels(device)
    with keeping(out, console), terminal_progress(console) as progress:
        rows = run_table(
            request,
            device=device,
            progress=progress,
            on_row=lambda rows: write_table_results(request, rows),
        )
    report = table_report(request, rows, device=device)
    write_html(report, out / "report.html")
    show(report, output_console())
    for file in (out / "results.json", out / "report.html"):
        say(console, f"Written: {file}")
