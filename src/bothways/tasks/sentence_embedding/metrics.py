"""Metrics of sentence vectors: retrieval, and agreement with human similarity scores.

Retrieval is among the texts of the dev data, and exact: blocks of queries against all documents, so
that memory grows with the vectors alone.

Correlations are Pearson's and Spearman's, as in the Semantic Textual Similarity benchmarks.
Anisotropy is the mean cosine of any two texts (Ethayarajh 2019 measures it on words): near 1, all
vectors are in one narrow cone. It is exact over all pairs of texts and needs constant memory: with
unit vectors u, Σ_{i≠j} u_i·u_j = |Σ u|² − n.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bothways.core.errors import DataError, argument
from bothways.tasks.base import Metrics, nothing_to_score
from bothways.tasks.columns import number_of
from bothways.tasks.metrics import TINY, correlation, mean_ranking
from bothways.tasks.predictions import VectorPrediction
from bothways.tasks.sentence_embedding.examples import VectorExample
from bothways.tasks.text_task import TextExample

Vector = NDArray[np.float32]
Scores = NDArray[np.float64]
BLOCK = 256
"""Queries that are compared at once."""


def retrieval(results: Iterable[tuple[TextExample, VectorPrediction]]) -> Metrics:
    """Return the mean over queries of nDCG@10, MRR@10 and MAP.

    Queries are the anchors, documents the positives and negatives of all of them; equal texts are
    one. Of texts with a class each is a query, and the others are its documents: those of its
    class are relevant.

    Raises:
        DataError: there is no example.
    """
    queries = dict[str, Vector]()
    documents = dict[str, Vector]()
    relevant = defaultdict[str, set[str]](set)  # documents by query, or by class
    classes = dict[str, str]()
    for example, prediction in results:
        lengths = np.linalg.norm(prediction.vectors, axis=1, keepdims=True)
        units = prediction.vectors / np.where(lengths == 0, 1, lengths)
        queries[example.text] = units[0]
        if example.text_b is None:
            documents[example.text] = units[0]
            classes[example.text] = str(example.label)
            relevant[str(example.label)].add(example.text)
            continue
        others, negatives = [example.text_b], 0
        if isinstance(example, VectorExample):
            others, negatives = [*example.all_texts[1:]], len(example.negatives)
        documents |= dict(zip(others, units[1:], strict=True))
        relevant[example.text].update(others[: len(others) - negatives])
    if not queries:
        raise nothing_to_score()
    columns = {text: column for column, text in enumerate(documents)}
    matrix, rows = np.stack([*documents.values()]), np.stack([*queries.values()])

    def rankings() -> Iterator[tuple[Scores, Scores]]:
        for number, query in enumerate(queries):
            if number % BLOCK == 0:
                block = (rows[number : number + BLOCK] @ matrix.T).astype(np.float64)
            scores, labels = block[number % BLOCK], np.zeros(len(documents))
            labels[[columns[text] for text in relevant[classes.get(query, query)]]] = 1
            if classes:  # a text does not find itself
                scores, labels = (np.delete(x, columns[query]) for x in (scores, labels))
            yield scores, labels

    return mean_ranking(rankings())


@dataclass(frozen=True)
class Correlation:
    """The agreement of one kind of vectors.

    Attributes:
        pearson, spearman: correlation of cosines with scores; 0 where one of them is constant.
        anisotropy: the mean cosine of two texts.
    """

    pearson: float
    spearman: float
    anisotropy: float


@dataclass
class Agreement:
    """Scored pairs for several kinds of vectors at once, such as layers and poolings ("cells").

    Memory: one number for each cell and pair.
    """

    scores: array[float] = field(default_factory=lambda: array("d"))
    cosines: array[float] = field(default_factory=lambda: array("f"))
    total: NDArray[np.float64] | None = None

    def add(self, score: float, vectors: NDArray[np.float32]) -> None:
        """Add a pair with its score and the vectors of its two texts `(2, cells, width)`."""
        wide = vectors.astype(np.float64)
        units = wide / np.maximum(np.linalg.norm(wide, axis=-1, keepdims=True), TINY)
        self.scores.append(score)
        self.cosines.extend((units[0] * units[1]).sum(-1).tolist())
        self.total = units.sum(0) + (0 if self.total is None else self.total)

    def cells(self) -> list[Correlation]:
        """Return the agreement of each cell.

        Raises:
            DataError: fewer than two pairs.
        """
        pairs = len(self.scores)
        if pairs < 2 or self.total is None:
            message = f"correlation needs at least two pairs, and there are {pairs}"
            raise DataError(message, fix="Give more data.")
        scores = np.array(self.scores)
        cosines = np.array(self.cosines, dtype=np.float64).reshape(pairs, -1)
        texts = 2 * pairs
        # Σ_{i≠j} u_i·u_j = |Σ u|² − n, over n (n − 1) ordered pairs
        means = ((self.total**2).sum(-1) - texts) / (texts * (texts - 1))
        cells = []
        for column, mean in zip(cosines.T, means.tolist(), strict=True):
            value = correlation(scores, column)
            cells.append(Correlation(value["pearson"], value["spearman"], mean))
        return cells


def gold_score(example: TextExample) -> float:
    """Return the score of a pair.

    Raises:
        DataError: the example has one text, or its label is not a number.
    """
    if example.text_b is None:
        fix = f"Name the columns: {argument(text='NAME', text_b='NAME', label='NAME')}."
        raise DataError("has one text; similarity needs two", where=example.where, fix=fix)
    score = number_of(example.label)
    if np.isnan(score):
        label = example.label
        message = "has no score" if label is None else f"the score {label!r} is not a number"
        fix = f"Name the column: {argument(label='NAME')}, or remove the row."
        raise DataError(message, where=example.where, fix=fix)
    return score
