"""Nearest vectors, vectors in fewer bits, and the metrics of sentence vectors.

Nearest are the rows of a matrix with the highest dot products with queries:

    scores, rows = top_k(queries, vectors, 10)

Scores are computed block by block in fp32, and the rows that rounding leaves in doubt are scored
again in float64. So the result is that of float64 rounded to fp32, whatever the blocks, the other
queries and the processor, and equal scores have a fixed order. Memory: one block of scores.

Vectors of a byte or a bit for each component are as `quantize_embeddings` of sentence-transformers.

int8, uint8       floor(255 · (v − lowest) / (highest − lowest)), by component; int8 less 128
binary, ubinary   v > 0, eight components a byte, the first one highest; binary less 128

Retrieval is among the texts of the dev data, and exact: blocks of queries against all documents, so
that memory grows with the vectors alone.

Agreement with human scores is Pearson's and Spearman's correlation, as in the Semantic Textual
Similarity benchmarks. Anisotropy is the mean cosine of any two texts (Ethayarajh 2019 measures it
on words): near 1, all vectors are in one narrow cone. It is exact over all pairs of texts and needs
constant memory: with unit vectors u, Σ_{i≠j} u_i·u_j = |Σ u|² − n.
"""

from __future__ import annotations

import tokenize
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Float32, Int64, Shaped
from numpy.typing import NDArray

from bothways.core.errors import ConfigError, DataError, argument
from bothways.tasks.base import Metrics, required
from bothways.tasks.columns import number_of
from bothways.tasks.metrics import TINY, correlation, mean_ranking
from bothways.tasks.predictions import VectorPrediction
from bothways.tasks.sentence_embedding.examples import VectorExample
from bothways.tasks.text_task import TextExample

BLOCK_ROWS = 2**15
BLOCK_SCORES = 2**22
"""Scores of a block, of all queries together."""
QUERIES = 256
"""Queries that are compared at once."""
DOUBTFUL = 2**18
"""Rows in doubt from which they are scored exactly at once, such as those of equal documents."""
ARRAY_FAULTS = (
    OSError, ValueError, EOFError, TypeError, OverflowError, RecursionError, SyntaxError,
    tokenize.TokenError,
)  # fmt: skip
"""What numpy raises for a damaged .npy file, whose header is a Python expression."""
LOWEST = np.float32(np.finfo(np.float32).min)
Score = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float32]]
Found = tuple[Float32[np.ndarray, "queries k"], Int64[np.ndarray, "queries k"]]


