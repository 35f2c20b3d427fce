"""`bothways compare`, a significance test of two models on the same labelled data, and
`bothways compare-runs`, curves, settings and speed of several runs on one page.
"""

from __future__ import annotations

from pathlib import Path

from bothways.cli import options
from bothways.core.terminal import output_console, say, show_lines


def compare(  # noqa: PLR0913 – one option per question
    a: str,
    b: str,
    data: str,
    *,
    task: str | None = None,
    text: options.TextColumn = None,
    text_b: options.SecondColumn = None,
    label: options.LabelColumn = None,
    json: options.JsonOutput = False,
    device: options.Device = "auto",
) -> None:
    """Compare two models example by example: mean difference, permutation test, bootstrap.

    Parameters
    ----------
    a
        Model folder, folder of a run, or of a run with --seeds, whose grades are averaged.
    b
        The other model.
    data
        Labelled data: .csv, .tsv, .jsonl, .parquet, or hub:owner/name:configuration:split.
    task
        Task of the comparison; default: the task of the first model. Pre-trained models are
        compared by the log probability of each token given the others (likelihood).
    """
    from bothways.core.bar import terminal_progress
    from bothways.core.report.terminal import text_table
    from bothways.lab.sweeps import significance
    from bothways.prediction.predictor import open_task

    task_name = task or significance.default_task(significance.folders(a)[0])
    names = {"text": text, "text_b": text_b, "label": label}
    columns = (
        options.named_columns(
            open_task(significance.folders(a)[0], task_name, device="cpu"), **names
        )
        if any(names.values())
        else None
    )
    with terminal_progress() as progress:
        comparison = significance.compare(
            a, b, data, columns, device=device, task=task_name, progress=progress
        )
    if json:
        from dataclasses import asdict
        from json import dumps

        print(dumps(asdict(comparison)))
        return
    console = output_console()
    columns = ("model", "runs", "mean grade", "deviation over seeds")
    rows = [
        [side.name, str(len(side.grades)), f"{side.mean:.4f}", _deviation(side.deviation)]
        for side in (comparison.a, comparison.b)
    ]
    show_lines(console, text_table(f"Grades on {data}", columns, rows))
    if task_name == "likelihood":
        say(
            console,
            "note: a grade is the mean log probability of a token given all others, in nats",
        )
    say(console, str(comparison))


def _deviation(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def compare_runs(run: Path, *more: Path, out: Path = Path("runs.html")) -> None:
    """Compare runs on one page: curves, the settings that differ, speed.

    For a test of two models on the same data: bothways compare.

    Parameters
    ----------
    run
        The folder of a pre-training or fine-tuning run, finished or not.
    more
        Further runs.
    out
        The page.
    """
    from bothways.core.atomic_files import check_output_path
    from bothways.core.bar import error_console
    from bothways.pretraining.run_page import compare_runs as write

    check_output_path(out)
    write([run, *more], out)
    say(error_console(), f"Curves, settings and speed: {out}")
