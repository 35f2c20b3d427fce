"""Metrics of rankings: nDCG@10, MRR@10 and MAP, as trec_eval defines them.

The gain of a document is its label (linear, not 2^label − 1), the discount of the place r is
1 / log2(r + 1), and a document is relevant if its label is above 0. The best possible ranking is
that of the documents which were scored. A query without a relevant document counts 0.

Documents with equal scores have no order: each metric is its mean over all orders of them (McSherry
and Najork 2008), where trec_eval orders them by their names.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float64

PLACES = 10
"""The places that nDCG@10 and MRR@10 look at."""

Numbers = Float64[np.ndarray, " documents"]


def _tied(scores: Numbers, labels: Numbers) -> Iterator[tuple[int, Numbers]]:
    """Yield the labels of documents with equal scores, best first, and the number before them."""
    order = np.argsort(-scores, kind="stable")
    changes = np.flatnonzero(np.diff(scores[order])) + 1
    starts = [0, *changes.tolist()]
    yield from zip(starts, np.split(labels[order], changes), strict=True)


def ndcg(scores: Numbers, labels: Numbers, cutoff: int = PLACES) -> float:
    """Return the normalised discounted cumulative gain of the first places."""
    discounts = np.zeros(max(cutoff, len(labels)))
    discounts[:cutoff] = 1 / np.log2(np.arange(cutoff) + 2)
    ideal = float(-np.sort(-labels) @ discounts[: len(labels)])
    if ideal == 0:
        return 0.0
    gain = sum(
        float(tied.mean() * discounts[start : start + len(tied)].sum())
        for start, tied in _tied(scores, labels)
    )
    return gain / ideal


def reciprocal_rank(scores: Numbers, labels: Numbers, cutoff: int = PLACES) -> float:
    """Return 1 / the place of the first relevant document; 0 beyond the first places."""
    for start, tied in _tied(scores, labels):
        count, relevant = len(tied), int((tied > 0).sum())
        if not relevant:
            continue
        mean, none_yet = 0.0, 1.0
        for n in range(min(count - relevant + 1, cutoff - start)):
            mean += none_yet * relevant / (count - n) / (start + n + 1)
            none_yet *= (count - n - relevant) / (count - n)
        return mean
    return 0.0


def average_precision(scores: Numbers, labels: Numbers) -> float:
    """Return the mean, over relevant documents, of the share of relevant ones down to each."""
    total, relevant_before = 0.0, 0
    for start, tied in _tied(scores, labels):
        count, relevant = len(tied), int((tied > 0).sum())
        if relevant:
            n = np.arange(count)
            remaining = n * (relevant - 1) / max(1, count - 1)
            total += (
                relevant
                / count
                * float(((relevant_before + 1 + remaining) / (start + n + 1)).sum())
            )
        relevant_before += relevant
    return total / relevant_before if relevant_before else 0.0


@dataclass
class Rankings:
    """Scored documents, collected by query, wherever they are in the data.

    Memory: 16 bytes a document, and the queries.
    """

    by_query: dict[str, tuple[array[float], array[float]]] = field(default_factory=dict)

    def add(self, query: str, score: float, label: float) -> None:
        """Add a document."""
        scores, labels = self.by_query.setdefault(query, (array("d"), array("d")))
        scores.append(score)
        labels.append(label)

    def metrics(self) -> dict[str, float]:
        """Return the mean over queries of each metric; there must be a query."""
        values = [
            (ndcg(*pair), reciprocal_rank(*pair), average_precision(*pair))
            for pair in (
                (np.frombuffer(scores), np.frombuffer(labels))
                for scores, labels in self.by_query.values()
            )
        ]
        means = np.mean(values, axis=0).tolist()
        return dict(zip(("ndcg@10", "mrr@10", "map"), means, strict=True))
