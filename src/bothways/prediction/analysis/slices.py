"""Metrics on parts of the data: by length, shared words, unknown tokens and truncation.

A few bytes are kept of each example, so that quartiles are exact.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bothways.core.report import sections as s
from bothways.tasks.base import EncodedExample

NORMAL_95 = 1.96
"""Standard errors on each side of a mean that contain 95 % of a normal distribution."""


class Slice(NamedTuple):
    """The examples that are members of a slice by a criterion, and its value as a name."""

    by: str
    name: str
    members: NDArray[np.bool_]


class Traits:
    """Properties of examples: 21 bytes each."""

    def __init__(self) -> None:
        self._cost, self._grade, self._unknown, self._overlap = (array("f") for _ in range(4))
        self._tokens, self._cut = array("i"), array("b")

    def __len__(self) -> int:
        return len(self._cost)

    def add(
        self, encoded: EncodedExample, texts: Many[str], unknown: int, cost: float, grade: float
    ) -> None:
        """Add an example.

        Args:
            encoded: its encoded form.
            texts: texts of the example.
            unknown: the id of the unknown token.
            cost, grade: cost and grade of its prediction.
        """
        ids = np.concatenate([sequence.ids for sequence in encoded.sequences])
        self._cost.append(cost)
        self._grade.append(grade)
        self._unknown.append(float((ids == unknown).mean()))
        self._overlap.append(overlap(*texts) if len(texts) == 2 else math.nan)
        self._tokens.append(encoded.tokens)
        self._cut.append(encoded.cut > 0)

    def slices(self) -> Iterator[Slice]:
        """Yield the slices that hold some examples and not all of them."""
        cut, tokens = np.array(self._cut, dtype=np.bool_), np.array(self._tokens)
        shared, unknown = (np.array(x, dtype=np.float32) for x in (self._overlap, self._unknown))
        slices, low = list[Slice](), int(tokens.min(initial=0)) - 1
        for high in np.unique(np.quantile(tokens, [0.25, 0.5, 0.75, 1]).astype(np.int64)).tolist():
            inside = (tokens > low) & (tokens <= high)
            name = f"{tokens[inside].min():,} to {high:,} tokens" if inside.any() else ""
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
            Slice("truncation", "whole", ~cut),
            Slice("truncation", "truncated", cut),
        ]
        return (item for item in slices if 0 < item.members.sum() < len(self))

    def table(self, grade_name: str | None, cost_name: str) -> s.TableSection:
        """Return the mean cost and the mean grade of each slice, with 95 % intervals."""
        everything = Slice("all", "", np.ones(len(self), dtype=np.bool_))
        grades, costs = (np.array(x, dtype=np.float32) for x in (self._grade, self._cost))
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


def overlap(a: str, b: str) -> float:
    """Return the Jaccard index of two texts' words in lower case; 0 for two empty texts."""
    words, words_b = set(a.lower().split()), set(b.lower().split())
    return len(words & words_b) / max(1, len(words | words_b))


def _mean(values: NDArray[np.float32]) -> tuple[float, float]:
    """Return the mean and half of its 95 % interval, which is infinite for a single value."""
    exact = values.astype(np.float64)
    spread = exact.std(ddof=1) / math.sqrt(len(exact)) if len(exact) > 1 else math.inf
    return float(exact.mean()), NORMAL_95 * float(spread)
