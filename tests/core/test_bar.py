"""Progress is a line in a notebook."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from bothways.core import bar
from bothways.core.bar import in_notebook, shown_progress


class ZMQInteractiveShell:
    """Has the name of the shell of a kernel of Jupyter."""


class Handle:
    """Collects what a display shows."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def update(self, data: dict[str, str], raw: bool) -> None:
        assert raw
        self.lines.append(data["text/plain"])


def test_a_notebook_shows_one_line_and_keeps_messages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    handle, python, display = Handle(), types.ModuleType("IPython"), types.ModuleType("d")
    python.get_ipython = ZMQInteractiveShell  # type: ignore[attr-defined]
    display.display = lambda data, raw, display_id: handle  # type: ignore[attr-defined]
    assert not in_notebook()
    monkeypatch.setitem(sys.modules, "IPython", python)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(bar, "_UPDATE_SECONDS", 0.0)
    with shown_progress(True) as progress:
        progress.stage("training", 10)
        progress.advance(5, "loss 0.5")
        progress.stage("reading")
        progress.advance(1_000)
        progress.message("a note")
    shown: Any = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "a note\n")
    assert handle.lines[0] == "training"
    assert handle.lines[1].startswith("training: 50%, loss 0.5, ")
    assert handle.lines[2:] == ["reading", "reading: 1,000", ""]


def test_a_shell_without_notebook_is_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    python = types.ModuleType("IPython")
    python.get_ipython = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", python)
    assert not in_notebook()
