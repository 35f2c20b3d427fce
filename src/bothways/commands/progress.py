"""Shared by commands: chosen columns, progress on standard error, and how to resume."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from bothways.core.terminal import printable, say, time_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar

    from bothways.core.progress import Progress
    from bothways.prediction.engine import PredictionCounts
    from bothways.prediction.predictor import Predictor
    from bothways.tasks.base import Reading

SECONDS_PER_LINE = 10.0
"""The time between two lines of progress in a file or a pipe."""
SPEED_PERIOD = 86_400.0
"""Seconds over which the speed of a stage is averaged; rich keeps its last 1,000 reports."""


def asked(opened: Predictor, **columns: str | None) -> Any:
    """Return the named columns as the column type of the task.

    Raises:
        ConfigError: the task has no such column.
    """
    from bothways.core.config import reader as configs

    named = {name: value for name, value in columns.items() if value is not None}
    columns_type = type(opened.learner.task.columns)  # type: ignore[attr-defined]
    return configs.read(columns_type, named, where="columns") if named else None


def say_guess(opened: Predictor, reading: Reading[Any], given: object, source: str) -> None:
    """Print on standard error which columns were guessed, if they differ from training."""
    from bothways.tasks.columns import reads_as_trained

    columns, trained = (getattr(each.task, "columns", None) for each in (reading, opened.learner))
    if given is None and not reads_as_trained(columns, trained) and _has_columns(source):
        print(f"note: the columns are guessed: {columns}", file=sys.stderr)


def _has_columns(source: str) -> bool:
    """Return whether the source has columns, unlike plain text with one text per line."""
    from bothways.data.text_io import is_stream

    return not is_stream(source) and ".txt" not in Path(source).suffixes


def say_replaced(settings: object, base: object) -> None:
    """Print a note for each union of which settings have another member than their recipe."""
    from bothways.core.config.reader import replaced_members

    for each in replaced_members(settings, base):
        say(error_console(), f"note: {each}")


def say_kernels(device: str) -> None:
    """Print on standard error which kernels a long command computes with; nothing for a GPU."""
    from bothways.kernels.library import describe_kernels
    from bothways.runtime.devices import choose_device
    from bothways.training.parallel import is_main, plan_here

    if choose_device(device).type == "cpu" and is_main(plan_here()):
        print(describe_kernels(), file=sys.stderr)


@contextmanager
def watched(
    reading: Reading[Any], what: str, *, hidden: bool = False
) -> Iterator[PredictionCounts]:
    """Count predictions and show their progress.

    Where standard error is not a terminal, a line is printed every ten seconds instead.

    Args:
        hidden: show neither.
    """
    from bothways.prediction.engine import counting

    with terminal_progress(hidden=hidden) as progress:
        yield counting(reading, progress, what)


@contextmanager
def terminal_progress(
    console: Console | None = None, *, hidden: bool = False
) -> Iterator[Progress]:
    """Yield a progress receiver: on a terminal a bar with the time left, else a line every ten
    seconds.

    The bar vanishes at the end; messages stay. Neither stream is redirected.

    Args:
        console: None for standard error.
        hidden: suppress the bar, even on a terminal.
    """
    from rich import progress as rich_progress
    from rich.table import Column

    console = console or error_console()
    columns = (
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.BarColumn(bar_width=16),
        rich_progress.TaskProgressColumn(),
        rich_progress.TimeRemainingColumn(),
        rich_progress.TextColumn(
            "{task.fields[note]}",
            markup=False,
            table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
        ),
    )
    drawn = console.is_interactive and not (hidden or console.quiet)
    bar = rich_progress.Progress(
        *columns,
        console=console,
        transient=True,
        disable=not drawn,
        redirect_stdout=False,  # rich would print the data of `> FILE` on the terminal
        redirect_stderr=False,
        refresh_per_second=4,
        speed_estimate_period=SPEED_PERIOD,
        expand=True,
    )
    with bar:
        yield _Bar(bar, lines=not (hidden or console.is_interactive))


def error_console() -> Console:
    """Return standard error; it falls silent when its reader ends, instead of ending the run."""
    from rich.console import Console

    class Stderr(Console):
        def on_broken_pipe(self) -> None:
            """Stop quietly: the reader of standard error has gone."""
            # Ctrl-C may have ended the `tee` that reads the output. What could not be written is
            # still flushed at the end, to nowhere.
            self.quiet = True
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.file.fileno())
            os.close(nowhere)

    # FORCE_COLOR makes a file or a pipe a terminal for rich, but no bar can be drawn over there.
    return Stderr(stderr=True, force_interactive=None if sys.stderr.isatty() else False)


class _Bar:
    """A `core.progress.Progress` that draws with rich."""

    def __init__(self, bar: Bar, *, lines: bool) -> None:
        self._bar, self._lines, self._printed = bar, lines, time.monotonic()
        self._line = bar.add_task("", total=None, visible=False, note="")

    def stage(self, name: str, total: float | int | None = None) -> None:
        """Begin a stage, from 0 on."""
        self._bar.remove_task(self._line)  # `reset` keeps a total where the new one is None
        self._line = self._bar.add_task(printable(name), total=total, note="")

    def advance(self, done: float | int, note: str | None = None) -> None:
        """Move the bar; where there is none, print a line now and then."""
        task = self._bar.tasks[0]
        shown = f"{done:,.0f}" if note is None and task.total is None else note
        fields: dict[str, Any] = {} if shown is None else {"note": printable(shown)}
        # rich measures the time left from the first value that is not 0.
        self._bar.update(self._line, completed=max(done, 1e-9), **fields)
        if self._lines and time.monotonic() - self._printed >= SECONDS_PER_LINE:
            self._printed, left = time.monotonic(), task.time_remaining
            parts = [
                task.fields["note"],
                f"{task.percentage:.0f}% done" if task.total else "",
                "" if left is None else f"{time_text(float(left))} left",
            ]
            say(self._bar.console, f"{task.description}: {', '.join(filter(None, parts))}")

    def message(self, text: str) -> None:
        """Print a line above the bar."""
        say(self._bar.console, text)


@contextmanager
def keeping(out: Path, console: Console, kept: str = "Finished work") -> Iterator[None]:
    """Report on Ctrl-C which work is kept in the folder and how to resume."""
    try:
        yield
    except KeyboardInterrupt:
        left = "Nothing is finished, and nothing is left behind."
        if any(out.glob("*")):
            left = f"{kept} is kept in {out}; run the same command to continue."
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # another one would cut the message
        try:
            say(console, f"Stopped. {left}")
        finally:
            signal.signal(signal.SIGINT, before)
        raise


@contextmanager
def run_progress(out: Path, console: Console) -> Iterator[Progress]:
    """Show the progress of runs in a folder; if interrupted outside of a step, say how to go on.

    A run that is interrupted in a step saves and returns (`training.signals`).
    """
    from bothways.training.parallel import is_main, plan_here

    with terminal_progress(console) as progress:
        try:
            yield progress
        except KeyboardInterrupt:
            if next(out.rglob("step-*/manifest.json"), None) is not None:
                stop_saved(console, "The checkpoints are kept.")
            if is_main(plan_here()):
                say(console, "Stopped before the first checkpoint: the same command begins again.")
            raise


def check_begun(out: Path) -> None:
    """Print a note if there is no run to resume: a new one starts."""
    if not out.exists():
        print(f"note: {out} has no run to resume: starting one", file=sys.stderr)


def stop_saved(console: Console, saved: str = "Saved.") -> NoReturn:
    """Print the command that resumes an interrupted run, then raise KeyboardInterrupt.

    The main rank prints. All raise: a rank that ended with status 0 would tell torchrun that its
    part of the run is finished, and its machine would not be used again.
    """
    from bothways.training.parallel import is_main, plan_here
    from bothways.training.signals import resume_command

    if is_main(plan_here()):
        again = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        when = "If torchrun does not start it again" if again else "To resume"
        say(console, f"{saved} {when}: {resume_command(sys.argv[1:])}")
    raise KeyboardInterrupt
