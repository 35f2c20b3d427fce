"""`bothways evaluate`: a fine-tuned model against labelled data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bothways.commands.options import AnyTask

if TYPE_CHECKING:
    from rich.table import Table

    from bothways.recipes.finetuned import Opened
    from bothways.tasks.definition import Metrics, Reading
    from bothways.tasks.task import Pace, Tally


def evaluate(  # noqa: PLR0913 – one option per question
    folder: str,
    file: str,
    *settings: str,
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

    --task likelihood gives the pseudo-perplexity of texts. --task embed goes through all layers and poolings, and tells how
    well the cosines of pairs agree with their scores.

    Parameters
    ----------
    folder
        A fine-tuned model folder, the folder of a fine-tuning run, or a Hub id.
    file
        Labelled data: .csv, .tsv, .jsonl, .parquet, or hub:owner/name:configuration:split.
    settings
        Of the task, such as variant=word_l2r for likelihood.
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
    from bothways.tasks.embed import Embed
    from bothways.tasks.task import Pace, Tally

    opened = open_task(folder, task, length=length, device=device, settings=settings)
    reading = opened.read(file, asked(opened, text=text, text_b=text_b, label=label), labelled=True)
    tally, pace, title = Tally(), Pace(precision), f"{folder} on {file}"
    shown = watched(reading, "evaluating", printing=False)
    if isinstance(opened.task, Embed) and report is None:
        from bothways.commands.embed import sweep_table
        from bothways.recipes.embedding import sweep

        found = sweep(opened.task, shown.examples, pace, tally)
        plain, table = found.to_json(), sweep_table(found, title)
    else:
        metrics = _evaluated(opened, shown, pace, tally, report, names=(folder, file))
        plain, table = dict(metrics), _table(metrics, title)
    if tally.cut:
        print(f"warning: {tally}", file=sys.stderr)
    if json:
        from json import dumps

        print(dumps(plain))
    else:
        from rich.console import Console

        Console().print(table)


def _table(metrics: Metrics, title: str) -> Table:
    from rich.table import Table

    table = Table(title=title)
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in metrics.items():
        table.add_row(name, f"{value:.4f}")
    return table


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
