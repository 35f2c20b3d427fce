"""A report as one self-contained HTML file: no external script, font, image or style sheet.

The page supports phones, dark mode, print and screen readers. jinja2 escapes all text; only the
charts, which this package draws, are inserted verbatim.

A chart is inline SVG that takes its colours and fonts from the page, in light and dark mode.
matplotlib draws with placeholder colours, one per role, which become CSS variables afterwards. Text
remains text, so that it can be searched, read aloud and set in the font of the page.
"""

from __future__ import annotations

import functools
import io
import re
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import assert_never

from bothways.core.errors import installed, optional, os_errors
from bothways.core.progress import Progress
from bothways.core.report import sections
from bothways.core.report.sections import Report, percentage, readable_number
from bothways.core.report.terminal import as_table, table_cells

if TYPE_CHECKING:
    from jinja2 import Template
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import Formatter

# Placeholders for the colours of the page: all different, and none that matplotlib uses by default.
INK, FAINT, GRID, CARD = "#010203", "#010204", "#010205", "#01020a"
SERIES = ("#010206", "#010207", "#010208", "#010209")
_VARIABLES = {INK: "--ink", FAINT: "--faint", GRID: "--grid", CARD: "--card"} | {
    c: f"--series-{i}" for i, c in enumerate(SERIES)
}

_STYLE: Any = {
    "svg.fonttype": "none", "text.parse_math": False, "font.size": 9.5, "axes.edgecolor": GRID,
    "axes.labelcolor": FAINT, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": GRID, "grid.linewidth": 0.6,
    "text.color": INK, "xtick.color": GRID, "ytick.color": GRID, "xtick.labelcolor": FAINT,
    "ytick.labelcolor": FAINT, "figure.constrained_layout.use": True,
}  # fmt: skip
_CURVES, _COMPARISON = (4.7, 3.2), (5.6, 0.62)
"""Width and height of curves, and width and height per row of a comparison, in inches.

Small figures keep the text legible on a phone.
"""
_BASELINE = 0.3
"""Height of the label of a baseline in a comparison, in rows."""
_WRITTEN = 8
"""Maximum number of labels for which a confusion matrix shows its counts in the picture."""
_DEFINED = re.compile(r'\sid="([^"]+)"')
_DRAWING = threading.Lock()
"""Held while matplotlib has the style of charts, which all threads of the process share."""


def metrics_html(
    title: str, columns: Mapping[str, Mapping[str, float]], heading: str = "metric"
) -> str | None:
    """Return a table of metrics for a notebook, or None, for its `repr`, where jinja2 is missing.

    Args:
        title: stands above the table.
        columns: metrics by the name of the column; the first one has all of them.
        heading: of the first column, which names the rows.
    """
    if not installed("jinja2"):
        return None
    names = next(iter(columns.values()))
    rows = [[name, *(column.get(name) for column in columns.values())] for name in names]
    table = sections.TableSection(title, [heading, *columns], rows)
    empty = Report("", "", "", ())  # the template is a page with macros
    return str(vars(_template().make_module({"report": empty}))["table"](table))


def can_write(page: Path, progress: Progress) -> bool:
    """Look for the packages of reports; where one is missing, a note says what is not written."""
    available = installed("matplotlib", "jinja2")
    if not available:
        progress.message(f'note: no {page}, which needs pip install "bothways[report]"')
    return available


def write_html(report: Report, file: Path) -> None:
    """Write the page.

    Raises:
        ResourceError: the file cannot be written.
    """
    page = _template().render(report=report)
    with os_errors(file, "Free some space, or choose another path."):
        # Names of files may hold bytes that are not UTF-8.
        file.write_text(page, encoding="utf8", errors="replace")


@functools.cache
def _template() -> Template:
    with optional("report", "writing an HTML report"):
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("bothways.core.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # A number and its % stay on one line.
        finalize=lambda x: x.replace(" %", "\N{NO-BREAK SPACE}%") if isinstance(x, str) else x,
    )
    environment.filters |= {
        "percentage": percentage,
        "readable": readable_number,
        "cells": table_cells,
        "as_table": as_table,
        "chart": lambda section: Markup(draw(section)),  # matplotlib has escaped its names
    }
    environment.tests["number"] = lambda cell: isinstance(cell, int | float)
    environment.tests["marked"] = lambda piece: isinstance(piece, sections.Marked)
    environment.globals |= {"zip": zip, "number_format": sections.number_format}
    environment.globals["written_labels"] = _WRITTEN
    environment.globals["kind"] = lambda section: type(section).__name__
    return environment.get_template("report.html.jinja")


