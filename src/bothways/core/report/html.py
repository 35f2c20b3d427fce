"""A report as one self-contained HTML file: no external script, font, image or style sheet.

The page supports phones, dark mode, print and screen readers. jinja2 escapes all text; only the
charts, which this package draws, are inserted verbatim.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bothways.core.errors import installed, optional, os_errors
from bothways.core.report import sections
from bothways.core.report.charts import draw
from bothways.core.report.sections import Report, percentage, readable_number
from bothways.core.report.terminal import as_table, table_cells

if TYPE_CHECKING:
    from jinja2 import Template


def to_html(report: Report) -> str:
    """Return the page."""
    return _template().render(report=report)


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


def write_html(report: Report, file: Path) -> None:
    """Write the page.

    Raises:
        ResourceError: the file cannot be written.
    """
    page = to_html(report)
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
        finalize=lambda value: (
            value.replace(" %", "\N{NO-BREAK SPACE}%") if isinstance(value, str) else value
        ),
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
    environment.globals["kind"] = lambda section: type(section).__name__
    return environment.get_template("report.html.jinja")
