"""`bothways reproduce`: the paper's fine-tuning experiments, measured next to published."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from bothways.commands.options import Device
from bothways.commands.progress import keeping
from bothways.core.terminal import say


def reproduce(  # noqa: PLR0913 – one option per question
    benchmark: Literal["glue", "squad", "swag", "ner"],
    *overrides: str,
    model: str,
    data: str,
    out: Path = Path("reproduced"),
    tasks: str | None = None,
    seeds: int | None = None,
    grid: Literal["paper", "none"] = "paper",
    limit: int | None = None,
    dry_run: bool = False,
    device: Device = "auto",
) -> None:
    """Run the paper's fine-tuning experiments and compare with the published results.

    Prints the cost first: runs, examples, tokens, and time on this machine. The same command
        resumes an interrupted run.

    Parameters
    ----------
    benchmark
        glue (table 1), squad (tables 2 and 3), swag (table 4) or ner (table 7).
    overrides
        Settings by dotted path that override the paper's, such as microbatch_tokens=4096.
    model
        A model folder, the folder of a pre-training run, or a Hub id.
    data
        Folder of the benchmark as distributed, or for GLUE hub:owner/name, a data set on the Hub.
    out
        Folder for runs, results.json, report.html and leaderboard submissions.
    tasks
        Comma-separated names of tasks; default: all with data.
    seeds
        Runs per setting; default: as in the paper.
    grid
        paper: every setting of the paper's grid; none: one setting.
    limit
        Maximum number of training examples; the report states it.
    dry_run
        Only print the cost.
    """
    from rich.console import Console

    from bothways.commands.progress import error_console, say_kernels, terminal_progress
    from bothways.paper import run as benchmarks
    from bothways.paper.experiment import Request
    from bothways.report.terminal import render_report, show

    console = error_console()
    chosen = tuple(name.strip() for name in tasks.split(",")) if tasks else ()
    request = Request(model, data, out, chosen, seeds, grid, limit, overrides)
    if not dry_run:
        say_kernels(device)
    with keeping(out, console), terminal_progress(console) as progress:
        done = benchmarks.reproduce(
            benchmark,
            request,
            dry_run=dry_run,
            device=device,
            progress=progress,
            on_cost=lambda table: console.print(render_report(table)),
        )
    if done is None:
        return
    show(done.report, Console())
    for file in (*done.files, out / "results.json", out / "report.html"):
        say(console, f"Written: {file}")