def draw(chart: sections.Chart) -> str:
    """Return a chart as an `<svg>` element without colours, fonts or a size of its own."""
    with optional("report", "drawing charts"):
        import matplotlib as mpl
        from matplotlib.figure import Figure

    style = _STYLE | {"svg.hashsalt": chart.title}
    with _DRAWING, mpl.rc_context(style), warnings.catch_warnings():
        # Text is drawn by the page, in its fonts: matplotlib's own may lack letters.
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        match chart:
            case sections.Curves():
                figure = Figure(figsize=_CURVES)
                _draw_curves(figure.subplots(), chart)
            case sections.ComparisonChart():
                rows = len(chart.groups) + 0.4 + _BASELINE * len(chart.baselines)
                figure = Figure(figsize=(_COMPARISON[0], 0.65 + _COMPARISON[1] * rows))
                _draw_comparison(figure.subplots(), chart)
            case sections.ConfusionMatrix():
                figure = Figure(figsize=(4.7, min(4.7, 1.4 + 0.5 * len(chart.labels))))
                _draw_confusion(figure.subplots(), chart)
            case sections.Scatter():
                figure = Figure(figsize=_CURVES)
                axes = figure.subplots()
                dots: Any = {"markersize": 4, "alpha": 0.5, "markeredgewidth": 0}
                axes.plot(chart.x, chart.y, "o", color=SERIES[0], **dots)
                if chart.line is not None:
                    (left, bottom), (end, top) = chart.line
                    axes.plot([left, end], [bottom, top], **_DASHED)
                axes.set_xlabel(chart.x_label)
                axes.set_title(chart.y_label, loc="left", fontsize=9.5, color=FAINT)
            case sections.HeatMaps():
                figure = _draw_maps(chart)
            case _:
                assert_never(chart)
        file = io.StringIO()
        metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    opening = r'<svg [^>]*?viewBox="([^"]*)"[^>]*>'
    svg = re.sub(opening, r'<svg viewBox="\1" aria-hidden="true">', svg, count=1)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    # Unreferenced ids would occur once per chart, and ids must be unique on a page.
    used = set(re.findall(r'#([\w.-]+)["\')]', svg))
    svg = _DEFINED.sub(lambda match: match[0] if match[1] in used else "", svg)
    return re.sub(r"; font-family: [^;\"]+", "", svg)


_ON_CARD: Any = {"facecolor": CARD, "edgecolor": "none", "pad": 1}
"""The background of a label, so that no line crosses its letters."""
_NARROWEST = 0.05
"""The smallest range of a scale of percentages: a tenth of a point should not fill a chart."""
_DASHED: Any = {"color": FAINT, "linewidth": 1.2, "linestyle": (0, (4, 3))}


def _legend_entry(name: str) -> str:
    """Return a name that matplotlib shows: it leaves out those that begin with an underscore."""
    return f" {name}" if name.startswith("_") else name


def _draw_curves(axes: Axes, chart: sections.Curves) -> None:
    from matplotlib.ticker import EngFormatter

    number = sections.number_format([*chart.baselines.values()], chart.percent)
    for index, line in enumerate(chart.lines):
        colour, width = SERIES[index % len(SERIES)], 1.8 if len(line.x) < 60 else 1.1
        style: Any = {"color": colour, "linewidth": width, "solid_capstyle": "round"}
        axes.plot(line.x, line.y, label=_legend_entry(line.name), **style)
        if len(line.x) == 1:
            axes.plot(line.x, line.y, "o", color=colour)
    for name, value in chart.baselines.items():
        axes.axhline(value, label=_legend_entry(f"{name}, {number(value)}"), **_DASHED)
    axes.set_xlabel(chart.x_label)
    axes.set_title(chart.y_label, loc="left", fontsize=9.5, color=FAINT)
    axes.margins(x=0.01)
    for axis, name in ((axes.xaxis, "x"), (axes.yaxis, "y")):
        if any(value >= 10_000 for line in chart.lines for value in getattr(line, name)):
            axis.set_major_formatter(EngFormatter())  # 12000000 → 12 M
    if chart.percent:
        axes.yaxis.set_major_formatter(_percent_ticks())
    if len(chart.lines) + len(chart.baselines) > 1:
        # Below the curves: in the axes it would hide some.
        legend: Any = {"frameon": False, "fontsize": 9, "handlelength": 1.6, "ncols": 2}
        axes.figure.legend(loc="outside lower left", **legend)


