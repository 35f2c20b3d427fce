"""Reports: complete, self-contained, escaped, well-formed, the same in browser and terminal; tables of any width."""

import io
import math
import re
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given, strategies as st
from matplotlib.figure import Figure
from rich.console import Console

from bothways.cli.options import CommandTable
from bothways.core.errors import ResourceError
from bothways.core.report import html, sections
from bothways.core.report.html import draw, metrics_html, write_html
from bothways.core.report.sections import TableSection
from bothways.core.report.terminal import render_report, show, sparkline, table_cells
from bothways.core.terminal import show_lines
from bothways.tasks import predictions

HOSTILE = "<script>alert('x')</script> & $x^2$"
RUNS = {"pre-trained": [0.75, 0.77, 0.79], f"scratch {HOSTILE}": [0.5]}
COMPARISON = sections.ComparisonChart("Which wins?", "accuracy", RUNS, {"coin": 0.5}, percent=True)
LOSSES = sections.Line("training", [0, 10_000, 20_000], [6.5, 5.0, 4.25])
CURVES = sections.Curves("Loss curve", "tokens", "nats", [LOSSES], {"unigram": 6.47})
POINT = [sections.Line("one point", [1], [0.25])]
SHARES = sections.Curves("Shares", "tokens", "share", POINT, percent=True, note="a note to curves")
CONFUSION = sections.ConfusionMatrix(
    "Mixed up", ["yes", HOSTILE], [[12345, 1], [2, 7]], note="a note to confusions"
)
LINE = ((0, 0), (1, 1))
SCATTER = sections.Scatter(
    "A cloud", "true", "predicted", [0.0, 1.0], [0.5, 0.75], LINE, note="a note to a cloud"
)
GUESSES = [sections.ReportGuess("cat", 0.5, True), sections.ReportGuess(HOSTILE, 0.25, False)]
EXAMPLE = sections.ReportExample(["the ", sections.Marked("[MASK]"), " sat"], "cat", GUESSES)
SECONDS = [["read", 12.5], ["all", 12345]]
STAGES = TableSection("Stages", ["stage", "seconds"], SECONDS, total=True, note="a note to a table")
SETTINGS = TableSection("Settings", ["", ""], [["width", 256], ["empty", None]])
REPORT = sections.Report(
    title="A title",
    headline=f"It works {HOSTILE}",
    lead="What was done.",
    sections=[
        sections.KeyFigures([sections.KeyFigure("accuracy", "77.0 %", "± 2.0")]),
        COMPARISON,
        CURVES,
        SHARES,
        STAGES,
        CONFUSION,
        SCATTER,
        sections.ExampleSection("Filled", [EXAMPLE]),
        sections.Prose("Why", ["First paragraph.", "Second paragraph."]),
        sections.Details("More", [SETTINGS]),
    ],
    colophon="made by a test",
)


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("page") / "report.html"
    write_html(REPORT, file)
    return file.read_text(encoding="utf8")


@pytest.fixture(scope="module")
def drawn(page) -> list[str]:
    """The charts of the page: a comparison, curves, shares, a confusion, a cloud."""
    return re.findall(r"<svg.*?</svg>", page, re.DOTALL)


VOID = {"meta", "br", "link", "img", "input", "hr"}


