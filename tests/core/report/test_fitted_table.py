"""Tables on terminals of 80 columns: no title, word or number is cut."""

from __future__ import annotations

import io

from rich.console import Console

from bothways.core.report.sections import TableSection
from bothways.core.report.terminal import metric_table, render_report
from bothways.core.terminal import show_lines

TITLES = ["task", "metric", "examples", "accuracy mean", "accuracy deviation", "published"]
ROWS = [
    ["CoLA", "Matthews correlation", 1043, 0.5512, 0.0213, 0.605],
    ["SST-2", "", 872, 0.9, 0, 1],
]


def printed(*parts: object, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    show_lines(console, *parts)  # type: ignore[arg-type]
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_titles_are_broken_at_blanks() -> None:
    lines = printed(render_report(TableSection("", TITLES, ROWS)))
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    assert [line.split() for line in lines[1:3]] == [
        ["accuracy", "accuracy"],
        ["task", "metric", "examples", "mean", "deviation", "published"],
    ]


def test_no_cell_of_a_table_that_is_too_wide_is_cut() -> None:
    models = {f"/runs/a-model-[{number}]": {"accuracy": 0.5} for number in range(6)}
    for width in (60, 80):
        lines = printed(metric_table("", models), width=width)
        assert max(map(len, lines)) <= width
        assert "".join("".join(lines).split()).count("0.5000") == 6


def test_long_cells_are_broken_into_lines() -> None:
    lines = printed(render_report(TableSection("", ["setting", "value"], [["a", "word " * 40]])))
    assert max(map(len, lines)) <= 80
    assert " ".join(lines).split().count("word") == 40
