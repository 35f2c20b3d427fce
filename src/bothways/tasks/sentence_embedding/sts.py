"""Sentence vectors against people's judgement: does the cosine of two texts rise with their similarity?

Correlations are Pearson's and Spearman's, as the Semantic Textual Similarity benchmarks report them. Anisotropy is the mean
cosine of any two texts (Ethayarajh 2019 measures it on words): near 1, all vectors lie in one narrow cone, and cosines tell
little by their value. It is computed exactly, over all pairs of texts, in constant memory: with unit vectors u,
Σ_{i≠j} u_i·u_j = |Σ u|² − n.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bothways.core.errors import DataError
from bothways.tasks.metrics import correlation
from bothways.tasks.text_examples import TextExample


@dataclass(frozen=True)
class Correlation:
    """Attributes:
    pearson, spearman: of cosines with scores; 0 where one of the two does not vary.
    anisotropy: the mean cosine of two texts.
    """

    pearson: float
    spearman: float
    anisotropy: float


@dataclass
class Agreement:
    """Scored pairs as they go by, for several kinds of vectors ("cells") at once. Memory grows by a number a cell and pair."""

    scores: array[float] = field(default_factory=lambda: array("d"))
    cosines: array[float] = field(default_factory=lambda: array("f"))
    total: NDArray[np.float64] | None = None

    def add(self, score: float, vectors: NDArray[np.float32]) -> None:
        """A pair with its score; the vectors of its two texts `(2, cells, width)`."""
        wide = vectors.astype(np.float64)
        units = wide / np.maximum(
            np.linalg.norm(wide, axis=-1, keepdims=True), np.finfo(np.float64).tiny
        )
        self.scores.append(score)
        self.cosines.extend((units[0] * units[1]).sum(-1).tolist())
        self.total = units.sum(0) + (0 if self.total is None else self.total)

    def cells(self) -> list[Correlation]:
        """What it came to, cell by cell.

        Raises:
            DataError: fewer than two pairs.
        """
        pairs = len(self.scores)
        if pairs < 2 or self.total is None:
            raise DataError(
                f"correlation needs two pairs or more, and there are {pairs}", fix="Give more data."
            )
        scores, cosines = (
            np.array(self.scores),
            np.array(self.cosines, dtype=np.float64).reshape(pairs, -1),
        )
        texts = 2 * pairs
        means = ((self.total**2).sum(-1) - texts) / (texts * (texts - 1))
        return [
            Correlation(found["pearson"], found["spearman"], float(mean))
            for found, mean in zip(
                (correlation(scores, column) for column in cosines.T), means, strict=True
            )
        ]


def gold(example: TextExample) -> float:
    """The score of a pair.

    Raises:
        DataError: it has no second text, or its label is no number.
    """
    if example.text_b is None:
        fix = "Name the columns: --text NAME --text-b NAME --label NAME."
        raise DataError("has one text, and a similarity is of two", where=example.where, fix=fix)
    try:
        score = float(example.label if example.label is not None else "")
    except ValueError:
        score = float("nan")
    if not np.isfinite(score):
        what = (
            f"the score {example.label!r} is no number"
            if example.label is not None
            else "has no score"
        )
        raise DataError(
            what, where=example.where, fix="Name the column: --label NAME, or take the row out."
        )
    return score
