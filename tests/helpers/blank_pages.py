"""Fixtures for tests of runs, most of which do not read the page that a run ends with."""

from __future__ import annotations

import pytest


@pytest.fixture
def pages() -> None:
    """Ask for the pages of runs in this test."""


@pytest.fixture(autouse=True)
def blank_pages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the pages of runs empty: to draw one takes as long as tens of steps of a small model."""
    if "pages" not in request.fixturenames:
        touch = lambda file, *_: file.touch()  # noqa: E731
        monkeypatch.setattr("bothways.pretraining.run.write_run_page", touch)
        touch_in = lambda run, folder, progress: touch(folder / "report.html")  # noqa: E731
        monkeypatch.setattr("bothways.finetuning.run._write_report", touch_in)
