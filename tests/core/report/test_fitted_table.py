"""Tables on terminals of 80 columns: no title, word or number is cut."""

import io

from rich.console import Console

from bothways.core.report.sections import TableSection
from bothways.core.report.terminal import render_report, text_table
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


def test_titles_are_broken_at_blanks():
    lines = printed(render_report(TableSection("", TITLES, ROWS)))
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    assert [line.split() for line in lines[1:3]] == [
        ["accuracy", "accuracy"],
        ["task", "metric", "examples", "mean", "deviation", "published"],
    ]


def test_a_table_that_is_too_wide_has_a_line_for_each_cell():
    lines = printed(render_report(TableSection("Measured", TITLES, ROWS)), width=60)
    assert lines == [
        "Measured",
        "CoLA",
        "  metric              Matthews correlation",
        "  examples            1,043",
        "  accuracy mean       0.5512",
        "  accuracy deviation  0.0213",
        "  published           0.605",
        "SST-2",
        "  examples            872",
        "  accuracy mean       0.9",
        "  accuracy deviation  0",
        "  published           1",
    ]
    models = [f"/runs/a-model-[{number}]" for number in range(6)]
    lines = printed(text_table("", ["metric", *models], [["accuracy", *["0.5000"] * 6]]))
    assert lines[:2] == ["accuracy", "  /runs/a-model-[0]  0.5000"]


def test_long_cells_are_broken_into_lines():
    lines = printed(render_report(TableSection("", ["setting", "value"], [["a", "word " * 40]])))
    assert max(map(len, lines)) <= 80
    assert " ".join(lines).split().count("word") == 40
