"""Rows of new tokens from those of old tokens that occur in similar contexts, as FOCUS.

FOCUS (Dobler & de Melo 2023) weights the rows of known tokens by the sparsemax of the cosines
between vectors of fastText, trained on text in the new vocabulary. Here the vectors are the
truncated singular value decomposition of positive pointwise mutual information, which needs no
training and no further library (Levy & Goldberg 2014: skip-gram factorises a shifted form of it).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray as Array
from numpy.typing import NDArray

WINDOW, DIMENSIONS, LEAST = 5, 100, 10
"""Neighbours on each side, dimensions of a vector, and occurrences below which there is none."""

_ROWS = 512
_LEAST_WEIGHT = 1e-9
"""Smaller weights are rounding errors."""


def token_vectors(
    texts: Iterable[NDArray[np.int32]], size: int
) -> tuple[Float[Array, "vocab dimensions"], NDArray[np.bool_]]:
    """Return a vector of length 1 for each token of `size`, and which tokens occur often enough.

    Memory grows with the number of different pairs of neighbours.
    """
    from scipy import sparse
    from scipy.sparse.linalg import svds

    counts = sparse.csr_matrix((size, size), dtype=np.float64)
    uses = np.zeros(size, np.int64)
    for ids in texts:
        uses += np.bincount(ids, minlength=size)
        for distance in range(1, min(WINDOW, len(ids) - 1) + 1):
            pair = (ids[:-distance], ids[distance:])
            neighbours = sparse.coo_matrix(
                (np.ones(len(pair[0])), pair), shape=(size, size)
            ).tocsr()
            counts = counts + neighbours + neighbours.T
    often = uses >= LEAST
    pairs = counts.tocoo()
    totals = np.asarray(counts.sum(1)).ravel()
    information = np.log(
        pairs.data * max(1.0, totals.sum()) / (totals[pairs.row] * totals[pairs.col])
    )
    positive = information > 0
    matrix = sparse.csr_matrix(
        (information[positive], (pairs.row[positive], pairs.col[positive])), shape=(size, size)
    )
    dimensions = min(DIMENSIONS, size - 2, max(1, matrix.nnz))
    # A fixed start makes the decomposition, and so the converted model, reproducible.
    start = np.random.default_rng(0).standard_normal(size)
    left, values, _ = svds(matrix, k=dimensions, v0=start)
    vectors = left * values  # the cosines are those of the rows of the matrix
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(length, 1e-12), often & (length[:, 0] > 1e-12)


def sparsemax(scores: Float[Array, " tokens"]) -> Float[Array, " tokens"]:
    """Return the nearest point to the scores among probabilities (Martins & Astudillo 2016)."""
    ranked = np.sort(scores)[::-1]
    sums = np.cumsum(ranked)
    ranks = np.arange(1, len(scores) + 1)
    support = int((1 + ranks * ranked > sums).sum())
    result: NDArray[np.float64] = np.maximum(scores - (sums[support - 1] - 1) / support, 0)
    return result


def similar_tokens(
    texts: Iterable[NDArray[np.int32]],
    size: int,
    new: Int[Array, " new"],
    old: Int[Array, " known"],
) -> dict[int, list[tuple[int, float]]]:
    """Return for new tokens the known ones to mix, with weights that add up to 1, highest first.

    Tokens that occur too rarely for a vector are missing.
    """
    vectors, often = token_vectors(texts, size)
    old = old[often[old]]
    new = new[often[new]]
    result: dict[int, list[tuple[int, float]]] = {}
    if not len(old):
        return result
    for at in range(0, len(new), _ROWS):
        rows = new[at : at + _ROWS]
        for id, scores in zip(rows.tolist(), vectors[rows] @ vectors[old].T, strict=True):
            weights = sparsemax(scores)
            order = np.argsort(-weights, kind="stable")[: int((weights > _LEAST_WEIGHT).sum())]
            result[id] = [(int(old[n]), float(weights[n])) for n in order]
    return result
