"""Progress of long jobs: the protocol they report to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from typing import Protocol, TypeVar, runtime_checkable

from bothways.core.terminal import time_text

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

    def advance(self, done: float | int) -> None:
        """Report that `done` of the stage's total is done: an absolute value, not an increment."""

    def message(self, text: str) -> None:
        """Show a line that remains visible after the stage."""


class _Silent:
    def stage(self, name: str, total: float | int | None = None) -> None:
        """Show nothing."""

    def advance(self, done: float | int) -> None:
        """Show nothing."""

    def message(self, text: str) -> None:
        """Show nothing."""


SILENT: Progress = _Silent()
"""Reports nothing."""


def track(items: Many[T], progress: Progress, name: str, every: int = 1) -> Iterator[T]:
    """Yield `items` as a stage of `progress`, which advances before every `every`th item."""
    progress.stage(name, len(items))
    for number, item in enumerate(items):
        if number % every == 0:
            progress.advance(number)
        yield item
    progress.advance(len(items))


# What follows is replaced by `Progress`.

OnShare = Callable[[float], None]
"""Receives the share that is done, from 0 to 1."""


def untold(share: float) -> None:
    """Ignore the share."""


class TimeLeft:
    """An estimate of the time left, from the share done and the time since the first share."""

    def __init__(self) -> None:
        self._begin: tuple[float, float] | None = None

    def said(self, share: float) -> str:
        """Return "40% done, 0:01:30 left"; the first call, which starts the clock, no time left."""
        now = time.monotonic()
        start, before = self._begin = self._begin or (now, share)
        if share <= before:
            return f"{share:.0%} done"
        left = (now - start) * max(0.0, 1 - share) / (share - before)
        return f"{share:.0%} done, {time_text(left)} left"
