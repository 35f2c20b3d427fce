"""What commands say when they are interrupted: what is kept, and how to go on."""

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
def keeping(out: Path, console: Console, kept: str = "What is done") -> Iterator[None]:
    """Within, whoever interrupts is told that what is done, or what of it, is kept in this folder."""
    try:
        yield
    except KeyboardInterrupt:
        say(console, f"Stopped. {kept} is kept in {out}; the same command goes on from there.")
        raise


def check_begun(out: Path) -> None:
    """ResourceError: there is no run to go on with, whose folder is perhaps another one."""
    if not out.exists():
        from bothways.core.errors import ResourceError

        fix = "Look at --out, or leave --resume out to begin a run."
        raise ResourceError("--resume is given, but there is no such folder", where=out, fix=fix)


def stop_saved(console: Console, saved: str = "Saved.") -> NoReturn:
    """Say what goes on with a run that ended early with a checkpoint, then raise KeyboardInterrupt."""
    from bothways.training.signals import resume_command

    say(console, f"{saved} To go on: {resume_command(sys.argv[1:])}")
    raise KeyboardInterrupt
