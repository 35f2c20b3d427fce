"""Progress of a job in stages: a bar on standard error that disappears at the end."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from bothways.core.progress import OnShare
from bothways.prediction.engine import PredictionCounts
from bothways.tasks.base import Reading

T = TypeVar("T")

OnStage = Callable[[str, float | None], None]
"""Receives the current stage and the share of it that is done, from 0 to 1, None if unknown."""

BEGUN = 1e-9
"""The bar measures the time left from the first share that is not 0."""


def unseen(stage: str, share: float | None) -> None:
    """Ignore the stage."""


@contextlib.contextmanager
def stages(console: Console) -> Iterator[OnStage]:
    """Show a bar for the current stage, with the time left; only on a terminal."""
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn()
    hidden = console.quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        stage, line = "", bar.add_task("", total=None, visible=False)

        def on_stage(name: str, share: float | None) -> None:
            """Update the bar; a new stage restarts the clock."""
            nonlocal stage
            total = None if share is None else 1.0
            if name != stage:
                stage = name
                bar.reset(line, description=name, total=total, visible=True)
            bar.update(line, total=total, completed=max(share or 0.0, BEGUN))

        yield on_stage


def part_of(on_share: OnShare, done: int, count: int, total: int) -> OnShare:
    """Return a receiver for the next `count` of `total` units, of which `done` are done."""
    return lambda share: on_share((done + share * count) / total)


def followed(items: Many[T], on_share: OnShare, every: int = 1) -> Iterator[T]:
    """Yield the items; report the share before every `every`th one."""
    for number, item in enumerate(items):
        if number % every == 0:
            on_share(number / len(items))
        yield item


def counting(
    reading: Reading[Any], tell: Callable[[float | None, float], object]
) -> PredictionCounts:
    """Return counts that report the share done (None if unknown) and examples per batch."""
    share, tally = reading.share, PredictionCounts()
    tally.on_count = lambda count: tell(
        None if share is None else share() * count / tally.examples, count
    )
    return tally


def followed_reading(
    reading: Reading[Any], stage: str, on_stage: OnStage, every: int = 64
) -> Reading[Any]:
    """Return the same reading, which reports the share before every `every`th example."""

    def examples() -> Iterator[Any]:
        """Yield the examples and report the share before some of them."""
        for number, example in enumerate(reading.examples):
            if number % every == 0:
                on_stage(stage, None if reading.share is None else reading.share())
            yield example

    return dataclasses.replace(reading, examples=examples())
