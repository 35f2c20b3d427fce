"""How far a job has come that goes through stages one after another: a bar on standard error, gone at the end."""

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
"""Is told which stage is under way, and how much of it is done, from 0 to 1; none where nobody knows."""

BEGUN = 1e-9
"""The bar measures the time left from the first share that is not 0."""


def unseen(stage: str, share: float | None) -> None:
    """Where nobody watches."""


@contextlib.contextmanager
def stages(console: Console) -> Iterator[OnStage]:
    """A bar for the stage that is under way, with the time that it still takes; only on a terminal."""
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn()
    hidden = console.quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        stage, line = "", bar.add_task("", total=None, visible=False)

        def on_stage(name: str, share: float | None) -> None:
            """Show it; a new stage begins a new measurement."""
            nonlocal stage
            total = None if share is None else 1.0
            if name != stage:
                stage = name
                bar.reset(line, description=name, total=total, visible=True)
            bar.update(line, total=total, completed=max(share or 0.0, BEGUN))

        yield on_stage


def part_of(on_share: OnShare, done: int, count: int, total: int) -> OnShare:
    """Tells of the whole, where `done` of `total` are done, and is told of the next `count`."""
    return lambda share: on_share((done + share * count) / total)


def followed(items: Many[T], on_share: OnShare, every: int = 1) -> Iterator[T]:
    """The same items; before each, or every so many of them, how much is done is told."""
    for number, item in enumerate(items):
        if number % every == 0:
            on_share(number / len(items))
        yield item


def counting(
    reading: Reading[Any], tell: Callable[[float | None, float], object]
) -> PredictionCounts:
    """A tally of what is made of a reading; after each batch it tells how much is done, none where nobody knows, and how many
    examples. What is read together is done together."""
    share, tally = reading.share, PredictionCounts()
    tally.on_count = lambda count: tell(
        None if share is None else share() * count / tally.examples, count
    )
    return tally


def followed_reading(
    reading: Reading[Any], stage: str, on_stage: OnStage, every: int = 64
) -> Reading[Any]:
    """The same reading; for every so many examples, how much of it is done is told."""

    def examples() -> Iterator[Any]:
        for number, example in enumerate(reading.examples):
            if number % every == 0:
                on_stage(stage, None if reading.share is None else reading.share())
            yield example

    return dataclasses.replace(reading, examples=examples())
