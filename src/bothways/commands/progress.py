"""What commands that read examples share: the columns that were asked for, and a progress bar on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bothways.prediction.engine import PredictionCounts
    from bothways.prediction.predictor import Predictor
    from bothways.tasks.task import Reading


def asked(opened: Predictor, **columns: str | None) -> Any:
    """The columns of the task that are named, as its own type; ConfigError for one that it does not have."""
    from bothways.core.config import reader as configs

    named = {name: value for name, value in columns.items() if value is not None}
    columns_type = type(opened.task.definition.columns)  # type: ignore[attr-defined]
    return configs.read(columns_type, named, where="columns") if named else None


def say_guess(opened: Predictor, reading: Reading[Any], given: object, source: str) -> None:
    """On standard error, which columns are read where nobody has named them and the model was trained on others."""
    columns, trained = (
        getattr(each.definition, "columns", None) for each in (reading, opened.task)
    )
    same = (
        all(name is None or name == getattr(trained, role) for role, name in vars(columns).items())
        if columns
        else True
    )
    if given is None and not same and _has_columns(source):
        print(f"note: the columns are guessed: {columns}", file=sys.stderr)


def _has_columns(source: str) -> bool:
    """Whether it is no plain text, each line of which is one."""
    from pathlib import Path

    from bothways.data.text_io import STDIN

    return source != STDIN and ".txt" not in Path(source).suffixes


@contextmanager
def watched(
    reading: Reading[Any], what: str, *, hidden: bool = False
) -> Iterator[PredictionCounts]:
    """A tally with a bar: how much of a reading is done, how many examples, the time left. Gone when it is closed.

    Args:
        hidden: whether there is no bar, even on a terminal.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from bothways.core.stages import counting

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[count]:,.0f} examples"),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=hidden or not console.is_terminal
    ) as progress:
        bar = progress.add_task(what, total=None if reading.share is None else 1.0, count=0)
        yield counting(
            reading, lambda share, count: progress.update(bar, completed=share, count=count)
        )
