"""Sections of a report: frozen values that `html` and `terminal` render.

A section holds data and no presentation.
"""

from __future__ import annotations

import math
import numbers
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import numpy as np

from bothways._version import __version__
from bothways.core.config import reader as configs
from bothways.core.config.values import flatten

if TYPE_CHECKING:
    import torch

Number = int | float

Cell = str | Number | None
"""A value of a table, `None` for an empty cell. Numbers are aligned to the right."""


@dataclass(frozen=True)
class KeyFigure:
    """One figure to remember.

    Attributes:
        value: the formatted figure with its unit.
        note: what to compare it with.
    """

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class KeyFigures:
    """The main figures of the report, next to each other."""

    figures: Sequence[KeyFigure]


@dataclass(frozen=True)
class Line:
    """A measured curve: the values `y` at `x`."""

    name: str
    x: Sequence[Number]
    y: Sequence[Number]


@dataclass(frozen=True)
class Curves:
    """Curves over one axis, with constant baselines.

    Attributes:
        x_label, y_label: the axes, with units.
        baselines: constants by name, drawn as dashed lines.
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
    """Repeated runs of several contenders: one dot per run, with mean and spread.

    Attributes:
        groups: the value of each run by contender, the most important contender first; every
            contender has at least one run.
        baselines: constants by name, drawn as dashed lines.
    """

    title: str
    measure: str
    groups: Mapping[str, Sequence[Number]]
    baselines: Mapping[str, Number] = field(default_factory=dict)
    percent: bool = False
    note: str = ""

    def mean(self, name: str) -> float:
        """Return the mean over the runs of a contender."""
        return statistics.fmean(self.groups[name])

    def spread(self, name: str) -> float:
        """Return the sample standard deviation over a contender's runs; 0 for one run."""
        values = self.groups[name]
        # Not `statistics.stdev`, which raises for the NaN that a metric of constant answers is.
        return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


@dataclass(frozen=True)
class TableSection:
    """Rows under named columns, such as settings or parameter counts.

    Attributes:
        total: the last row is the sum of the others.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    total: bool = False
    note: str = ""


@dataclass(frozen=True)
class ConfusionMatrix:
    """A confusion matrix, shown as a picture and as a table.

    Attributes:
        counts: `counts[i][j]` is the number of examples of label i that were predicted as label j.
    """

    title: str
    labels: Sequence[str]
    counts: Sequence[Sequence[int]]
    note: str = ""


@dataclass(frozen=True)
class Scatter:
    """One point per example.

    Attributes:
        x_label, y_label: the axes, with units.
        line: two points of a reference line, or `None`.
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
    """The highlighted part of an example."""

    text: str


@dataclass(frozen=True)
class ReportGuess:
    """An answer of the model with its probability and its correctness."""

    answer: str
    probability: float
    right: bool


@dataclass(frozen=True)
class ReportExample:
    """A text, the best answers of the model, and the correct one.

    Attributes:
        parts: consecutive pieces of the text.
        guesses: answers of the model, the most probable first.
        where: origin of the text.
    """

    parts: Sequence[str | Marked]
    truth: str
    guesses: Sequence[ReportGuess]
    where: str = ""


@dataclass(frozen=True)
class ExampleSection:
    """Some inputs with the predictions of the model."""

    title: str
    examples: Sequence[ReportExample]
    note: str = ""


@dataclass(frozen=True)
class InputToken:
    """A token of a model's input, and what an objective did to it.

    Attributes:
        token: what the model reads.
        segment: 0 for A, 1 for B.
        original: the token of the text.
        change: "masked", "random" for another token in its place, or "kept" for a token that is
            predicted though the model sees it; "" for all others.
        targets: the tokens that are predicted here, by the name of their loss.
    """

    token: str
    id: int
    position: int
    segment: int
    original: str
    change: str = ""
    targets: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenSpan:
    """Masked tokens `[start, stop)` that are also predicted from the tokens at two borders."""

    start: int
    stop: int
    left: int
    right: int


