"""Tables of metrics, one row per metric."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType


def metric_table(
    title: str,
    columns: Mapping[str, Mapping[str, float | int]],
    head: str = "metric",
    shown: Callable[[str, float], str] = lambda name, value: f"{value:.4f}",
) -> RenderableType:
    """Build a table of the metrics of one or more models, which have equal metric names.

    Args:
        columns: the metrics by column title.
        head: title of the first column.
        shown: formats a metric, given its name and value.
    """
    from rich.table import Table
    from rich.text import Text

    from bothways.report.terminal import titled

    table = Table()
    table.add_column(head)
    for name in columns:
        table.add_column(name, justify="right")
    for metric in next(iter(columns.values())):
        table.add_row(
            Text(metric), *(shown(metric, metrics[metric]) for metrics in columns.values())
        )
    return titled(title, table)
