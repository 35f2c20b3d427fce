"""`bothways quickstart`: from raw text to a fine-tuned BERT that beats the same model untrained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from bothways.commands.resuming import keeping
from bothways.core.terminal import say

if TYPE_CHECKING:
    from rich.console import Console

    from bothways.training import durations as state
    from bothways.training.state import RunState


def quickstart(
    *,
    minutes: float = 5.0,
    out: Path = Path("quickstart"),
    corpus: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = (),
    labels: Path | None = None,
) -> None:
    """Pre-train a small BERT on text that is already on this machine, and see what it is worth.

    A vocabulary is learnt, a corpus built, a BERT pre-trained, and fine-tuned on a labelled task next to the same architecture
    from random weights. It ends with a table and OUT/report.html. Nothing is downloaded.

    Parameters
    ----------
    minutes
        The time for all of it; more time means more pre-training.
    out
        The folder for the corpus, the models and the report: new, empty, or of a run that was stopped, which goes on where it
        was.
    corpus
        Your own text: files, folders, globs, as `bothways corpus build` takes them. Without it, the documentation inside this
        Python installation.
    labels
        Your own labelled file (.tsv, .csv, .jsonl, .parquet) with texts and labels. Without it, a task made from the text.
    """
    from rich.console import Console

    from bothways.core.errors import ConfigError
    from bothways.quickstart.report_page import quickstart_report
    from bothways.quickstart.story import Story, run_story
    from bothways.report.html import write_html
    from bothways.report.terminal import show

    if minutes < 0.5:
        raise ConfigError(f"must be at least 0.5, not {minutes:g}", where="minutes")
    console, story = Console(stderr=True), Story(minutes=minutes)

    with keeping(out, console), _bar(story.method.training.until, console) as watch:
        told = run_story(
            story, out, files=corpus, labels=labels, say=partial(say, console), on_fine_tuning=watch
        )
        if told is None:
            raise KeyboardInterrupt
    report = quickstart_report(told)
    write_html(report, out / "report.html")
    show(report, Console())
    say(console, f"The whole report, with curves: {out / 'report.html'}")


@contextmanager
def _bar(until: state.Duration, console: Console) -> Iterator[Callable[[int, int, RunState], None]]:
    """A bar that is there while models are fine-tuned, each for so long."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task("fine-tuning", total=None, visible=False)

    def watch(number: int, runs: int, progress: RunState) -> None:
        """Fine-tuning `number` of `runs` has come so far."""
        share = progress.share(until)
        bar.update(
            task,
            description=f"fine-tuning {number + 1} of {runs}",
            completed=number + share,
            total=runs,
            visible=True,
        )
        if number + share >= runs:
            bar.stop()
        elif not bar.live.is_started:
            bar.start()

    try:
        yield watch
    except KeyboardInterrupt:
        bar.stop()
        raise
