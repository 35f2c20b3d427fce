"""Progress of long jobs: the protocol they report to."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, runtime_checkable

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
    def stage(self, name: str, total: float | int | None = None) -> None:
        """Show nothing."""

    def advance(self, done: float | int, note: str | None = None) -> None:
        """Show nothing."""

    def message(self, text: str) -> None:
        """Show nothing."""


SILENT: Progress = _Silent()
"""Reports nothing."""


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
        """Begin a stage of this part."""
        self.whole.stage(f"{self.name}: {name}", total)

    def advance(self, done: float | int, note: str | None = None) -> None:
        """Report what is done of the stage."""
        self.whole.advance(done, note)

    def message(self, text: str) -> None:
        """Show a line of this part, unless it is a note or warning that another one had."""
        if text in self.said:
            return
        if text.startswith(("note: ", "warning: ")):
            self.said.add(text)
        self.whole.message(f"{self.name}: {text}")


def track(items: Many[T], progress: Progress, name: str, every: int = 1) -> Iterator[T]:
    """Yield `items` as a stage of `progress`, which advances before every `every`th item."""
    progress.stage(name, len(items))
    for number, item in enumerate(items):
        if number % every == 0:
            progress.advance(number)
        yield item
    progress.advance(len(items))
