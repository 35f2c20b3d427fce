"""Shared by commands: chosen columns, progress on standard error, and how to resume."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from bothways.core.terminal import say

if TYPE_CHECKING:
    from rich.console import Console

    from bothways.core.progress import Progress
    from bothways.prediction.engine import PredictionCounts
    from bothways.prediction.predictor import Predictor
    from bothways.tasks.base import Reading


def asked(opened: Predictor, **columns: str | None) -> Any:
    """Return the named columns as the column type of the task.

    Raises:
        ConfigError: the task has no such column.
    """
    from bothways.core.config import reader as configs

    named = {name: value for name, value in columns.items() if value is not None}
    columns_type = type(opened.task.task.columns)  # type: ignore[attr-defined]
    return configs.read(columns_type, named, where="columns") if named else None


def say_guess(opened: Predictor, reading: Reading[Any], given: object, source: str) -> None:
    """Print on standard error which columns were guessed, if they differ from training."""
    columns, trained = (getattr(each.task, "columns", None) for each in (reading, opened.task))
    same = (
        all(name is None or name == getattr(trained, role) for role, name in vars(columns).items())
        if columns
        else True
    )
    if given is None and not same and _has_columns(source):
        print(f"note: the columns are guessed: {columns}", file=sys.stderr)


def _has_columns(source: str) -> bool:
    """Return whether the source has columns, unlike plain text with one text per line."""
    from bothways.data.text_io import STDIN

    return source != STDIN and ".txt" not in Path(source).suffixes


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
    """Count predictions and show a bar with the number of examples and the time left.

    Where standard error is no terminal, a line is printed every ten seconds instead.

    Args:
        hidden: show neither.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from bothways.core.stages import counting

    console = Console(stderr=True)
    if not (hidden or console.is_terminal):
        yield counting(reading, _Lines(what))
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[count]:,.0f} examples"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        bar = progress.add_task(what, total=None if reading.share is None else 1.0, count=0)
        yield counting(
            reading, lambda share, count: progress.update(bar, completed=share, count=count)
        )


SECONDS_PER_LINE = 10.0
"""The time between two lines of progress in a file or a pipe."""


class _Lines:
    """A receiver of the share done and the number of examples, which prints lines."""

    def __init__(self, what: str) -> None:
        from bothways.core.progress import TimeLeft

        self._what, self._left, self._printed = what, TimeLeft(), time.monotonic()

    def __call__(self, share: float | None, count: float) -> None:
        part = "" if share is None else f", {self._left.said(share)}"
        if time.monotonic() - self._printed >= SECONDS_PER_LINE:
            self._printed = time.monotonic()
            print(f"{self._what}: {count:,.0f} examples{part}", file=sys.stderr, flush=True)


@contextmanager
def terminal_progress(console: Console, *, hidden: bool = False) -> Iterator[Progress]:
    """Yield a progress receiver that shows a bar with the time left; only on a terminal.

    The bar vanishes at the end; messages stay.
    """
    from rich import progress as rich_progress

    columns = (
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.BarColumn(),
        rich_progress.TaskProgressColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    hidden = hidden or console.quiet or not console.is_terminal
    bar = rich_progress.Progress(*columns, console=console, transient=True, disable=hidden)
    with bar:
        yield _Bar(bar)


class MessageProgress:
    """A `core.progress.Progress` that prints messages only, next to another live display."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def stage(self, name: str, total: float | int | None = None) -> None:
        """Show nothing."""

    def advance(self, done: float | int) -> None:
        """Show nothing."""

    def message(self, text: str) -> None:
        """Print a line."""
        say(self._console, text)


class _Bar:
    """A `core.progress.Progress` that draws with rich."""

    def __init__(self, bar: Any) -> None:
        self._bar, self._line = bar, bar.add_task("", total=None, visible=False)

    def stage(self, name: str, total: float | int | None = None) -> None:
        """Begin a stage, from 0 on."""
        self._bar.reset(self._line, description=name, total=total, visible=True)

    def advance(self, done: float | int) -> None:
        """Move the bar."""
        # rich measures the time left from the first value that is not 0.
        self._bar.update(self._line, completed=max(done, 1e-9))

    def message(self, text: str) -> None:
        """Print a line above the bar."""
        say(self._bar.console, text)


@contextmanager
def keeping(out: Path, console: Console, kept: str = "Finished work") -> Iterator[None]:
    """Report on Ctrl-C which work is kept in the folder and how to resume."""
    try:
        yield
    except KeyboardInterrupt:
        say(console, f"Stopped. {kept} is kept in {out}; run the same command to continue.")
        raise


def check_begun(out: Path) -> None:
    """Print a note if there is no run to resume: a new one starts."""
    if not out.exists():
        print(f"note: {out} has no run to resume: starting one", file=sys.stderr)


def stop_saved(console: Console, saved: str = "Saved.") -> NoReturn:
    """Print the command that resumes an interrupted run, then raise KeyboardInterrupt."""
    from bothways.training.signals import resume_command

    say(console, f"{saved} To resume: {resume_command(sys.argv[1:])}")
    raise KeyboardInterrupt