@dataclass(frozen=True)
class TokenSequence:
    """An input of a model, token by token.

    Attributes:
        title: where it is from.
        labels: the class of the whole sequence by the name of its loss, such as {"pair": "random"}.
        spans: masked spans that have borders.
    """

    title: str
    tokens: Sequence[InputToken]
    labels: Mapping[str, str] = field(default_factory=dict)
    spans: Sequence[TokenSpan] = ()

    @property
    def summary(self) -> str:
        """The length, how many tokens are changed in which way, the labels and the spans."""
        changes = [token.change for token in self.tokens if token.change]
        kinds = [kind for kind in ("masked", "random", "kept") if kind in changes]
        counts = [f"{changes.count(kind)} {kind}" for kind in kinds]
        parts = [f"{len(self.tokens)} tokens", ", ".join(counts)]
        for name, row in self.predictions.items():
            parts.append(f"{name}: {sum(map(bool, row))} predictions")
        parts += [f"{name}: {label}" for name, label in self.labels.items()]
        if self.spans:
            texts = (f"{span.start}–{span.stop - 1}" for span in self.spans)
            parts.append(f"spans predicted from both borders: {', '.join(texts)}")
        return " · ".join(filter(None, parts))

    @property
    def predictions(self) -> dict[str, list[str]]:
        """The targets of each token, "" for none, of losses that predict other tokens than the
        originals, such as the next ones.
        """
        others = [
            name
            for token in self.tokens
            for name, target in token.targets.items()
            if target != token.original
        ]
        return {
            name: [token.targets.get(name, "") for token in self.tokens]
            for name in dict.fromkeys(others)
        }


@dataclass(frozen=True)
class HeatMaps:
    """Square maps of equal size, such as the attention of each head, with a row for each token.

    Attributes:
        labels: of the rows and columns.
        maps: values in [0, 1] by title, `(n, n)`; darker is more.
    """

    title: str
    labels: Sequence[str]
    maps: Mapping[str, Any]
    note: str = ""


@dataclass(frozen=True)
class Prose:
    """Paragraphs of plain text."""

    title: str
    paragraphs: Sequence[str]


@dataclass(frozen=True)
class Details:
    """Secondary sections: folded in a browser, omitted in a terminal."""

    title: str
    sections: Sequence[Section]


Section = (
    KeyFigures
    | Curves
    | ComparisonChart
    | ConfusionMatrix
    | Scatter
    | TableSection
    | ExampleSection
    | TokenSequence
    | HeatMaps
    | Prose
    | Details
)
Chart = Curves | ComparisonChart | ConfusionMatrix | Scatter | HeatMaps
"""The sections with a picture."""


@dataclass(frozen=True)
class Report:
    """A report.

    Attributes:
        headline: the result, in one sentence.
        lead: the context that the headline needs.
        sections: everything else, the most important first.
        colophon: software, date and hardware.
    """

    title: str
    headline: str
    lead: str
    sections: Sequence[Section]
    colophon: str = ""


def colophon(device: torch.device) -> str:
    """Name the version of this library, the date and the device."""
    from bothways.core.runtime.devices import describe_device

    today = datetime.now(timezone.utc)
    return f"bothways {__version__}, {today:%Y-%m-%d}, {describe_device(device)}"


def settings_table(settings: Any) -> TableSection:
    """Return a table of settings, a frozen dataclass, by their dotted paths."""
    rows = [[name, str(value)] for name, value in flatten(configs.to_dict(settings)).items()]
    return TableSection("Settings", ["setting", "value"], rows)


def percentage(share: float) -> str:
    """Format a share: 0.625 → 62.5 %."""
    return f"{100 * share:.1f} %"


def number_format(values: Sequence[Number], percent: bool = False) -> Callable[[Number], str]:
    """Return the format of the numbers of a column or a chart: equally many decimals.

    These give the largest number four digits (0.9, 0.8712 → 0.9000, 0.8712). Numbers of different
    sizes, of which some would have fewer than three digits so, are formatted one by one.
    """
    if percent:
        return percentage
    sizes = [abs(value) for value in values if value and math.isfinite(value)]
    decimals = _decimals(max(sizes, default=0))
    if all(map(_is_whole, sizes)) or min(sizes) < 10 ** (2 - decimals):
        return readable_number
    return lambda value: f"{value:,.{decimals}f}"


def readable_number(value: Number) -> str:
    """Format a number: integers with thousands separators, others with four digits."""
    if _is_whole(value):
        return f"{value:,.0f}"
    size = abs(value)
    readable = 0.01 <= size < 1e15 or not size
    return f"{value:,.{_decimals(size)}f}" if readable else f"{value:.4g}"


def _is_whole(value: Number) -> bool:
    """Return True for a count; a float below 10, such as an accuracy of 1.0, is a measurement."""
    if isinstance(value, numbers.Integral):
        return True
    return float(value).is_integer() and 10 <= abs(value) < 1e15


def _decimals(size: Number) -> int:
    """Return the decimals that four digits leave, from 1 to 4: 0.5 → 4, 12.5 → 2, 1,234.5 → 1."""
    return next((4 - digits for digits in range(3) if size < 10**digits), 1)