def _draw_comparison(axes: Axes, chart: sections.ComparisonChart) -> None:
    """Draw one row per contender: runs as dots, the mean as a bar, ± one σ as a band."""
    number = sections.number_format([*map(chart.mean, chart.groups)], chart.percent)
    for row, name in enumerate(chart.groups):
        colour, mean, spread = SERIES[row % len(SERIES)], chart.mean(name), chart.spread(name)
        band: Any = {"height": 0.36, "color": colour, "alpha": 0.22, "linewidth": 0}
        axes.barh(row, 2 * spread, left=mean - spread, **band)
        bar: Any = {"color": colour, "linewidth": 2.4, "solid_capstyle": "round"}
        axes.plot([mean, mean], [row - 0.24, row + 0.24], **bar)
        runs = chart.groups[name]
        # Heights that keep the dots of equal runs apart.
        heights = [row + 0.07 * (at - (len(runs) - 1) / 2) for at in range(len(runs))]
        axes.plot(runs, heights, "o", color=colour, markersize=5.5, alpha=0.85)
        label = f"{number(mean)} ± {number(spread)}" if spread else number(mean)
        text: Any = {"ha": "center", "va": "bottom", "fontsize": 9.5, "color": INK}
        axes.annotate(label, (mean, row - 0.34), bbox=_ON_CARD, **text)
    bottom = len(chart.groups) - 0.58
    baselines = sorted(chart.baselines.items(), key=lambda item: -item[1])
    for line, (name, value) in enumerate(baselines):
        axes.axvline(value, **_DASHED)
        # Baselines are often close together, so their labels are stacked.
        position = (value, bottom + _BASELINE * (line + 1))
        style: Any = {"va": "center", "fontsize": 9, "color": FAINT, "bbox": _ON_CARD}
        axes.annotate(name, position, (4, 0), textcoords="offset points", **style)
    axes.set_yticks(range(len(chart.groups)), chart.groups, color=INK)
    axes.set_ylim(bottom + _BASELINE * (len(chart.baselines) + 0.7), -0.75)
    axes.set_xlabel(chart.measure)
    axes.margins(x=0.12)
    left, right = axes.get_xlim()
    if chart.percent and (missing := _NARROWEST - (right - left)) > 0:
        axes.set_xlim(left - missing / 2, right + missing / 2)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)
    if chart.percent:
        axes.xaxis.set_major_formatter(_percent_ticks())


_CENTRED: Any = {"ha": "center", "va": "center", "fontsize": 9, "color": INK}


def _draw_confusion(axes: Axes, chart: sections.ConfusionMatrix) -> None:
    """Draw one square per pair of labels, darker for a greater share of its row."""
    from matplotlib.patches import Rectangle

    names = [label if len(label) <= 24 else label[:23] + "…" for label in chart.labels]
    for row, counts in enumerate(chart.counts):
        for column, count in enumerate(counts):
            share = count / max(1, sum(counts))
            position, alpha = (column - 0.5, row - 0.5), round(0.7 * share, 3)
            square = Rectangle(position, 1, 1, facecolor=SERIES[0], alpha=alpha, linewidth=0)
            axes.add_patch(square)
            if len(names) <= _WRITTEN:
                axes.annotate(sections.readable_number(count), (column, row), **_CENTRED)
    axes.set_xticks(range(len(names)), names, rotation=90 if sum(map(len, names)) > 30 else 0)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    axes.grid(visible=False)


_BLUE = (0.34, 0.52, 0.93)
"""The colour of cells, which can be seen on a light and on a dark page: a picture has no variables
of the page."""


def _draw_maps(chart: sections.HeatMaps) -> Figure:
    """Draw a map for each title; a single one has the labels, several have their positions."""
    import numpy as np
    from matplotlib.figure import Figure

    single, count = len(chart.maps) == 1, len(chart.labels)
    columns = 1 if single else min(4, len(chart.maps))
    rows = -(-len(chart.maps) // columns)
    inches = min(7.0, 1.6 + 0.17 * count) if single else 1.7
    figure = Figure(figsize=(inches * columns, (inches + 0.25 * (not single)) * rows))
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (title, values) in zip(grid, chart.maps.items(), strict=False):
        cells = np.empty((count, count, 4))
        cells[..., :3], cells[..., 3] = _BLUE, values
        axes.imshow(cells, interpolation="none")
        axes.grid(visible=False)
        if single and count <= _NAMED:
            axes.set_xticks(range(count), chart.labels, rotation=90)
            axes.set_yticks(range(count), chart.labels)
        else:
            axes.xaxis.get_major_locator().set_params(integer=True, nbins=4)
            axes.yaxis.get_major_locator().set_params(integer=True, nbins=4)
        if not single:
            axes.set_title(title, fontsize=9.5, color=FAINT)
    for axes in grid[len(chart.maps) :]:
        axes.set_axis_off()
    return figure


_NAMED = 40
"""Maximum number of rows of a map with their labels."""


def _percent_ticks() -> Formatter:
    """Return the format of the ticks of shares, all with equally many decimals."""
    from matplotlib.ticker import PercentFormatter

    return PercentFormatter(1, symbol=" %")
