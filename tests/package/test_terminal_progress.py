"""Progress on standard error: a bar on a terminal, else a line now and then."""

import io
import os
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from bothways.core import progress as shown
from bothways.core.progress import terminal_progress
from bothways.core.terminal import write_stderr


def text_of(console: Console) -> str:
    return console.file.getvalue()


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    found = SimpleNamespace(now=0.0)
    monkeypatch.setattr(shown.time, "monotonic", lambda: found.now)
    return found


def console_of(clock: SimpleNamespace, **options: Any) -> Console:
    return Console(file=io.StringIO(), get_time=lambda: clock.now, **options)


def test_a_terminal_shows_the_stage_and_the_time_left_and_forgets_them(clock):
    console = console_of(clock, force_terminal=True, width=100)
    with terminal_progress(console) as progress:
        progress.stage("reading", 10)
        progress.advance(0)
        clock.now = 600.0
        progress.advance(9)
        progress.stage("scoring [0]", 4)  # the second is measured by itself
        progress.advance(0)
        clock.now = 610.0
        progress.advance(1)
    assert re.search(r"scoring \[0\].*25%.*0:00:3[01]", text_of(console))  # rich rounds up
    assert text_of(console).endswith("\x1b[2K")  # the line is erased


def test_a_stage_of_unknown_length_shows_how_much_is_done(clock):
    console = console_of(clock, force_terminal=True, width=100)
    with terminal_progress(console) as progress:
        progress.stage("counting", 2)
        progress.advance(1)
        progress.stage("reading")
        progress.advance(1234)
        progress.message("note: [/x]")
    last = [line for line in text_of(console).splitlines() if "reading" in line][-1]
    assert "1,234" in last
    assert "%" not in last
    assert "note: [/x]\n" in text_of(console)


@pytest.mark.parametrize(
    "options", [{"quiet": True, "force_terminal": True}, {"force_terminal": False}]
)
def test_elsewhere_a_stage_shows_nothing(clock, options):
    console = console_of(clock, **options)
    with terminal_progress(console) as progress:
        progress.stage("reading")
        progress.advance(0.5)
    assert text_of(console) == ""


def test_elsewhere_notes_are_a_line_now_and_then(clock):
    console = console_of(clock, width=200)
    with terminal_progress(console) as progress:
        progress.stage("training", 1.0)
        progress.advance(0.0)
        for step in range(1, 31):
            clock.now += 1.0
            progress.advance(step / 30, f"step {step}")
        progress.message("evaluation step 30")
    assert re.fullmatch(  # rich rounds up
        r"training: step 10, 33% done, 0:00:2[01] left\n"
        r"training: step 20, 67% done, 0:00:1[01] left\n"
        r"training: step 30, 100% done, 0:00:00 left\n"
        r"evaluation step 30\n",
        text_of(console),
    )


@pytest.mark.parametrize("width", [120, 80, 60])
def test_a_narrow_terminal_keeps_the_bar_and_the_time_left(clock, width):
    console = console_of(clock, width=width, force_terminal=True)
    with terminal_progress(console) as progress:
        progress.stage("training", 1.0)
        progress.advance(0.0)
        clock.now += 3722.0  # rich rounds up
        progress.advance(0.5, "step 40 · masked 6.500 (3.1% right) · pair 0.690 · rate 1.00e-04")
    last = [line for line in text_of(console).splitlines() if "training" in line][-1]
    assert "1:02:03" in last
    assert "step 40" in last
    assert "━━━" in last
    assert len(re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", last)) <= width


@pytest.mark.parametrize("gone", ["reader", "terminal", "stream"])
def test_progress_without_a_reader_ends_no_run(gone, monkeypatch):
    if gone == "stream":
        monkeypatch.setattr(sys, "stderr", None)
    else:
        reader, writer = os.pipe() if gone == "reader" else os.openpty()
        os.close(reader)
        monkeypatch.setattr(sys, "stderr", os.fdopen(writer, "w"))
    with terminal_progress() as progress:
        progress.stage("training", 1.0)
        progress.message("note: saved")
    write_stderr("note: done")
    if sys.stderr is not None:
        sys.stderr.close()
