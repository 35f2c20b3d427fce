"""Progress of long jobs: the protocol they report to, and the bar on a terminal, or lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence as Many
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from bothways.core.errors import ConfigError
from bothways.core.terminal import ErrorStream, printable, say, time_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar


T = TypeVar("T")


@runtime_checkable
class Progress(Protocol):
    """A receiver of progress reports, such as a bar on a terminal.

    A job goes through stages, one after another. Each stage begins with `stage` and ends with
    the next one or with the job:

        progress.stage("encoding", total=2_000)  # 2,000 documents
        progress.advance(500)                    # the first 500 are done
        progress.message("12 documents are empty")
    """

    def stage(self, name: str, total: float | int | None = None) -> None:
        """Begin a stage, replacing the current one.

        Args:
            name: what the job does now, such as "encoding".
            total: the amount of work, in any unit; None if it is unknown.
        """

    def advance(self, done: float | int, note: str | None = None) -> None:
        """Report that `done` of the stage's total is done: an absolute value, not an increment.

        Args:
            note: the current state in a few words, such as the loss; None keeps the last one.
        """

    def message(self, text: str) -> None:
        """Show a line that remains visible after the stage."""


class _Silent:
    def stage(self, *_: object, **__: object) -> None:
        """Show nothing."""

    advance = message = stage


SILENT: Progress = _Silent()


@dataclass(frozen=True)
class Part:
    """The progress of one of several similar jobs, such as the runs of a search.

    Its name precedes its stages and messages, which `whole` receives.

    Attributes:
        said: the notes and warnings of all parts, each of which is shown once.
    """

    whole: Progress
    name: str
    said: set[str] = field(default_factory=set)

    def stage(self, name: str, total: float | int | None = None) -> None:
        self.whole.stage(f"{self.name}: {name}", total)

    def advance(self, done: float | int, note: str | None = None) -> None:
        self.whole.advance(done, note)

    def message(self, text: str) -> None:
        """Show a line of this part, unless it is a note or warning that another one had."""
        if text in self.said:
            return
        if text.startswith(("note: ", "warning: ")):
            self.said.add(text)
        self.whole.message(f"{self.name}: {text}")


def track(items: Many[T], progress: Progress, name: str, interval: int = 1) -> Iterator[T]:
    """Yield `items` as a stage of `progress`, which advances before every `interval`th item."""
    progress.stage(name, len(items))
    for number, item in enumerate(items):
        if number % interval == 0:
            progress.advance(number)
        yield item
    progress.advance(len(items))


SECONDS_PER_LINE = 10.0
"""The time between two lines of progress in a file or a pipe."""
SPEED_PERIOD = 86_400.0
"""Seconds over which the speed of a stage is averaged; rich keeps its last 1,000 reports."""


@contextmanager
def shown_progress(progress: Any, notes: Iterable[str] = ()) -> Iterator[Progress]:
    """Yield the receiver of progress: of standard error, none, or the given one.

    Args:
        notes: messages to begin with.

    Raises:
        ConfigError: it is neither a truth value nor a receiver.
    """
    if not isinstance(progress, bool | Progress):
        message = f"is {progress!r}, which has no methods stage, advance and message"
        raise ConfigError(message, where="progress", fix="Give True, False or an object that has.")
    receiver: Any = SILENT if progress is False else progress
    with terminal_progress() if progress is True else nullcontext(receiver) as reporter:
        for note in notes:
            reporter.message(note)
        yield reporter


@contextmanager
def terminal_progress(
    console: Console | None = None, *, hidden: bool = False, announced: str | None = None
) -> Iterator[Progress]:
    """Yield a progress receiver: on a terminal a bar with the time left, else a line every ten
    seconds.

    The bar vanishes at the end; messages stay. Neither stream is redirected.

    Args:
        console: None for standard error.
        hidden: suppress the bar, even on a terminal.
        announced: a line to print with the first progress, or at the end. An error before that
            stands alone: of a work that does not begin nothing is said.
    """
    from rich import progress as rich_progress
    from rich.table import Column

    console = console or error_console()
    note = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    columns = (
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.BarColumn(bar_width=16),
        rich_progress.TaskProgressColumn(),
        rich_progress.TimeRemainingColumn(),
        rich_progress.TextColumn("{task.fields[note]}", markup=False, table_column=note),
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
        receiver = _Bar(bar, announced, lines=not (hidden or console.is_interactive))
        yield receiver
        receiver.begin()


def error_console() -> Console:
    """Return standard error, whose failures end no run."""
    from rich.console import Console

    # FORCE_COLOR makes a file or a pipe a terminal for rich, but no bar can be drawn over there.
    stream: Any = ErrorStream(sys.stderr)
    # A kernel of Jupyter gets lines, too: rich's own bars need a package of widgets there.
    interactive = None if stream.isatty() else False
    return Console(file=stream, force_interactive=interactive, force_jupyter=False, emoji=False)


class _Bar:
    """A `core.progress.Progress` that draws with rich."""

    def __init__(self, bar: Bar, announced: str | None, *, lines: bool) -> None:
        self._bar, self._announced = bar, announced
        self._lines, self._printed = lines, time.monotonic()
        self._line = bar.add_task("", total=None, visible=False, note="")

    def begin(self) -> None:
        if self._announced is not None:
            say(self._bar.console, self._announced)
        self._announced = None

    def stage(self, name: str, total: float | int | None = None) -> None:
        self._bar.remove_task(self._line)  # `reset` keeps a total where the new one is None
        self._line = self._bar.add_task(printable(name), total=total, note="")

    def advance(self, done: float | int, note: str | None = None) -> None:
        if done:
            self.begin()
        task = self._bar.tasks[0]
        text = f"{done:,.0f}" if note is None and task.total is None else note
        fields: dict[str, Any] = {} if text is None else {"note": printable(text)}
        # rich measures the time left from the first value that is not 0.
        self._bar.update(self._line, completed=max(done, 1e-9), **fields)
        if self._lines and time.monotonic() - self._printed >= SECONDS_PER_LINE:
            self._printed, left = time.monotonic(), task.time_remaining
            fields_shown = [
                task.fields["note"],
                f"{task.percentage:.0f}% done" if task.total else "",
                "" if left is None else f"{time_text(float(left))} left",
            ]
            say(self._bar.console, f"{task.description}: {', '.join(filter(None, fields_shown))}")

    def message(self, text: str) -> None:
        say(self._bar.console, text)
