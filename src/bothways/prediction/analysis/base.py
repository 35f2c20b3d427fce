"""The base of the analyses, the sections that several of them have, and parts of the data.

Of each example 24 bytes are kept for its parts (`Traits`), so that quartiles are exact.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence, Sequence as Many
from typing import Any, ClassVar, Generic, NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy.typing import NDArray

from bothways.core.report import sections as s
from bothways.tasks.base import E, EncodedExample, Metrics, P
from bothways.tasks.metrics import Confusion

MAX_CHARACTERS = 600
"""Number of characters of a text that are shown."""
GUESSES = 3
"""Number of answers of the model that are shown for an example."""
SURE = 0.8
"""Probability of a wrong answer from which the label may be wrong instead."""
MAX_CLASSES = 20
"""Number of classes in a confusion matrix: those with the most errors."""
CONFUSIONS = 15
"""Number of confusions in the table of the most frequent ones."""

BINS = 15
"""Number of bins of equal width in [0, 1], as in Guo et al. 2017."""
_EDGES = np.linspace(0.0, 1.0, BINS + 1)[1:-1]
GROUPS = 10
"""Number of groups of equally many predictions."""
_FINE = 1 / (1 + np.exp(-np.linspace(-12, 12, 2400)))
"""Edges that are close near 0 and 1, where most probabilities are."""


class Bin(NamedTuple):
    """Predictions of similar confidence: their number, mean probability, share of right ones."""

    examples: int
    confidence: float
    accuracy: float


class Calibration:
    """Counts of predictions by confidence, for accuracy and expected calibration error.

    Source: Naeini et al. 2015; Guo et al. 2017, section 2. Only counts are kept, so memory does not
    grow with the examples. A bin includes its upper edge only.
    """

    def __init__(self) -> None:
        # By bin: the number of predictions, and the sums of their confidence and accuracy.
        self._even, self._fine = np.zeros((3, BINS)), np.zeros((3, len(_FINE) + 1))

    def add(self, confidence: float | NDArray[Any], correct: bool | NDArray[np.bool_]) -> None:
        """Count a prediction with this probability, or an array of them."""
        for edges, sums in ((_EDGES, self._even), (_FINE, self._fine)):
            index = np.searchsorted(edges, confidence)
            for row, values in zip(sums, (1, confidence, correct), strict=True):
                np.add.at(row, index, values)

    @property
    def bins(self) -> list[Bin]:
        """The bins of equal width that are not empty, in ascending order of confidence."""
        return [_bin(sums) for sums in self._even.T if sums[0]]

    @property
    def groups(self) -> list[Bin]:
        """At most `GROUPS` bins of about equally many predictions, in ascending order."""
        counts, _, _ = self._fine
        if not counts.any():
            return []
        # The middle prediction of each fine bin decides its group.
        middle = (counts.cumsum() - counts / 2) / counts.sum()
        group = np.minimum((middle * GROUPS).astype(np.int64), GROUPS - 1)
        merged = np.stack([np.bincount(group, row, GROUPS) for row in self._fine])
        return [_bin(sums) for sums in merged.T if sums[0]]

    @property
    def error(self) -> float:
        """The expected calibration error: mean |accuracy − confidence|, weighted by examples."""
        bins = self.bins
        gaps = sum(row.examples * abs(row.accuracy - row.confidence) for row in bins)
        return gaps / max(1, sum(row.examples for row in bins))


def _bin(sums: NDArray[np.float64]) -> Bin:
    count, confidence, correct = sums.tolist()
    return Bin(int(count), confidence / count, correct / count)


class Judgement(NamedTuple):
    """A prediction compared with the label.

    Attributes:
        cost: the loss, or another error where there is none; the worst examples are shown.
        doubt: how sure the model is that the label is wrong; None if it is not.
    """

    cost: float
    doubt: float | None = None


class TaskAnalysis(Generic[E, P]):
    """Counts over the predictions of a task. Each example is added once and not kept.

    Class attributes:
        grade_name: the name of the task's mean `grade`; None where its mean is not a share.
        cost_name: the name of the cost.
        calibrated: what the reliability curve counts.

    Attributes:
        calibration: confidence against accuracy.
    """

    grade_name: ClassVar[str | None]
    cost_name: ClassVar[str]
    calibrated: ClassVar[str] = "predictions"

    def __init__(self) -> None:
        self.calibration = Calibration()

    def add(self, example: E, prediction: P) -> Judgement:
        """Count a labelled example, and compare its prediction with the label."""
        raise NotImplementedError

    def show(self, example: E, prediction: P) -> s.ReportExample:
        """Build the example as it is shown."""
        raise NotImplementedError

    def baseline(self) -> Metrics:
        """Compute the metrics of the majority baseline on the examples that were added."""
        return {}

    def sections(self) -> list[s.Section]:
        """Build the sections of a report."""
        raise NotImplementedError

    def reliability(self) -> list[s.Section]:
        """Build the reliability curve with the expected calibration error, and its table.

        The curve has bins of equally many predictions: with bins of equal width, the predictions
        of a model that is nearly always sure, or never, would be one point.
        """
        groups, bins = self.calibration.groups, self.calibration.bins
        lines = [
            s.Line("the model", [p.confidence for p in groups], [p.accuracy for p in groups]),
            s.Line("perfectly calibrated", [0.0, 1.0], [0.0, 1.0]),
        ]
        total = sum(row.examples for row in bins)
        gap = sum(row.examples * (row.confidence - row.accuracy) for row in bins) / max(1, total)
        lean = "more" if gap > 0 else "less"
        note = (
            "Expected calibration error (15 bins of equal width): "
            f"{s.percentage(self.calibration.error)}. "
            f"On average the model is {s.percentage(abs(gap))} {lean} confident than right."
        )
        curve = s.Curves(
            "Confidence against accuracy", "mean probability",
            f"share of {self.calibrated} that is right", lines, percent=True, note=note,
        )  # fmt: skip
        rows: list[Sequence[s.Cell]] = [
            [row.examples, s.percentage(row.confidence), s.percentage(row.accuracy)] for row in bins
        ]
        columns = ["examples", "mean probability", "right"]
        table = s.TableSection("Calibration by bins", columns, rows)
        return [curve, s.Details("Calibration by bins", (table,))]


def clip(text: str) -> str:
    """Return the beginning of a text that may be long."""
    return text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + " …"


def guesses(probabilities: Mapping[str, float], truth: str | None) -> list[s.ReportGuess]:
    """List the most probable answers, and the right one if it is not among them."""
    ranked = sorted(probabilities.items(), key=lambda item: -item[1])
    return [
        s.ReportGuess(name, probability, name == truth)
        for rank, (name, probability) in enumerate(ranked)
        if rank < GUESSES or name == truth
    ]


def confusion_sections(labels: Sequence[str], counts: Confusion) -> list[s.Section]:
    """Build the confusion matrix, of many classes of the worst and with the most frequent
    confusions; and the precision, recall and F1 of each class.
    """
    indices, note, tables = range(len(labels)), "", list[s.Section]()
    if len(labels) > MAX_CLASSES:
        # Missed and false ones: Σ row + Σ column − 2 · diagonal.
        errors = counts.true + counts.predicted - 2 * counts.right
        indices = np.sort(np.argsort(-errors, kind="stable")[:MAX_CLASSES]).tolist()
        note = f"The {MAX_CLASSES} of {len(labels)} classes with the most errors."
        errors_by_pair = [(-n, pair) for pair, n in counts.pairs.items() if pair[0] != pair[1]]
        totals, rows = counts.true, list[Sequence[s.Cell]]()
        for count, (true, predicted) in sorted(errors_by_pair)[:CONFUSIONS]:
            share = s.percentage(-count / int(totals[true]))
            rows.append([labels[true], labels[predicted], -count, share])
        columns = ["class", "predicted as", "examples", "share of the class"]
        tables.append(s.TableSection("The most frequent confusions", columns, rows))
    matrix = [[counts.pairs[true, predicted] for predicted in indices] for true in indices]
    names = [labels[index] for index in indices]
    picture = s.ConfusionMatrix("Confusion matrix", names, matrix, note)
    rates = rates_table("class", labels, counts.right, counts.true, counts.predicted)
    return [picture, *tables, rates]


def rates_table(
    kind: str, names: Sequence[str], *counts: Int64[np.ndarray, " names"]
) -> s.TableSection:
    """Build a table of precision, recall and F1, where defined; of many names the worst F1 first.

    Args:
        kind: what the names are, such as "class".
        counts: the number of hits, of true and of predicted examples of each name.
    """
    rows, note = list(zip(names, *(column.tolist() for column in counts), strict=True)), ""
    if len(rows) > MAX_CLASSES:
        rows = sorted(rows, key=lambda row: 2 * row[1] / max(1, row[2] + row[3]))
        note = "In ascending order of F1."
    cells: list[Sequence[s.Cell]] = []
    for name, hits, true, predicted in rows:
        ratios = ((hits, predicted), (hits, true), (2 * hits, true + predicted))
        rates = [s.percentage(numerator / total) if total else None for numerator, total in ratios]
        cells.append([name, true, predicted, *rates])
    columns = [kind, "examples", "predicted", "precision", "recall", "F1"]
    return s.TableSection(f"Each {kind}", columns, cells, note=note)


NORMAL_95 = 1.96
"""Standard errors on each side of a mean that contain 95 % of a normal distribution."""


class Slice(NamedTuple):
    """The examples that are members of a slice by a criterion, and its value as a name."""

    by: str
    name: str
    members: NDArray[np.bool_]


class Traits:
    """Properties of examples: 24 bytes each."""

    def __init__(self) -> None:
        self._rows = array("f")  # 6 numbers of each example

    def __len__(self) -> int:
        return len(self._rows) // 6

    def _columns(self) -> Iterator[NDArray[np.float32]]:
        return iter(np.array(self._rows, dtype=np.float32).reshape(-1, 6).T)

    def add(
        self, encoded: EncodedExample, texts: Many[str], unknown: int, cost: float, grade: float
    ) -> None:
        """Add an example with cost and grade of its prediction; the id of the unknown token."""
        ids = np.concatenate([sequence.ids for sequence in encoded.sequences])
        words = [{*text.lower().split()} for text in texts]
        shared = math.nan  # else the Jaccard index of a pair's words
        if len(words) == 2:
            shared = len(words[0] & words[1]) / max(1, len(words[0] | words[1]))
        share = float((ids == unknown).mean())
        self._rows.extend((cost, grade, share, shared, encoded.tokens, encoded.cut > 0))

    def slices(self) -> Iterator[Slice]:
        """Yield the slices that hold some examples and not all of them."""
        _, _, unknown, shared, tokens, cut = self._columns()
        slices, low = list[Slice](), -1.0
        for high in np.unique(np.quantile(tokens, [0.25, 0.5, 0.75, 1]).astype(np.int64)).tolist():
            # Equal quartiles, as of short texts, are one bound by `unique`.
            inside = (tokens > low) & (tokens <= high)
            name = f"{tokens[inside].min():,.0f} to {high:,} tokens" if inside.any() else ""
            slices.append(Slice("length (quartiles)", name, inside))
            low = high
        for start, end in ((0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0)):
            last = end == 1.0
            inside = (shared >= start) & ((shared <= end) if last else (shared < end))
            name = f"{start:.0%} to {end:.0%}" + ("" if last else " (exclusive)")
            slices.append(Slice("words that a pair shares", name, inside))
        slices += [
            Slice("unknown tokens", "none", unknown == 0),
            Slice("unknown tokens", "up to 5 %", (unknown > 0) & (unknown <= 0.05)),
            Slice("unknown tokens", "more than 5 %", unknown > 0.05),
            Slice("truncation", "whole", cut == 0),
            Slice("truncation", "truncated", cut > 0),
        ]
        return (item for item in slices if 0 < item.members.sum() < len(self))

    def table(self, grade_name: str | None, cost_name: str) -> s.TableSection:
        """Return the mean cost and the mean grade of each slice, with 95 % intervals."""
        everything = Slice("all", "", np.ones(len(self), dtype=np.bool_))
        costs, grades, *_ = self._columns()
        rows: list[list[s.Cell]] = []
        for item in (everything, *self.slices()):
            row: list[s.Cell] = [item.by, item.name, int(item.members.sum())]
            if grade_name is not None:
                row += map(s.percentage, _mean(grades[item.members]))
            rows.append([*row, *_mean(costs[item.members])])
        graded = [] if grade_name is None else [grade_name, "±"]
        columns = ["by", "part", "examples", *graded, cost_name, "±"]
        note = "± is a 95 % interval of the mean. Parts with few examples say little."
        return s.TableSection("Parts of the data", columns, rows, note=note)


def _mean(values: NDArray[np.float32]) -> tuple[float, float]:
    """Return the mean and half of its 95 % interval, which is infinite for a single value."""
    exact = values.astype(np.float64)
    spread = exact.std(ddof=1) / math.sqrt(len(exact)) if len(exact) > 1 else math.inf
    return float(exact.mean()), NORMAL_95 * float(spread)
