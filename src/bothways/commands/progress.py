"""What commands that read examples share: the columns that were asked for, and a progress bar on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bothways.recipes.finetuned import Opened
    from bothways.tasks.definition import Reading
    from bothways.tasks.task import Tally


def asked(opened: Opened, **columns: str | None) -> Any:
    """The columns of the task that are named, as its own type; ConfigError for one that it does not have."""
    from bothways.core import config as configs

    named = {name: value for name, value in columns.items() if value is not None}
    return configs.read(type(opened.task.definition.columns), named, where="columns") if named else None  # type: ignore[attr-defined]


def say_guess(opened: Opened, reading: Reading[Any], given: object, source: str) -> None:
    """On standard error, which columns are read where nobody has named them and the model was trained on others."""
    columns, trained = (getattr(each.definition, "columns", None) for each in (reading, opened.task))
    same = all(name is None or name == getattr(trained, role) for role, name in vars(columns).items()) if columns else True
    if given is None and not same and _has_columns(source):
        print(f"note: the columns are guessed: {columns}", file=sys.stderr)


def _has_columns(source: str) -> bool:
    """Whether it is no plain text, each line of which is one."""
    from pathlib import Path

    from bothways.tasks.tables import STDIN

    return source != STDIN and ".txt" not in Path(source).suffixes


@contextmanager
def watched(reading: Reading[Any], what: str, *, hidden: bool = False) -> Iterator[Tally]:
    """A tally with a bar: how much of a reading is done, how many examples, the time left. Gone when it is closed.

    Args:
        hidden: whether there is no bar, even on a terminal.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from bothways.recipes.stages import counting

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[count]:,.0f} examples"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=hidden or not console.is_terminal) as progress:
        bar = progress.add_task(what, total=None if reading.share is None else 1.0, count=0)
        yield counting(reading, lambda share, count: progress.update(bar, completed=share, count=count))
