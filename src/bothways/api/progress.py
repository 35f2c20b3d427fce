"""Shared by commands: chosen columns, progress on standard error, and how to resume."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from bothways.core.bar import announce, error_console, terminal_progress
from bothways.core.terminal import say, write_stderr

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
    columns_type = type(opened.learner.task.columns)  # type: ignore[attr-defined]
    return configs.read(columns_type, named, where="columns") if named else None


def say_guess(opened: Predictor, reading: Reading[Any], given: object, source: str) -> None:
    """Print on standard error which columns were guessed, if they differ from training."""
    from bothways.tasks.columns import reads_as_trained

    columns, trained = (getattr(each.task, "columns", None) for each in (reading, opened.learner))
    if given is None and not reads_as_trained(columns, trained) and _has_columns(source):
        write_stderr(f"note: the columns are guessed: {columns}")


def _has_columns(source: str) -> bool:
    """Return whether the source has columns, unlike plain text with one text per line."""
    from bothways.data.text_io import is_stream

    return not is_stream(source) and ".txt" not in Path(source).suffixes


def say_replaced(settings: object, base: object) -> None:
    """Print a note for each union of which settings have another member than their recipe."""
    from bothways.core.config.reader import replaced_members

    for each in replaced_members(settings, base):
        say(error_console(), f"note: {each}")


def say_kernels(device: str) -> None:
    """Let the next progress say which kernels a long command computes with; nothing for a GPU."""
    from bothways.core.runtime.devices import choose_device
    from bothways.model.kernels.library import describe_kernels
    from bothways.training.parallel import is_main, plan_here

    if choose_device(device).type == "cpu" and is_main(plan_here()):
        announce(describe_kernels())


@contextmanager
def watched(
    reading: Reading[Any], what: str, *, hidden: bool = False
) -> Iterator[PredictionCounts]:
    """Count predictions and show their progress.

    Where standard error is not a terminal, a line is printed every ten seconds instead.

    Args:
        hidden: show neither.
    """
    from bothways.prediction.engine import counting

    with terminal_progress(hidden=hidden) as progress:
        yield counting(reading, progress, what)


@contextmanager
def keeping(out: Path, console: Console, kept: str = "Finished work") -> Iterator[None]:
    """Report on Ctrl-C which work is kept in the folder and how to resume."""
    try:
        yield
    except KeyboardInterrupt:
        left = "Nothing is finished, and nothing is left behind."
        if any(out.glob("*")):
            left = f"{kept} is kept in {out}; run the same command to continue."
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # another one would cut the message
        try:
            say(console, f"Stopped. {left}")
        finally:
            signal.signal(signal.SIGINT, before)
        raise


@contextmanager
def run_progress(out: Path, console: Console) -> Iterator[Progress]:
    """Show the progress of runs in a folder; if interrupted outside of a step, say how to go on.

    A run that is interrupted in a step saves and returns (`training.signals`).
    """
    from bothways.training.parallel import is_main, plan_here

    with terminal_progress(console) as progress:
        try:
            yield progress
        except KeyboardInterrupt:
            if next(out.rglob("step-*/manifest.json"), None) is not None:
                stop_saved(console, "The checkpoints are kept.")
            if is_main(plan_here()):
                say(console, "Stopped before the first checkpoint: the same command begins again.")
            raise


def check_begun(out: Path) -> None:
    """Print a note if there is no run to resume: a new one starts."""
    if not out.exists():
        write_stderr(f"note: {out} has no run to resume: starting one")


def stop_saved(console: Console, saved: str = "Saved.") -> NoReturn:
    """Print the command that resumes an interrupted run, then raise KeyboardInterrupt.

    The main rank prints. All raise: a rank that ended with status 0 would tell torchrun that its
    part of the run is finished, and its machine would not be used again.
    """
    from bothways.training.parallel import is_main, plan_here
    from bothways.training.signals import resume_command

    if is_main(plan_here()):
        again = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        when = "If torchrun does not start it again" if again else "To resume"
        say(console, f"{saved} {when}: {resume_command(sys.argv[1:])}")
    raise KeyboardInterrupt
