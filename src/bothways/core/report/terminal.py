"""Reports and tables of metrics as text for the terminal."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import assert_never

from bothways.core.report import sections
from bothways.core.terminal import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text

_LEVELS = "▁▂▃▄▅▆▇█"
_COLUMNS = 32
_FRAME = 3
"""Characters between two columns."""
_LONG = 24
"""Cells with blanks are broken into lines if they are longer."""


def show(report: sections.Report, console: Console) -> None:
    """Print the headline and every section that is not folded."""
    from rich.padding import Padding

    console.print(Padding(_text(report.headline, "bold"), (1, 0, 0, 0)))
    console.print(_text(report.lead, "dim"))
    for section in report.sections:
        if not isinstance(section, sections.Details):
            console.print(Padding(render_report(section), (1, 0, 0, 0)))


def render_report(section: sections.Section) -> RenderableType:
    """Return a section as a rich renderable; of folded details only the title."""
    from rich.console import Group

    match section:
        case sections.Scatter():
            return _text(f"{section.title}: {len(section.x):,} points", "bold")
        case sections.ExampleSection(title, examples):
            return Group(_text(title, "bold"), *map(_example, examples))
        case sections.Prose(title, paragraphs):
            return Group(_text(title, "bold"), *map(_text, paragraphs))
        case sections.TokenSequence():
            return token_text(section)
        case sections.Details(title) | sections.HeatMaps(title):
            return _text(title, "bold")
        case _:
            table = as_table(section)
    indices = range(len(table.columns))
    numeric = [any(isinstance(row[index], int | float) for row in table.rows) for index in indices]
    rendered = titled(
        table.title, FittedTable(table.columns, table_cells(table), numeric, total=table.total)
    )
    return Group(rendered, _text(table.note, "dim")) if table.note else rendered


def _text(content: str, style: str = "") -> Text:
    """Return text with its control characters escaped."""
    from rich.text import Text

    return Text(printable(content), style)


def as_table(
    section: sections.KeyFigures
    | sections.Curves
    | sections.ComparisonChart
    | sections.ConfusionMatrix
    | sections.TableSection,
) -> sections.TableSection:
    """Return figures, curves, runs or counts as a table; curves as a line of text each."""
    rows: list[tuple[sections.Cell, ...]]
    match section:
        case sections.TableSection():
            return section
        case sections.KeyFigures(figures):
            rows = [(figure.label, figure.value, figure.note) for figure in figures]
            return sections.TableSection("", ["", "", ""], rows)
        case sections.ConfusionMatrix(title, labels, counts, note):
            rows = [(label, *row) for label, row in zip(labels, counts, strict=True)]
            columns = ["true \\ predicted", *labels]
            return sections.TableSection(title, columns, rows, note=note)
        case sections.Curves(title, _, label, lines):
            lines = [line for line in lines if line.y]
            values = [line.y[end] for line in lines for end in (0, -1)]
        case sections.ComparisonChart(title, label, groups):
            values = [value for runs in groups.values() for value in runs]
        case _:
            assert_never(section)
    number = sections.number_format([*values, *section.baselines.values()], section.percent)
    baselines = [(name, number(value)) for name, value in section.baselines.items()]
    if isinstance(section, sections.Curves):
        rows = [
            (line.name, sparkline(line), f"{number(line.y[0])} → {number(line.y[-1])}")
            for line in lines
        ]
        rows += [(name, None, value) for name, value in baselines]
        return sections.TableSection(f"{title}: {label}", ["", "", ""], rows)
    rows = []
    for name, runs in section.groups.items():
        summary = (number(section.mean(name)), number(section.spread(name)))
        rows.append((name, *summary, "  ".join(map(number, runs))))
    rows += [(name, value, None, None) for name, value in baselines]
    columns = ["", "mean", "spread (σ)", "each run"]
    return sections.TableSection(f"{title}: {label}", columns, rows)


def titled(title: str, table: RenderableType) -> RenderableType:
    """Put a title above a table: one of the table's own would wrap to the width of the table."""
    from rich.console import Group

    return Group(_text(title, "bold"), table) if title else table


def table_cells(table: sections.TableSection) -> list[list[str]]:
    """Format the cells of a table; the numbers of a column have equally many decimals."""
    columns = [
        sections.number_format([cell for cell in column if isinstance(cell, int | float)])
        for column in zip(*table.rows, strict=True)
    ]
    return [
        [
            number(cell) if isinstance(cell, int | float) else cell or ""
            for number, cell in zip(columns, row, strict=True)
        ]
        for row in table.rows
    ]


