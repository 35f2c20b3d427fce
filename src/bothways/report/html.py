"""A report as one HTML file that needs nothing else: no script, letter, picture or style from elsewhere.

It reads well on a phone, in dark mode, on paper and read aloud. Text is escaped by jinja2; only the charts, which are made
here, go in as they are.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from bothways.core.errors import ResourceError
from bothways.report import sections
from bothways.report.charts import draw
from bothways.report.sections import Chart, Report, percentage, readable_number
from bothways.report.terminal import cell_text

if TYPE_CHECKING:
    from jinja2 import Template


def to_html(report: Report) -> str:
    """The whole page."""
    return _template().render(report=report)


def write_html(report: Report, file: Path) -> None:
    """Write the page. ResourceError if the file cannot be written."""
    page = to_html(report)
    try:
        file.write_text(page, encoding="utf8")
    except OSError as error:
        raise ResourceError(
            f"cannot be written: {error.strerror}", where=file, fix="Name another file."
        ) from error


@functools.cache
def _template() -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("bothways.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percentage": percentage,
        "readable": readable_number,
        "cell": cell_text,
        "chart": _chart,
    }
    environment.tests["number"] = lambda cell: isinstance(cell, int | float)
    environment.tests["marked"] = lambda part: isinstance(part, sections.Marked)
    environment.globals["kind"] = lambda section: type(section).__name__
    return environment.get_template("report.html.jinja")


def _chart(section: Chart) -> str:
    """Our own drawing, in which matplotlib has escaped the names."""
    from markupsafe import Markup

    return Markup(draw(section))
