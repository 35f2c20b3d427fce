"""`bothways quickstart`: from raw text to a fine-tuned BERT that beats the same model untrained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from bothways.cli.options import keeping, say_kernels
from bothways.core.terminal import output_console, say


def quickstart(
    *,
    minutes: float | None = None,
    out: Path = Path("quickstart"),
    corpus: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = (),
    labels: Path | None = None,
) -> None:
    """Pre-train a small BERT on text of this machine, and measure the gain of pre-training.

    Trains a vocabulary, builds a corpus, pre-trains a BERT, fine-tunes it on a labelled task and
    compares it with the same architecture from random weights. Writes a table and OUT/report.html.
    Nothing is downloaded.

    Parameters
    ----------
    minutes
        Total time, of which pre-training gets the most. Default: as long as a model needs to gain,
        at most 8.
    out
        Folder for the corpus, the models and the report: new, empty, or of an interrupted
        quickstart, which is resumed.
    corpus
        Text files, folders or globs, as for `bothways corpus build`; default: the documentation
        inside this Python installation.
    labels
        Labelled file (.tsv, .csv, .jsonl, .parquet); default: a task made from the text.
    """
    from bothways.core.bar import error_console, terminal_progress
    from bothways.core.errors import ConfigError, require
    from bothways.core.report.html import write_html
    from bothways.core.report.terminal import show
    from bothways.lab.quickstart.gain import run_quickstart
    from bothways.lab.quickstart.report_page import quickstart_report

    require("report", "the quickstart", "jinja2", "matplotlib", "sklearn")
    if minutes is not None and minutes < 0.5:
        raise ConfigError(f"must be at least 0.5, not {minutes:g}", where="minutes")
    console = error_console()
    say_kernels("auto")
    with keeping(out, console), terminal_progress(console) as progress:
        result = run_quickstart(
            out, minutes=minutes, files=corpus, labels=labels, progress=progress
        )
        if result is None:
            raise KeyboardInterrupt
    report = quickstart_report(result)
    write_html(report, out / "report.html")
    show(report, output_console())
    say(console, f"Report with curves: {out / 'report.html'}")