def sparkline(line: sections.Line) -> str:
    """Draw a curve in one line of text: means of equal parts as bars of eight heights."""
    count = min(_COLUMNS, len(line.y))
    edges = [piece * len(line.y) // count for piece in range(count + 1)]
    means = [sum(line.y[i:j]) / (j - i) for i, j in itertools.pairwise(edges)]
    low, top = min(means), len(_LEVELS) - 1
    span = max(means) - low or 1.0
    return "".join(_LEVELS[round((mean - low) / span * top)] for mean in means)


def _example(example: sections.ReportExample) -> RenderableType:
    from rich.padding import Padding
    from rich.text import Text

    text = Text()
    for piece in example.parts:
        if isinstance(piece, sections.Marked):
            text.append(_text(piece.text, "reverse"))
        else:
            text.append(_text(piece))
    answers = Text("→ ")
    for index, guess in enumerate(example.guesses):
        style = "bold green" if guess.right else ""
        answers.append(_text(("  " if index else "") + guess.answer, style))
        answers.append(f" {sections.percentage(guess.probability)}", style="dim")
    answers.append(_text(f"  (correct: {example.truth})", "dim"))
    return Padding(Text("\n").join([text, answers]), (1, 0, 0, 2))


_STYLES = {"masked": "bold yellow", "random": "bold magenta", "kept": "bold cyan"}
"""Colours of changed tokens; the arrow shows them where there are no colours."""


def token_text(sequence: sections.TokenSequence) -> RenderableType:
    """Return a sequence as running text, a paragraph for each segment.

    A token that is predicted is followed by an arrow and the original:

        [CLS] the [MASK]→dog barks loud→at the→the cat [SEP]
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    paragraphs = Table.grid(padding=(0, 1))
    groups = itertools.groupby(sequence.tokens, key=lambda token: token.segment)
    for segment, tokens in groups:
        text = Text()
        for token in tokens:
            mark = f"{token.token}→{token.original}" if token.change else token.token
            style = _STYLES.get(token.change, "")
            text.append(" " if text else "").append(_text(mark, style))
        paragraphs.add_row(Text(chr(ord("A") + segment), style="dim"), text)
    heading = Text.assemble(_text(sequence.title, "bold"), " · ", _text(sequence.summary))
    return Group(heading, paragraphs)


@dataclass(frozen=True)
class TokenRows:
    """A sequence as the rows of Devlin et al. 2018, figure 2, cut into lines that fit.

        token     [CLS] my dog is cute [SEP]
        segment   A     A  A   A  A    A
        position  0     1  2   3  4    5

    Changed tokens have a row with the originals, other predictions a row of their own.
    """

    sequence: sections.TokenSequence

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """Yield the heading and the lines."""
        from rich.cells import set_cell_size
        from rich.text import Text

        tokens = self.sequence.tokens
        rows = {"token": [token.token for token in tokens]}
        if any(token.change for token in tokens):
            rows["original"] = [token.original if token.change else "" for token in tokens]
        rows |= self.sequence.predictions
        rows["segment"] = [chr(ord("A") + token.segment) for token in tokens]
        rows["position"] = [str(token.position) for token in tokens]
        rows = {name: list(map(printable, row)) for name, row in rows.items()}
        widths = [max(_widths(*column)) + 1 for column in zip(*rows.values(), strict=True)]
        label = max(_widths(*rows)) + 2
        heading = _text(self.sequence.title, "bold"), " · ", _text(self.sequence.summary)
        yield Text.assemble(*heading)
        start = 0
        while start < len(tokens):
            stop = start + 1
            # As many tokens as fit in a line, and one at least.
            while stop < len(tokens) and label + sum(widths[start : stop + 1]) <= options.max_width:
                stop += 1
            for name, row in rows.items():
                line = Text(set_cell_size(name, label), style="dim")
                for index in range(start, stop):
                    style = _STYLES.get(tokens[index].change, "") if name != "position" else ""
                    line.append(set_cell_size(row[index], widths[index]), style=style or "not dim")
                line.rstrip()
                yield line
            if stop < len(tokens):
                yield Text()
            start = stop


@dataclass(frozen=True)
class FittedTable:
    """A table with whole words and numbers at any width.

    If the titles of the columns do not fit on a line, they are broken at blanks. If the columns do
    not fit then either, the table has a line for each cell, below the first cell of the row.

    Attributes:
        numeric: whether each column is aligned to the right.
        framed: whether lines are drawn between the columns.
        total: whether the last row is a total.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: Sequence[bool]
    framed: bool = False
    total: bool = False

    def __post_init__(self) -> None:
        """Escape control characters, before widths are measured."""
        escaped = [[*map(printable, row)] for row in self.rows]
        object.__setattr__(self, "columns", [*map(printable, self.columns)])
        object.__setattr__(self, "rows", escaped)

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """Yield the form that fits."""
        room = options.max_width - 1
        cells = list[int]()  # the least width of the cells of each column that breaks no word
        for column in range(len(self.columns)):
            texts = [row[column] for row in self.rows]
            split = [word for text in texts for word in text.split()]
            cells.append(min(max(_widths(*texts)), max(_LONG, *_widths(*split))))
        columns = [*zip(cells, self.columns, strict=True)]
        full_widths = [max(width, *_widths(title)) for width, title in columns]
        words = [max(width, *_widths(*title.split())) for width, title in columns]
        if sum(full_widths) + _FRAME * len(columns) <= room:
            yield self._table(self.columns, cells)
        elif sum(words) + _FRAME * len(columns) <= room:
            unbroken: Any = {"break_long_words": False, "break_on_hyphens": False}
            pairs = zip(self.columns, words, strict=True)
            titles = [textwrap.fill(title, max(n, 1), **unbroken) for title, n in pairs]
            yield self._table(titles, cells)
        else:
            yield from self._lines()

    def _table(self, titles: Sequence[str], widths: Sequence[int]) -> RenderableType:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        style = box.HEAVY_HEAD if self.framed else box.SIMPLE_HEAD
        table = Table(box=style, show_header=any(titles), pad_edge=self.framed)
        for column, (title, width) in enumerate(zip(titles, widths, strict=True)):
            # A column that is too wide for its room is folded; others keep their lines whole.
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
