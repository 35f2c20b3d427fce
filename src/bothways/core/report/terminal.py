"""Reports and tables of metrics as text for the terminal."""

from __future__ import annotations

import functools
import itertools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from typing_extensions import assert_never

from bothways.core.report import sections

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_LEVELS = "▁▂▃▄▅▆▇█"
_COLUMNS = 32
_TITLE = 10
"""Characters of a line of the title of a column of numbers, if its cells are shorter."""


def show(report: sections.Report, console: Console) -> None:
    """Print the headline and every section that is not folded."""
    from rich.padding import Padding
    from rich.text import Text

    console.print(Padding(Text(report.headline, style="bold"), (1, 0, 0, 0)))
    console.print(Text(report.lead, style="dim"))
    for section in report.sections:
        if not isinstance(section, sections.Details):
            console.print(Padding(render_report(section), (1, 0, 0, 0)))


def render_report(section: sections.Section) -> RenderableType:
    """Return a section as a rich renderable; of folded details only the title."""
    from rich.console import Group
    from rich.text import Text

    match section:
        case sections.Scatter():
            return Text(f"{section.title}: {len(section.x):,} points", style="bold")
        case sections.ExampleSection(title, examples):
            return Group(Text(title, style="bold"), *(_example(example) for example in examples))
        case sections.Prose(title, paragraphs):
            return Group(Text(title, style="bold"), *(Text(paragraph) for paragraph in paragraphs))
        case sections.Details(title):
            return Text(title, style="bold")
        case _:
            table = as_table(section)
    indices = range(len(table.columns))
    numeric = [any(isinstance(row[index], int | float) for row in table.rows) for index in indices]
    cells = [[cell_text(cell) for cell in row] for row in table.rows]
    rendered = titled(table.title, _table(table.columns, cells, numeric, total=table.total))
    return Group(rendered, Text(table.note, style="dim")) if table.note else rendered


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
        case sections.Curves() | sections.ComparisonChart():
            number = functools.partial(sections.readable_number, percent=section.percent)
            baselines = [(name, number(value)) for name, value in section.baselines.items()]
        case _:
            assert_never(section)
    if isinstance(section, sections.Curves):
        rows = [
            (line.name, sparkline(line), " → ".join(map(number, (line.y[0], line.y[-1]))))
            for line in section.lines
            if line.y
        ]
        rows += [(name, None, value) for name, value in baselines]
        return sections.TableSection(f"{section.title}: {section.y_label}", ["", "", ""], rows)
    rows = [
        (
            name,
            number(section.mean(name)),
            number(section.spread(name)),
            "  ".join(map(number, values)),
        )
        for name, values in section.groups.items()
    ]
    rows += [(name, value, None, None) for name, value in baselines]
    columns = ["", "mean", "spread (σ)", "each run"]
    return sections.TableSection(f"{section.title}: {section.measure}", columns, rows)


def titled(title: str, table: RenderableType) -> RenderableType:
    """Put a title above a table: one of the table's own would wrap to the width of the table."""
    from rich.console import Group
    from rich.text import Text

    return Group(Text(title, style="bold"), table) if title else table


def cell_text(cell: sections.Cell) -> str:
    """Format a cell of a table."""
    match cell:
        case None:
            return ""
        case str():
            return cell
        case int() | float():
            return sections.readable_number(cell)
        case _:
            assert_never(cell)


def sparkline(line: sections.Line, columns: int = _COLUMNS) -> str:
    """Draw a curve in one line of text: means of equal parts as bars of eight heights."""
    count = min(columns, len(line.y))
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
        match piece:
            case sections.Marked(marked):
                text.append(marked, style="reverse")
            case str():
                text.append(piece)
            case _:
                assert_never(piece)
    answers = Text("→ ")
    for index, guess in enumerate(example.guesses):
        answers.append(
            ("  " if index else "") + guess.answer, style="bold green" if guess.right else ""
        )
        answers.append(f" {sections.percentage(guess.probability)}", style="dim")
    answers.append(f"  (correct: {example.truth})", style="dim")
    return Padding(Text("\n").join([text, answers]), (1, 0, 0, 2))


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
    rows = [
        [metric, *(shown(metric, metrics[metric]) for metrics in columns.values())]
        for metric in next(iter(columns.values()))
    ]
    return text_table(title, [head, *columns], rows)


def text_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, framed: bool = True
) -> RenderableType:
    """Build a table of texts: names on the left, then numbers, which are aligned to the right."""
    numeric = [False, *(True for _ in columns[1:])]
    return titled(title, _table(columns, rows, numeric, framed=framed))


def _table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    numeric: Sequence[bool],
    *,
    framed: bool = False,
    total: bool = False,
) -> RenderableType:
    """Build a table: where the terminal is narrow, texts are broken into lines, numbers are not.

    Args:
        numeric: whether each column is aligned to the right.
        framed: draw lines between the columns.
        total: the last row is a total.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    style = box.HEAVY_HEAD if framed else box.SIMPLE_HEAD
    table = Table(box=style, show_header=any(columns), pad_edge=framed)
    for index, (title, number) in enumerate(zip(columns, numeric, strict=True)):
        if not number:
            table.add_column(Text(title), overflow="fold")
            continue
        # rich keeps a column whole if it has no long title.
        width = max(_TITLE, *(len(row[index]) for row in rows))
        table.add_column(Text(textwrap.fill(title, width)), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))  # as `Text`, so that [brackets] are not markup
    if total and table.rows:
        table.rows[-1].style = "bold"
    return table
