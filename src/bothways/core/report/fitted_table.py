"""A table for the terminal that loses nothing where the terminal is narrow."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

_FRAME = 3
"""Characters between two columns."""
_LONG = 24
"""Cells with blanks are broken into lines if they are longer."""


@dataclass(frozen=True)
class FittedTable:
    """A table with whole words and numbers at any width.

    If the titles of the columns do not fit on a line, they are broken at blanks. If the columns do
    not fit then either, the table has a line for each cell, below the first cell of the row.

    Attributes:
        columns: titles.
        rows: cells.
        numeric: whether each column is aligned to the right.
        framed: whether lines are drawn between the columns.
        total: whether the last row is a total.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: Sequence[bool]
    framed: bool = False
    total: bool = False

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """Yield the form that fits."""
        room = options.max_width - 1
        cells = [self._width(column) for column in range(len(self.columns))]
        full_widths = [
            max(n, *_widths(title)) for n, title in zip(cells, self.columns, strict=True)
        ]
        if sum(full_widths) + _FRAME * len(full_widths) <= room:
            yield self._table(self.columns, cells)
            return
        words = [
            max(n, *_widths(*title.split())) for n, title in zip(cells, self.columns, strict=True)
        ]
        if sum(words) + _FRAME * len(words) <= room:
            titles = [
                textwrap.fill(title, max(width, 1), break_long_words=False, break_on_hyphens=False)
                for title, width in zip(self.columns, words, strict=True)
            ]
            yield self._table(titles, cells)
        else:
            yield from self._lines()

    def _width(self, column: int) -> int:
        """Return the least width of the cells of a column that breaks no word."""
        texts = [row[column] for row in self.rows]
        widest = max(_widths(*texts))
        return min(widest, max(_LONG, *_widths(*(word for text in texts for word in text.split()))))

    def _table(self, titles: Sequence[str], widths: Sequence[int]) -> RenderableType:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        style = box.HEAVY_HEAD if self.framed else box.SIMPLE_HEAD
        table = Table(box=style, show_header=any(titles), pad_edge=self.framed)
        for column, (title, width) in enumerate(zip(titles, widths, strict=True)):
            long = max(_widths(*(row[column] for row in self.rows))) > width
            table.add_column(
                Text(title),
                justify="right" if self.numeric[column] else "left",
                no_wrap=not long,
                min_width=width,
                overflow="fold",
            )
        for row in self.rows:
            table.add_row(*map(Text, row))
        if self.total and table.rows:
            table.rows[-1].style = "bold"
        return table

    def _lines(self) -> Iterator[RenderableType]:
        """Yield a line for each cell: "  title  cell", below the first cell of its row."""
        from rich.text import Text

        [_, *titles] = self.columns
        room = max(_widths(*titles))
        for label, *cells in self.rows:
            yield Text(label, style="bold")
            for title, cell in zip(titles, cells, strict=True):
                if cell:
                    yield Text(f"  {title:{room}}  {cell}")


def _widths(*texts: str) -> tuple[int, ...]:
    """Return the widths of texts on a terminal, and 0."""
    from rich.cells import cell_len

    return (0, *map(cell_len, texts))
