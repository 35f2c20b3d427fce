"""`bothways evaluate`: a fine-tuned model against labelled data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bothways.commands.options import AnyTask

if TYPE_CHECKING:
    from bothways.recipes.finetuned import Opened
    from bothways.tasks.definition import Metrics, Reading
    from bothways.tasks.task import Pace, Tally


def evaluate(  # noqa: PLR0913 – one option per question
    folder: str,
    file: str,
    *,
    task: AnyTask | None = None,
    text: str | None = None,
    text_b: str | None = None,
    label: str | None = None,
    length: int | None = None,
    json: bool = False,
    report: Path | None = None,
    precision: Literal["auto", "fp32", "bf16"] = "fp32",
    device: str = "auto",
) -> None:
    """Score a fine-tuned model on labelled data: accuracy, F1, Matthews correlation, loss. Memory does not grow with the data.

    Parameters
    ----------
    folder
        A fine-tuned model folder, the folder of a fine-tuning run, or a Hub id.
    file
        Labelled data: .csv, .tsv, .jsonl, .parquet, or hub:owner/name:configuration:split.
    task
        What to do; by default what the model was trained for.
    text
        The column of the text, or of the first of two; by default as in training.
    text_b
        The column of the second text.
    label
        The column of the label.
    length
        The longest sequence in tokens; by default as in training.
    json
        Write one JSON object instead of a table.
    report
        Write what the model does well and badly into this HTML file: confusions, calibration, parts of the data, the hardest
        examples.
    precision
        Of matrix products: fp32 gives the same on every machine, auto takes bf16 where the hardware has it.
    device
        auto, cpu, cuda or cuda:N.
    """
    import sys

    from bothways.commands.progress import asked, watched
    from bothways.recipes.finetuned import open_task
    from bothways.tasks.task import Pace, Tally

    opened = open_task(folder, task, length=length, device=device)
    reading = opened.read(file, asked(opened, text=text, text_b=text_b, label=label), labelled=True)
    tally = Tally()
    metrics = _evaluated(opened, watched(reading, "evaluating"), Pace(precision), tally, report, names=(folder, file))
    if tally.cut:
        print(f"warning: {tally}", file=sys.stderr)
    if json:
        from json import dumps

        print(dumps(metrics))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{folder} on {file}")
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in metrics.items():
        table.add_row(name, f"{value:.4f}")
    Console().print(table)


def _evaluated(
    opened: Opened, reading: Reading[Any], pace: Pace, tally: Tally, report: Path | None, names: tuple[str, str]
) -> Metrics:
    """The metrics; on the way, the report is written if one is asked for."""
    if report is None:
        return opened.evaluate(reading, pace, tally)
    from bothways.recipes.analysis.survey import analyse, write_report

    analysis = analyse(opened.task, reading.examples, pace, tally)
    write_report(opened.task, analysis, report, model=names[0], data=names[1])
    return analysis.metrics
