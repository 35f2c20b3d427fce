"""`bothways compare-runs`: curves, settings and speed of several runs on one page."""

from __future__ import annotations

from pathlib import Path


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
    from rich.console import Console

    from bothways.core.atomic_files import check_output_path
    from bothways.core.terminal import say
    from bothways.pretraining.runs_page import compare_runs as write

    check_output_path(out)
    write([run, *more], out)
    say(Console(stderr=True), f"Curves, settings and speed: {out}")
