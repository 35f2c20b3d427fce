"""Messages of interrupted commands: what is kept and how to resume."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from bothways.core.terminal import say

if TYPE_CHECKING:
    from rich.console import Console


@contextlib.contextmanager
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
