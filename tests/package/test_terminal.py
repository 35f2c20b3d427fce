"""Standard output is the data's: a terminal at standard error changes none of its bytes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from terminal import run_command
from toy_bulk import make_classifier, make_rows, write_rows

ENVIRONMENTS = {
    "terminal": {},
    "colours": {"FORCE_COLOR": "1"},
    "dumb": {"TERM": "dumb"},
    "narrow": {"COLUMNS": "40"},
}
_COLOURS = re.compile(rb"\x1b\[[\d;]*m")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("terminal")
    make_classifier(folder)
    write_rows(folder / "rows.tsv", make_rows(60))
    return folder


LINES = ["predict classifier rows.tsv", "describe classifier"]


@pytest.mark.parametrize("line", LINES)
def test_a_terminal_changes_no_byte_of_the_output(
    line: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    words, output = line.split(), tmp_path / "output"
    for environment in ENVIRONMENTS.values():
        plain = run_command(words, output, terminal=False, environment=environment)
        shown = run_command(words, output, columns=200, environment=environment)
        assert (plain.status, shown.status) == (0, 0)
        assert len(plain.output) > 100
        assert shown.output == plain.output
        assert b"\x1b" not in _COLOURS.sub(b"", shown.output)


@pytest.mark.parametrize("line", LINES)
def test_a_reader_that_ends_is_no_error(
    line: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    ended = run_command(line.split(), tmp_path / "output", reader_ends=True)
    assert ended.status == 0
    assert b"rror" not in ended.messages


def test_no_bar_is_drawn_where_it_could_not_be_erased(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    words = ["predict", "classifier", "rows.tsv"]
    bar = run_command(words, tmp_path / "output")
    assert b"predicting" in bar.messages
    for terminal, environment in ((False, {"FORCE_COLOR": "1"}), (True, {"TERM": "dumb"})):
        plain = run_command(words, tmp_path / "output", terminal=terminal, environment=environment)
        assert b"predicting" not in plain.messages
        assert b"\x1b" not in plain.messages
