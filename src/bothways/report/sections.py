"""What a report is made of: a few kinds of section, each a frozen value, shown alike in a browser and in a terminal.

A section holds figures, never their looks: what a chart or a table looks like is decided once, by `html` and `terminal`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Number = int | float

Cell = str | Number | None
"""A value of a table; an empty cell is none. Numbers stand to the right."""


@dataclass(frozen=True)
class KeyFigure:
    """One figure that the reader is to remember.

    Attributes:
        label: what it is.
        value: the figure as it is to be read, with its unit.
        note: what to compare it with.
    """

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class KeyFigures:
    """The few figures that the report is about, side by side."""

    figures: Sequence[KeyFigure]


@dataclass(frozen=True)
class Line:
    """A measured curve: the values `y` at the places `x`."""

    name: str
    x: Sequence[Number]
    y: Sequence[Number]


@dataclass(frozen=True)
class Curves:
    """Curves over one axis, with constant values to compare them with.

    Attributes:
        x_label, y_label: the axes, with units.
        baselines: constants by name, drawn as dashed lines.
        percent: values are shares, shown as percentages.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    baselines: Mapping[str, Number] = field(default_factory=dict)
    percent: bool = False
    note: str = ""


@dataclass(frozen=True)
class ComparisonChart:
    """Repeated runs of several contenders under one measure: each run is a dot, with the mean and the spread.

    Attributes:
        measure: what is measured.
        groups: the value of each run, by contender, the most important one first; no contender is without a run.
        baselines: constants by name, drawn as dashed lines.
        percent: values are shares, shown as percentages.
    """

    title: str
    measure: str
    groups: Mapping[str, Sequence[Number]]
    baselines: Mapping[str, Number] = field(default_factory=dict)
    percent: bool = False
    note: str = ""

    def mean(self, name: str) -> float:
        """The mean over a contender's runs."""
        return statistics.fmean(self.groups[name])

    def spread(self, name: str) -> float:
        """The standard deviation of a contender's runs around their mean (n − 1); 0 for a single run."""
        values = self.groups[name]
        return statistics.stdev(values) if len(values) > 1 else 0.0


@dataclass(frozen=True)
class TableSection:
    """Rows under named columns; settings and parameter ledgers are tables, too.

    Attributes:
        total: the last row is the sum of the others.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    total: bool = False
    note: str = ""


@dataclass(frozen=True)
class Confusion:
    """How often one label was taken for another: a picture and a table.

    Attributes:
        labels: names of rows and columns.
        counts: row i, column j: how many of label i were predicted as label j.
    """

    title: str
    labels: Sequence[str]
    counts: Sequence[Sequence[int]]
    note: str = ""


@dataclass(frozen=True)
class Scatter:
    """Points, each an example.

    Attributes:
        x_label, y_label: the axes, with units.
        x, y: where the points are.
        line: two points of a line to compare them with; none for no line.
    """

    title: str
    x_label: str
    y_label: str
    x: Sequence[Number]
    y: Sequence[Number]
    line: tuple[tuple[Number, Number], tuple[Number, Number]] | None = None
    note: str = ""


@dataclass(frozen=True)
class Marked:
    """A part of an example's text that it is about."""

    text: str


@dataclass(frozen=True)
class ReportGuess:
    """An answer of the model with its probability, and whether it is right."""

    answer: str
    probability: float
    right: bool


@dataclass(frozen=True)
class ReportExample:
    """A text, the model's best answers to it, and the right one.

    Attributes:
        parts: the text, piece by piece.
        truth: the right answer.
        guesses: the model's answers, the most probable first.
        where: whence the text comes.
    """

    parts: Sequence[str | Marked]
    truth: str
    guesses: Sequence[ReportGuess]
    where: str = ""


@dataclass(frozen=True)
class ExampleSection:
    """Some inputs with what the model makes of them."""

    title: str
    examples: Sequence[ReportExample]
    note: str = ""


@dataclass(frozen=True)
class Prose:
    """Paragraphs of plain text."""

    title: str
    paragraphs: Sequence[str]


@dataclass(frozen=True)
class Details:
    """Sections for those who want to know more: folded in a browser, left out in a terminal."""

    title: str
    sections: Sequence[Section]


Section = (
    KeyFigures
    | Curves
    | ComparisonChart
    | Confusion
    | Scatter
    | TableSection
    | ExampleSection
    | Prose
    | Details
)
Chart = Curves | ComparisonChart | Confusion | Scatter
"""The sections with a picture."""


@dataclass(frozen=True)
class Report:
    """A whole report.

    Attributes:
        title: what was done.
        headline: the result, in one sentence.
        lead: what the reader has to know to understand the headline.
        sections: the rest, the most important first.
        colophon: what made it, when and on what.
    """

    title: str
    headline: str
    lead: str
    sections: Sequence[Section]
    colophon: str = ""


def percentage(share: float) -> str:
    """A share as it is read: 0.625 → 62.5 %."""
    return f"{100 * share:.1f} %"


def readable_number(value: Number, percent: bool = False) -> str:
    """A number as it is read: whole ones in groups of three digits, others with four significant digits."""
    if percent:
        return percentage(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"
