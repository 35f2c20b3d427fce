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


def shell_words(line: str) -> list[str]:
    """Return the words of a line, with the files for one with a *."""
    return [
        found
        for word in shlex.split(line)
        for found in (sorted(glob.glob(word)) if "*" in word else [word])
    ]


def run_shell_line(line: str) -> str:
    """Return what a `bothways` command prints; pipes, redirections and * as in a shell."""
    before, command = line.rsplit(" | ", 1) if " | " in line else ("", line)
    command, _, target = command.partition(" > ")
    given = "".join(f"{word}\n" for word in shlex.split(before)[1:])
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given.encode()), "utf8"))
        run_line(*shell_words(command)[1:])
    if target:
        Path(target).write_text(printed.getvalue(), "utf8")
    return printed.getvalue()