@runtime_checkable
class Vectors(Protocol):
    """A matrix in fp32, or an object that decodes its rows when they are read."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, which: slice | NDArray[np.int64], /) -> Any: ...


class Nearest:
    """The k best rows for each query, of scores that arrive block by block.

    Args:
        score: returns the exact scores of queries and rows, given by their numbers.
        slack: maximum difference of a score in a block from the exact one, by query.
        names: of the rows: of equal scores the highest name comes first, as in trec_eval. None: the
            lowest row.
    """

    def __init__(
        self,
        k: int,
        score: Score,
        slack: Float[np.ndarray, " queries"],
        names: Shaped[np.ndarray, " rows"] | None = None,
    ) -> None:
        self.k, self.score, self.slack, self.names = k, score, slack, names
        self.kth = np.full(len(slack), LOWEST)
        self.queries, self.rows = np.empty((2, 0), np.int64)
        self.scores = np.empty(0, np.float32)

    def add(self, start: int, scores: Float32[np.ndarray, "queries block"]) -> None:
        """Add the scores of the rows from `start`, −inf for rows that do not count.

        Raises:
            DataError: a score is not a number.
        """
        if np.isnan(scores.sum()) and np.isnan(scores).any():
            message = "a score is not a number: a vector is damaged, or has infinite components"
            raise DataError(message, where="vectors", fix="Compute the vectors again.")
        hits = scores >= self._floor[:, None]
        # Many hits: the k-th best of the block raises the floor before candidates are copied.
        if self.k < scores.shape[1] and np.count_nonzero(hits) > 8 * self.k * len(hits):
            best = np.partition(scores, -self.k)[:, -self.k]
            self.kth = np.maximum(self.kth, best)
            hits = scores >= self._floor[:, None]
        queries, columns = np.nonzero(hits)
        self.queries = np.concatenate([self.queries, queries])
        self.rows = np.concatenate([self.rows, columns + start])
        self.scores = np.concatenate([self.scores, scores[queries, columns]])
        self._sort()
        if len(self.rows) > DOUBTFUL:
            self._settle()

    def result(self) -> Found:
        """Return exact scores and rows, best first; all queries have equally many."""
        self._settle()
        shape = (len(self.slack), len(self.rows) // max(1, len(self.slack)))
        return self.scores.reshape(shape), self.rows.reshape(shape)

    def _settle(self) -> None:
        """Score the rows exactly, and keep the best k of each query."""
        self.scores = self.score(self.queries, self.rows)
        if self.names is None:
            self._sort(self.rows)
        else:
            self._sort(-np.unique(self.names[self.rows], return_inverse=True)[1])
        places = np.arange(len(self.rows)) - np.searchsorted(self.queries, self.queries)
        self._keep(places < self.k)

    def _sort(self, *ties: NDArray[np.int64]) -> None:
        """Sort the rows by query and score, and drop those that cannot be among the best."""
        keys: list[NDArray[np.generic]] = [*ties, -self.scores, self.queries]
        self._keep(np.lexsort(keys))
        numbers = np.arange(len(self.slack))
        kth = np.searchsorted(self.queries, numbers) + self.k - 1
        full = kth < np.searchsorted(self.queries, numbers, "right")
        self.kth[full] = np.maximum(self.kth[full], self.scores[kth[full]])
        self._keep(self.scores >= self._floor[self.queries])

    def _keep(self, which: NDArray[np.int64] | NDArray[np.bool_]) -> None:
        self.queries, self.rows = self.queries[which], self.rows[which]
        self.scores = self.scores[which]

    @property
    def _floor(self) -> NDArray[np.float32]:
        """The lowest score of a block that may be among the best, by query.

        The exact score of the k-th row is at least kth − slack, and that of a row at most its score
        in the block + slack.
        """
        lowest = np.nextafter((self.kth - 2 * self.slack).astype(np.float32), LOWEST)
        floor: NDArray[np.float32] = np.maximum(lowest, LOWEST)
        return floor


def top_k(
    queries: Float[np.ndarray, "queries width"],
    vectors: Vectors,
    k: int,
    *,
    names: Shaped[np.ndarray, " rows"] | None = None,
    deleted: Bool[np.ndarray, " rows"] | None = None,
) -> Found:
    """Return the k highest dot products of each query with the rows of a matrix, and the rows.

    Args:
        queries, vectors: in fp32; unit vectors for cosines. `vectors` may be memory-mapped.
        names: of the rows: of equal scores the highest name comes first, as in trec_eval. None: the
            lowest row.
        deleted: True for rows that do not count.

    Returns:
        Scores and rows, best first; fewer than k if there are fewer rows.

    Raises:
        DataError: the widths differ, or a score is not a number.

    Examples:
        >>> scores, rows = top_k(np.eye(2), np.array([[0.5, 0.0], [0.0, 1.0]]), k=1)
        >>> scores.tolist(), rows.tolist()
        ([[0.5], [1.0]], [[0], [1]])
    """
    check_widths(queries.shape[1], vectors.shape[1])
    results, known = list[Found](), getattr(vectors, "longest", None)
    longest = 0.0 if known is None else known
    queries = np.ascontiguousarray(queries, np.float32)
    for group in np.split(queries, range(QUERIES, len(queries), QUERIES)):
        nearest = Nearest(k, dot_products(group, vectors), np.zeros(len(group)), names)
        size = min(BLOCK_ROWS, max(1, BLOCK_SCORES // max(1, len(group))))
        for start in range(0, len(vectors), size):
            block = np.asarray(vectors[start : start + size], np.float32)
            with np.errstate(over="ignore", invalid="ignore"):  # `add` refuses the result
                if known is None:
                    squares = np.einsum("ij,ij->i", block, block)
                    longest = max(longest, float(np.sqrt(squares.max(initial=0.0))))
                nearest.slack = rounding(group, longest)
                scores = group @ block.T
            if deleted is not None:
                scores[:, deleted[start : start + size]] = -np.inf
            nearest.add(start, scores)
        results.append(nearest.result())
    if hasattr(vectors, "longest"):  # lengths take as long as products: they are read once
        vectors.longest = longest
    scores, rows = (np.concatenate(values) for values in zip(*results, strict=True))
    return scores, rows


def check_widths(queries: int, vectors: int) -> None:
    """Raise a DataError if queries and vectors have not the same width, at least 1."""
    if queries != vectors or not vectors:
        message = f"queries have {queries} components, and vectors {vectors}"
        raise DataError(message, where="queries", fix="Compare vectors of one model.")


def dot_products(queries: Float[np.ndarray, "queries width"], vectors: Vectors) -> Score:
    """Return a function of pairs that computes dot products in float64 and rounds them to fp32.

    The sum over a row is batch-invariant, to the bit.
    """

    def score(numbers: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.float32]:
        result, size = np.empty(len(rows), np.float32), BLOCK_SCORES // queries.shape[1]
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            # Products of fp32 are exact in float64; a row's sum has one order whatever the block.
            products = queries[numbers[part]].astype(np.float64) * vectors[rows[part]]
            result[part] = products.sum(axis=1)
        return result

    return score


def rounding(
    queries: Float[np.ndarray, "queries width"], longest: float
) -> Float[np.ndarray, " queries"]:
    """Return the largest rounding error of a product in fp32 with a vector, by query.

    |fl(q·d) − q·d| ≤ n·u·|q||d| with u = 2^−24 (Higham 2002, section 3.1), twice for the sums that
    a kernel may split.
    """
    lengths = np.linalg.norm(queries.astype(np.float64), axis=1)
    result: Float[np.ndarray, " queries"] = 2 * queries.shape[1] * 2.0**-24 * lengths * longest
    return result


VectorType = Literal["float32", "int8", "uint8", "binary", "ubinary"]


def ranges_of(vectors: Any) -> NDArray[np.float32]:
    """Return the lowest and the highest value of each component of several vectors."""
    array = np.asarray(vectors)
    if array.ndim != 2 or len(array) < 2 or array.dtype.kind != "f":
        message = f"must be two vectors or more in floating point, not {array.dtype}{array.shape}"
        fix = "Give vectors of some hundred texts or more; their ranges are used."
        raise ConfigError(message, where="calibration", fix=fix)
    return np.stack([array.min(axis=0), array.max(axis=0)]).astype(np.float32)


def quantize(
    vectors: NDArray[np.float32], kind: VectorType, ranges: Any = None
) -> NDArray[np.generic]:
    """Return vectors `(…, width)` in another type, to the bit as sentence-transformers does.

    Args:
        ranges: the lowest and the highest value of each component `(2, width)`, for int8 and uint8.

    Raises:
        ConfigError: there are no ranges, or they do not fit.
    """
    if kind == "float32":
        return vectors
    if "binary" in kind:
        bits: NDArray[np.uint8] = np.packbits(vectors > 0, axis=-1)
        return bits if kind == "ubinary" else (bits - np.uint8(128)).view(np.int8)
    bounds = None if ranges is None else np.asarray(ranges, np.float32)
    if bounds is None or bounds.shape != (2, vectors.shape[-1]) or not np.isfinite(bounds).all():
        message = f"{kind} needs the lowest and the highest value of each component"
        if bounds is not None:
            message = f"{message}: 2 rows of {vectors.shape[-1]} finite numbers, not {bounds.shape}"
        fix = "Give the ranges of many vectors of this model; binary and ubinary need none."
        raise ConfigError(message, where="ranges", fix=fix)
    if (bounds[0] > bounds[1]).any():
        message, fix = "a lowest value is above the highest one", "Give the lowest values first."
        raise ConfigError(message, where="ranges", fix=fix)
    steps = (bounds[1] - bounds[0]) / 255
    # A component that never varied has step 0; dividing by 1 gives it code 0.
    codes = np.clip(np.floor((vectors - bounds[0]) / np.where(steps == 0, 1, steps)), 0, 255)
    result: NDArray[np.generic] = (
        codes.astype(np.uint8) if kind == "uint8" else (codes - 128).astype(np.int8)
    )
    return result


def retrieval(results: Iterable[tuple[TextExample, VectorPrediction]]) -> Metrics:
    """Return the mean over queries of nDCG@10, MRR@10 and MAP.

    Queries are the anchors, documents the positives and negatives of all of them; equal texts are
    one, and a document with the text of the query is dropped unless it is its positive. Of texts
    with a class each is a query, and the others are its documents: those of its class are relevant.

    Args:
        results: of at least one example.

    Raises:
        DataError: a text without a class among texts with one.
    """
    queries, documents = dict[str, NDArray[np.float32]](), dict[str, NDArray[np.float32]]()
    relevant = defaultdict[str, set[str]](set)  # documents by query, or by class
    classes = dict[str, str]()
    for example, prediction in results:
        lengths = np.linalg.norm(prediction.vectors, axis=1, keepdims=True)
        units = prediction.vectors / np.where(lengths == 0, 1, lengths)
        queries[example.text] = units[0]
        if example.text_b is None:
            documents[example.text] = units[0]
            classes[example.text] = required(example.label or None, example.where, "class")
            relevant[classes[example.text]].add(example.text)
            continue
        others, negatives = [example.text_b], 0
        if isinstance(example, VectorExample):
            others, negatives = [*example.all_texts[1:]], len(example.negatives)
        documents |= dict(zip(others, units[1:], strict=True))
        relevant[example.text].update(others[: len(others) - negatives])
    columns = {text: column for column, text in enumerate(documents)}
    matrix, rows = np.stack([*documents.values()]), np.stack([*queries.values()])

    def rankings() -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]:
        for number, query in enumerate(queries):
            if number % QUERIES == 0:
                block = (rows[number : number + QUERIES] @ matrix.T).astype(np.float64)
            scores, labels = block[number % QUERIES], np.zeros(len(documents))
            labels[[columns[text] for text in relevant[classes.get(query, query)]]] = 1
            if query in columns and (classes or query not in relevant[query]):
                # a text does not find itself
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
