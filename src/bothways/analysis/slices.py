"""How good a model is on parts of the data: short and long texts, pairs that share words, unknown tokens, what was cut.

A few bytes are kept of each example, so that quartiles are exact.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bothways.report import sections as s
from bothways.tasks.base import EncodedExample

NORMAL_95 = 1.96
"""Standard errors to each side of a mean that hold 95 % of a normal distribution."""

Chosen = NDArray[np.bool_]


@dataclass(frozen=True)
class Slice:
    """A part of the examples: by what, which part, and which examples."""

    by: str
    name: str
    chosen: Chosen


class Traits:
    """What is kept of every example: 21 bytes."""

    def __init__(self) -> None:
        self._cost, self._grade, self._unknown, self._overlap = (array("f") for _ in range(4))
        self._tokens, self._cut = array("i"), array("b")

    def __len__(self) -> int:
        return len(self._cost)

    def add(
        self, item: EncodedExample, texts: Many[str], unknown: int, cost: float, grade: float
    ) -> None:
        """Remember an example.

        Args:
            item: what it became.
            texts: of the example.
            unknown: the id of the unknown token.
            cost, grade: of its prediction.
        """
        ids = np.concatenate([sequence.ids for sequence in item.sequences])
        self._cost.append(cost)
        self._grade.append(grade)
        self._unknown.append(float((ids == unknown).mean()))
        self._overlap.append(overlap(*texts) if len(texts) == 2 else math.nan)
        self._tokens.append(item.tokens)
        self._cut.append(item.cut > 0)

    @property
    def cost(self) -> NDArray[np.float32]:
        """Of each example."""
        return np.array(self._cost, dtype=np.float32)

    @property
    def grade(self) -> NDArray[np.float32]:
        """Of each example."""
        return np.array(self._grade, dtype=np.float32)

    def slices(self) -> Iterator[Slice]:
        """All slices that hold an example and not all of them; together those of a kind hold each example once."""
        parts = (*self._by_length(), *self._by_overlap(), *self._by_unknown(), *self._by_cut())
        return (part for part in parts if 0 < part.chosen.sum() < len(self))

    def _by_length(self) -> Iterator[Slice]:
        tokens = np.array(self._tokens)
        low = int(tokens.min(initial=0)) - 1
        for high in np.unique(np.quantile(tokens, [0.25, 0.5, 0.75, 1]).astype(np.int64)).tolist():
            inside = (tokens > low) & (tokens <= high)
            name = f"{tokens[inside].min():,} to {high:,} tokens" if inside.any() else ""
            yield Slice("length (quartiles)", name, inside)
            low = high

    def _by_overlap(self) -> Iterator[Slice]:
        shared = np.array(self._overlap, dtype=np.float32)
        for low, high in ((0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0)):
            last = high == 1.0
            inside = (shared >= low) & ((shared <= high) if last else (shared < high))
            yield Slice(
                "words that a pair shares",
                f"{low:.0%} to {high:.0%}" + ("" if last else " (without)"),
                inside,
            )

    def _by_unknown(self) -> Iterator[Slice]:
        unknown = np.array(self._unknown, dtype=np.float32)
        yield Slice("unknown tokens", "none", unknown == 0)
        yield Slice("unknown tokens", "up to 5 %", (unknown > 0) & (unknown <= 0.05))
        yield Slice("unknown tokens", "more than 5 %", unknown > 0.05)

    def _by_cut(self) -> Iterator[Slice]:
        cut = np.array(self._cut, dtype=np.bool_)
        yield Slice("read whole or cut", "whole", ~cut)
        yield Slice("read whole or cut", "cut", cut)

    def table(self, grade: str | None, loss: str) -> s.TableSection:
        """Each slice with its mean loss and, unless it has no name, its mean grade; each with a 95 % interval."""
        everything = Slice("all", "", np.ones(len(self), dtype=np.bool_))
        parts, grades, costs = (everything, *self.slices()), self.grade, self.cost
        rows: list[list[s.Cell]] = []
        for part in parts:
            graded = (
                []
                if grade is None
                else [s.percentage(value) for value in _mean(grades[part.chosen])]
            )
            rows.append(
                [part.by, part.name, int(part.chosen.sum()), *graded, *_mean(costs[part.chosen])]
            )
        columns = [
            "by",
            "part",
            "examples",
            *([grade, "±"] if grade is not None else []),
            loss,
            "±",
        ]
        note = "± is a 95 % interval of the mean. A part with few examples says little."
        return s.TableSection("Parts of the data", columns, rows, note=note)


def overlap(a: str, b: str) -> float:
    """The share of two texts' words, in lower case, that are in both (Jaccard); 0 for two empty texts."""
    first, second = set(a.lower().split()), set(b.lower().split())
    return len(first & second) / max(1, len(first | second))


def _mean(values: NDArray[np.float32]) -> tuple[float, float]:
    """The mean, and how far its 95 % interval reaches to each side; infinitely far for a single value."""
    exact = values.astype(np.float64)
    spread = exact.std(ddof=1) / math.sqrt(len(exact)) if len(exact) > 1 else math.inf
    return float(exact.mean()), NORMAL_95 * float(spread)