class Outline(HTMLParser):
    """Tags that are opened and closed in pairs, ids, and the text outside of style and script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.words = ""
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "script"} & set(self.open):
            self.words += data


def terminal(report: sections.Report) -> str:
    console = Console(width=120, file=io.StringIO(), color_system=None)
    show(report, console)
    return console.file.getvalue()


def test_page_is_complete_and_well_formed(page):
    outline = Outline(page)
    expected = [
        "A title", REPORT.headline, "What was done.", "77.0 %", "± 2.0", "Which wins?", "77.0 % ± 2.0 %", "Loss curve",
        "unigram, 6.470", "a note to curves", "Stages", "12,345", "a note to a table", "the [MASK] sat", "50.0 %", HOSTILE,
        "Second paragraph.", "Settings", "256", "made by a test", "Mixed up", "a note to confusions", "a note to a cloud",
        "2 points: true against predicted",
    ]  # fmt: skip
    assert [text for text in expected if text.replace(" %", "\xa0%") not in outline.words] == []
    assert len(outline.ids) == len(set(outline.ids))
    assert outline.tags.count("svg") == 5
    assert re.findall(r"<th[^>]*></th>", page) == []


def test_page_marks_the_right_answer_alone_and_has_the_counts_row_by_row(page):
    assert re.findall(r'<li class="right"[^>]*><span>(\w+)', page) == ["cat"]
    assert re.findall(r'<li style="--share: (.*?)%">', page) == ["25.0"]
    counts = '<td class="number">12,345</td><td class="number">1</td></tr>'
    assert f'<th scope="row">yes</th>{counts}' in page


def test_page_needs_nothing_else_and_runs_nothing_foreign(page):
    assert "http" not in page
    assert not re.search(r"<link|<img|<iframe|@import|\bsrc=", page)
    assert set(re.findall(r"url\((.)", page)) <= {"#"}
    assert page.count("<script>") == 1
    assert "<script>alert" not in page


def test_chart_takes_its_colours_and_letters_from_the_page(drawn):
    for svg in drawn:
        assert "#0102" not in svg
        assert "var(--faint)" in svg
        assert "var(--series-0)" in svg
        assert "font-family" not in svg
        assert not re.search(r"font: ", svg)
        assert set(re.findall(r"(?:fill|stroke): (#\w+)", svg)) == set()


def axes_of(draw_in, chart):
    axes = Figure().subplots()
    draw_in(axes, chart)
    return axes


def test_a_confusion_is_as_dark_as_its_share_of_the_row():
    axes = axes_of(html._draw_confusion, sections.ConfusionMatrix("", ["a", "b"], [[3, 1], [0, 4]]))
    shares = {
        (square.get_x() + 0.5, square.get_y() + 0.5): square.get_alpha() for square in axes.patches
    }
    assert shares == pytest.approx({(0, 0): 0.525, (1, 0): 0.175, (0, 1): 0.0, (1, 1): 0.7})
    counts = {text.xy: text.get_text() for text in axes.texts}
    assert counts == {(0, 0): "3", (1, 0): "1", (0, 1): "0", (1, 1): "4"}
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted", "true")
    assert axes.get_ylim() == (1.5, -0.5)  # the first row is the upper one


def test_names_are_in_the_legend_whatever_their_letters():
    """matplotlib leaves out "_name", and warns of letters that its own font lacks."""
    names = ("训练", "_run", "$x$")
    lines = [sections.Line(name, [1, 2], [1, at]) for at, name in enumerate(names)]
    svg = draw(sections.Curves("Loss", "steps", "nats", lines, {"_基线": 1.5}))
    assert [name for name in (*names, "_基线") if name not in svg] == []


def test_threads_draw_the_same_and_leave_the_style_of_the_program():
    before, charts = dict(mpl.rcParams), [CURVES, CONFUSION]
    expected = [draw(chart) for chart in charts]
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(draw, charts * 3)] == expected * 3
    assert dict(mpl.rcParams) == before


def test_a_comparison_has_a_band_of_one_deviation_to_each_side_of_the_mean():
    axes = axes_of(
        html._draw_comparison,
        sections.ComparisonChart("", "m", {"a": [1.0, 2.0, 6.0], "b": [4.0]}, {"coin": 0.5}),
    )
    spread = np.std([1, 2, 6], ddof=1)
    bands = [
        (band.get_x(), band.get_width(), band.get_y() + band.get_height() / 2)
        for band in axes.patches
    ]
    assert bands == [pytest.approx((3 - spread, 2 * spread, 0)), pytest.approx((4, 0, 1))]
    lines = [list(line.get_xdata()) for line in axes.lines]
    assert lines == [[3, 3], [1, 2, 6], [4, 4], [4], [0.5, 0.5]]


def test_curves_have_their_points_and_short_numbers_at_the_axis():
    axes = axes_of(html._draw_curves, CURVES)
    points = [list(values) for values in axes.lines[0].get_data()]
    assert points == [[0, 10_000, 20_000], [6.5, 5.0, 4.25]]
    assert list(axes.lines[1].get_ydata()) == [6.47, 6.47]
    fast = sections.Curves("", "", "", [sections.Line("a", [1, 2], [5, 20_000])])
    assert axes_of(html._draw_curves, fast).yaxis.get_major_formatter()(20_000, 0) == "20 k"
    short = axes.xaxis.get_major_formatter()
    ticks = [short(value, 0) for value in (0.0, 500.0, 1e3, 2.5e6, 1e9)]
    assert ticks == ["0", "500", "1 k", "2.5 M", "1 G"]


def test_terminal_shows_the_same_figures_but_no_details():
    text = " ".join(terminal(REPORT).split())
    expected = [
        REPORT.headline, "accuracy 77.0 % ± 2.0", "pre-trained 77.0 % 2.0 % 75.0 % 77.0 % 79.0 %",
        "coin 50.0 %", "6.500 → 4.250", "Mixed up", "all 12,345", "yes 12,345 1",
        "A cloud: 2 points", "the [MASK] sat", "cat 50.0 %", "a note to a table",
        "Second paragraph.",
    ]  # fmt: skip
    assert [part for part in expected if part not in text] == []
    assert "Settings" not in text


def test_texts_cannot_command_a_terminal():
    clear = "\x1b[2J"
    guess = sections.ReportGuess(clear, 0.5, True)
    parts = [
        sections.ExampleSection(
            clear, [sections.ReportExample([clear, sections.Marked(clear)], clear, [guess])]
        ),
        sections.Prose(clear, [clear]),
        sections.Scatter(clear, "", "", [], []),
        sections.HeatMaps(clear, [], {}),
        TableSection(clear, [clear], [[clear]], note=clear),
    ]
    shown = terminal(sections.Report(clear, clear, clear, parts))
    assert "\x1b" not in shown
    assert shown.count(r"\x1b[2J") == 15


def test_numbers_are_readable():
    numbers = [3, 1234567, 0.123456, 98765.4, 2.0, 0.0, 600.0, -1.5, 0.9, 12.5, 0.000123456]
    assert [*map(sections.readable_number, numbers)] == [
        "3", "1,234,567", "0.1235", "98,765.4", "2.000", "0.0000", "600", "-1.500", "0.9000",
        "12.50", "0.0001235",
    ]  # fmt: skip


@pytest.mark.parametrize(("column", "texts"), [
    ([0.9, 0.8712, 1.0], ["0.900", "0.871", "1.000"]),
    ([math.nan, 0.9, 0.8712], ["nan", "0.9000", "0.8712"]),
    ([0.9, 0.8712, 0], ["0.9000", "0.8712", "0.0000"]),
    ([9.5, 10.25], ["9.50", "10.25"]),
    ([3, 1234], ["3", "1,234"]),
    ([0.9, 97.1754, 120], ["0.9000", "97.18", "120"]),  # of different sizes
    ([-5.25, float("nan")], ["-5.250", "nan"]),
    ([], []),
])  # fmt: skip
def test_numbers_of_a_column_have_equally_many_decimals(column, texts):
    table = sections.TableSection("", ["name", "value"], [["a", value] for value in column])
    assert [row[1] for row in table_cells(table)] == texts


def test_metrics_are_a_table_in_a_notebook():
    shown = metrics_html(
        "Tuned <here>", {"dev": {"f1": 0.9, "loss": 0.25}, "baseline": {"f1": 0.5}}
    )
    assert "Tuned &lt;here&gt;" in shown
    assert re.findall(r"<td[^>]*>(.*?)</td>", shown) == [
        "f1", "0.9000", "0.5000", "loss", "0.2500", ""
    ]  # fmt: skip


@pytest.mark.parametrize(("prediction", "title"), [
    (predictions.ClassPrediction("<b>", 1, {"a": 0.25, "<b>": 0.75}), "&lt;b&gt;"),
    (predictions.ClassPrediction(None, 1, {"a": 0.25, "<b>": 0.75}), "no label"),
    (predictions.MultilabelPrediction(("a", "<b>"), {"a": 0.25, "<b>": 0.75}), "a, &lt;b&gt;"),
    (predictions.MultilabelPrediction((), {"a": 0.25, "<b>": 0.75}), "no label"),
])  # fmt: skip
def test_labels_are_a_table_in_a_notebook(prediction, title):
    shown = prediction._repr_html_()
    assert re.findall(r"<(?:h\d|caption|figcaption)[^>]*>(.*?)</", shown) == [title]
    assert re.findall(r"<td[^>]*>(.*?)</td>", shown) == ["&lt;b&gt;", "0.7500", "a", "0.2500"]


def test_a_notebook_shows_ten_of_many_labels_and_other_predictions_as_text():
    many = predictions.ClassPrediction("l0", 0, {f"l{n}": 1 / (n + 2) for n in range(77)})
    shown = many._repr_html_()
    assert shown.count("<td") == 20
    assert "10 of 77 labels" in shown
    assert predictions.ScorePrediction(1.0)._repr_html_() is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=99))
def test_sparkline_shows_lowest_and_highest(values):
    line = sparkline(sections.Line("", range(len(values)), values))
    assert len(line) == min(32, len(values))
    if len(line) == len(values) and max(values) > min(values) + 1e-3:
        assert line[int(np.argmax(values))] == "█"
        assert line[int(np.argmin(values))] == "▁"


def test_file_that_cannot_be_written_is_an_error_of_the_users(tmp_path):
    odd = sections.Report("no UTF-8: \udcff", "", "", ())
    with pytest.raises(ResourceError, match="cannot be written"):
        write_html(odd, tmp_path / "no such folder" / "report.html")
    write_html(odd, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf8")
    assert "<title>no UTF-8: ?</title>" in page


TITLES = ["task", "metric", "examples", "accuracy mean", "accuracy deviation", "published"]
ROWS = [
    ["CoLA", "Matthews correlation", 1043, 0.5512, 0.0213, 0.605],
    ["SST-2", "", 872, 0.9, 0, 1],
]


def printed(*parts: object, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    show_lines(console, *parts)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


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
        "  accuracy mean       0.9000",
        "  accuracy deviation  0.0000",
        "  published           1.000",
    ]
    models = [f"/runs/a-model-[{number}]" for number in range(6)]
    lines = printed(CommandTable("", ["metric", *models], [["accuracy", *["0.5000"] * 6]]))
    assert lines[:2] == ["accuracy", "  /runs/a-model-[0]  0.5000"]


def test_long_cells_are_broken_into_lines():
    lines = printed(render_report(TableSection("", ["setting", "value"], [["a", "word " * 40]])))
    assert max(map(len, lines)) <= 80
    assert " ".join(lines).split().count("word") == 40
