"""Metrics as a table, a row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def metric_table(
    title: str,
    columns: Mapping[str, Mapping[str, float | int]],
    head: str = "metric",
    shown: Callable[[str, float], str] = lambda name, value: f"{value:.4f}",
) -> Table:
    """The metrics of one model or several, all with the same ones.

    Args:
        columns: the metrics by what stands above them.
        head: what stands above their names, in which brackets are no markup.
        shown: a metric as a text, by its name and its value.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title))
    table.add_column(head)
    for name in columns:
        table.add_column(name, justify="right")
    for metric in next(iter(columns.values())):
        table.add_row(
            Text(metric), *(shown(metric, metrics[metric]) for metrics in columns.values())
        )
    return table
