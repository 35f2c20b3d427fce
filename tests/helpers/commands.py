"""Command lines, run in the process of a test."""

import glob
import io
import shlex
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from bothways.cli.main import app


def run_line(*words: object) -> None:
    """Run `bothways WORDS`; its mistakes are raised, and Ctrl-C."""
    app([*map(str, words)], result_action="return_value")


def run_shell_line(line: str) -> str:
    """Return what a `bothways` command prints; pipes, redirections and * as in a shell."""
    before, command = line.rsplit(" | ", 1) if " | " in line else ("", line)
    command, _, target = command.partition(" > ")
    given = "".join(f"{word}\n" for word in shlex.split(before)[1:])
    words = [
        found
        for word in shlex.split(command)[1:]
        for found in (sorted(glob.glob(word)) if "*" in word else [word])
    ]
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given.encode()), "utf8"))
        run_line(*words)
    if target:
        Path(target).write_text(printed.getvalue(), "utf8")
    return printed.getvalue()
