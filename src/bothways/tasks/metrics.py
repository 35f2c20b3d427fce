"""Metrics from counts, so that memory does not grow with the examples; formulas as in scikit-learn.

Correlations and thresholds are exceptions: they need all scores at once.

nDCG@10, MRR@10 and MAP of rankings are as trec_eval defines them. The gain of a document is its
label (linear, not 2^label − 1), the discount of the place r is 1 / log2(r + 1), and a document is
relevant if its label is above 0. The best possible ranking is of the documents which were
scored. A query without a relevant document counts 0.

Documents with equal scores have no order: each metric is its mean over all orders of them (McSherry
and Najork 2008), where trec_eval orders them by their names.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float64, Int64
from numpy.typing import NDArray

TINY = float(np.finfo(np.float64).tiny)


def sigmoid(logits: Float[np.ndarray, "*n"]) -> Float64[np.ndarray, "*n"]:
    """Return 1 / (1 + exp(−z)), in float64."""
    result: NDArray[np.float64] = np.exp(-np.logaddexp(0.0, -logits.astype(np.float64)))
    return result


def negative_log(probability: float) -> float:
    """Return −log p in nats; finite for p = 0."""
    return -float(np.log(max(probability, TINY)))


def error_reduction(base: float, other: float, best: float = 1.0) -> float | None:
    """Return the fraction of the errors of `base` that `other` avoids; None if it has no errors.

    From 90 to 92 % right is a reduction by 20 %, as from 50 to 60 %. Negative for more errors.

    Args:
        best: the value without errors, which may also be the lowest one.
    """
    return None if base == best else (other - base) / (best - base)


def errors_text(reduction: float | None) -> str:
    """Return an error reduction in words: "20 % fewer errors"; "" for none."""
    if not reduction:
        return ""
    percent = 100 * abs(reduction)
    digits = 0 if percent >= 9.95 else 1
    return f"{percent:,.{digits}f} % {'more' if reduction < 0 else 'fewer'} errors"


class Confusion:
    """Counts of examples by true and predicted class. Memory: the pairs that occur, not labels².

    Attributes:
        labels: the number of classes.
        pairs: the number of examples of class i predicted as j, by (i, j).
    """

    def __init__(self, labels: int, pairs: Iterable[tuple[int, int]] = ()) -> None:
        self.labels, self.pairs = labels, Counter(pairs)

    @property
    def total(self) -> int:
        """The number of examples."""
        return self.pairs.total()

    @property
    def right(self) -> Int64[np.ndarray, " labels"]:
        """The number of right predictions of each class."""
        return np.array([self.pairs[at, at] for at in range(self.labels)], dtype=np.int64)

    @property
    def true(self) -> Int64[np.ndarray, " labels"]:
        """The number of examples of each class."""
        return self._sums(0)

    @property
    def predicted(self) -> Int64[np.ndarray, " labels"]:
        """The number of predictions of each class."""
        return self._sums(1)

    def _sums(self, axis: int) -> Int64[np.ndarray, " labels"]:
        result = np.zeros(self.labels, dtype=np.int64)
        for pair, count in self.pairs.items():
            result[pair[axis]] += count
        return result


def classification_metrics(confusion: Confusion) -> dict[str, float]:
    """Return accuracy, macro F1 and Matthews correlation; for two classes also the second's F1.

    Args:
        confusion: of at least one example.

    Returns:
        "accuracy", "f1_macro" (over classes that occur or are predicted), "mcc", and "f1" for two
        classes; 0 where a quotient is undefined.
    """
    correct = confusion.right.astype(np.float64)
    true, predicted = confusion.true.astype(np.float64), confusion.predicted.astype(np.float64)
    total, occurring = true.sum(), true + predicted > 0
    # F1 = 2·TP / (2·TP + FP + FN) = 2·right / (true + predicted), of each class
    f1 = 2 * correct / np.maximum(1, true + predicted)
    # Matthews correlation of several classes (Gorodkin 2004), in counts.
    norm = np.sqrt(total**2 - true @ true) * np.sqrt(total**2 - predicted @ predicted)
    scores = {
        "accuracy": correct.sum() / total,
        "f1_macro": f1[occurring].mean(),
        "mcc": (total * correct.sum() - true @ predicted) / norm if norm > 0 else 0.0,
    }
    if confusion.labels == 2:
        scores["f1"] = f1[1]
    return {name: float(score) for name, score in scores.items()}


def multilabel_metrics(
    correct: Int64[np.ndarray, " labels"], errors: Int64[np.ndarray, " labels"]
) -> dict[str, float]:
    """Return F1 where an example has any number of labels.

    Args:
        correct: for each label, the examples that have it and were assigned it.
        errors: for each label, the examples that have it or were assigned it, not both.

    Returns:
        "f1_micro" of all decisions together and "f1_macro", the mean over labels; 0 for labels that
        no example has or was assigned.
    """
    # Errors are FP + FN: F1 = 2·TP / (2·TP + FP + FN), of all labels together and of each
    f1_micro = 2 * int(correct.sum()) / max(1, int(2 * correct.sum() + errors.sum()))
    per_label = 2 * correct / np.maximum(1, 2 * correct + errors)
    return {"f1_micro": f1_micro, "f1_macro": float(per_label.mean())}


class _Cuts(NamedTuple):
    """The candidate thresholds of a label, and the assignments that each results in."""

    thresholds: NDArray[np.float64]
    right: NDArray[np.float64]
    assigned: NDArray[np.float64]

    def best(self, value: NDArray[np.float64]) -> int:
        """Return the candidate with the greatest value; of equal ones the nearest to one half."""
        equal = np.flatnonzero(value >= value.max() - 1e-12)
        return int(equal[np.abs(self.thresholds[equal] - 0.5).argmin()])


def _cuts(truth: NDArray[np.int64], probabilities: NDArray[np.float64]) -> _Cuts:
    # A threshold is halfway between neighbouring probabilities, where rounding flips no example.
    # The last candidate is above all of them.
    levels, position = np.unique(probabilities, return_inverse=True)  # ascending
    correct = np.bincount(position, weights=truth)[::-1].cumsum()[::-1]
    assigned = np.bincount(position)[::-1].cumsum()[::-1]
    thresholds = (np.append(levels, 1.0) + np.insert(levels, 0, 0.0)) / 2
    return _Cuts(thresholds, np.append(correct, 0.0), np.append(assigned, 0))


def macro_thresholds(
    truth: Int64[np.ndarray, "examples labels"],
    probabilities: Float64[np.ndarray, "examples labels"],
) -> tuple[float, ...]:
    """Return for each label the threshold with its best F1; 0.5 for labels that no example has."""
    result = []
    for column, chances in zip(truth.T, probabilities.T, strict=True):
        cuts = _cuts(column, chances)
        f1 = 2 * cuts.right / (cuts.assigned + max(1, column.sum()))
        result.append(float(cuts.thresholds[cuts.best(f1)]) if column.any() else 0.5)
    return tuple(result)


def micro_thresholds(
    truth: Int64[np.ndarray, "examples labels"],
    probabilities: Float64[np.ndarray, "examples labels"],
) -> tuple[float, ...]:
    """Return the thresholds with the best F1 of all decisions together (micro-F1).

    Micro-F1 is the quotient 2·Σ right / (Σ assigned + Σ true). At its maximum F, the thresholds
    also maximize 2·Σ right − F·Σ assigned, which is a sum over labels: each label is solved by
    itself and F is updated until it no longer grows (Dinkelbach 1967). A label without a useful
    ranking is assigned to no example, where its own F1 would assign it to all.
    """
    known = truth.any(0)
    columns = [_cuts(*pair) for pair in zip(truth.T[known], probabilities.T[known], strict=True)]
    # A label that no example has keeps 0.5, and what is assigned at that counts as wrong.
    total = int(truth.sum()) + int((probabilities[:, ~known] >= 0.5).sum())
    best, f1, selected = -1.0, 0.0, [0] * len(columns)
    while f1 > best:
        best = f1
        selected = [cuts.best(2 * cuts.right - f1 * cuts.assigned) for cuts in columns]
        pairs = list(zip(columns, selected, strict=True))
        correct = sum(float(cuts.right[at]) for cuts, at in pairs)
        assigned = sum(float(cuts.assigned[at]) for cuts, at in pairs)
        f1 = 2 * correct / max(1.0, assigned + total)
    thresholds = np.full(truth.shape[1], 0.5)
    thresholds[known] = [cuts.thresholds[at] for cuts, at in zip(columns, selected, strict=True)]
    return tuple(thresholds.tolist())


def correlation(
    truth: Float64[np.ndarray, " n"], predicted: Float64[np.ndarray, " n"]
) -> dict[str, float]:
    """Return the agreement of two arrays of scores.

    Returns:
        "pearson" and "spearman" (0 where an array is constant or has one element), and "mse".
    """
    result = {"pearson": 0.0, "spearman": 0.0, "mse": float(np.square(truth - predicted).mean())}
    if np.ptp(truth) > 0 and np.ptp(predicted) > 0:
        result["pearson"] = _pearson(truth, predicted)
        result["spearman"] = _pearson(_ranks(truth), _ranks(predicted))
    return result


def _pearson(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    units = []
    for column in (x, y):
        centred = column - column.mean()
        centred /= np.abs(centred).max()  # squares of large numbers would overflow
        units.append(centred / np.linalg.norm(centred))
    return float(np.clip(units[0] @ units[1], -1, 1))


def _ranks(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the ranks from 1; equal numbers share the mean of theirs."""
    _, position, counts = np.unique(x, return_inverse=True, return_counts=True)
    result: NDArray[np.float64] = (counts.cumsum() - (counts - 1) / 2)[position]
    return result


PLACES = 10
"""The places that nDCG@10 and MRR@10 look at."""

Numbers = Float64[np.ndarray, " documents"]


def _tied(scores: Numbers, labels: Numbers) -> Iterator[tuple[int, Numbers]]:
    """Yield the labels of documents with equal scores, best first, and the number before them."""
    order = np.argsort(-scores, kind="stable")
    changes = np.flatnonzero(np.diff(scores[order])) + 1
    starts = [0, *changes.tolist()]
    yield from zip(starts, np.split(labels[order], changes), strict=True)


def ndcg(scores: Numbers, labels: Numbers) -> float:
    """Return the normalised discounted cumulative gain of the first places."""
    # The place r has 1 / log2(r + 1): 1, 0.63, 0.5 …
    discounts = np.zeros(max(PLACES, len(labels)))
    discounts[:PLACES] = 1 / np.log2(np.arange(PLACES) + 2)
    ideal = float(-np.sort(-labels) @ discounts[: len(labels)])
    if ideal == 0:
        return 0.0
    gain = 0.0
    for start, tied in _tied(scores, labels):
        gain += float(tied.mean() * discounts[start : start + len(tied)].sum())
    return gain / ideal


def reciprocal_rank(scores: Numbers, labels: Numbers) -> float:
    """Return 1 / the place of the first relevant document; 0 beyond the first places."""
    for start, tied in _tied(scores, labels):
        count, relevant = len(tied), int((tied > 0).sum())
        if not relevant:
            continue
        # Σ over n of P(none of the first n in the tie is relevant) · P(the next one is) / its place
        mean, none_yet = 0.0, 1.0
        for n in range(min(count - relevant + 1, PLACES - start)):
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
            # The relevant ones, on average, before a relevant document at place n of the tie
            n = np.arange(count)
            remaining = n * (relevant - 1) / max(1, count - 1)
            precisions = (relevant_before + 1 + remaining) / (start + n + 1)
            total += relevant / count * float(precisions.sum())
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
        pairs = self.by_query.values()
        return mean_ranking((np.frombuffer(s), np.frombuffer(labels)) for s, labels in pairs)


RANKING = {"ndcg@10": ndcg, "mrr@10": reciprocal_rank, "map": average_precision}
"""The metrics of a ranking by name."""


def mean_ranking(queries: Iterable[tuple[Numbers, Numbers]]) -> dict[str, float]:
    """Return the mean of each metric over the scores and the labels of each query."""
    values = [[metric(*pair) for metric in RANKING.values()] for pair in queries]
    return dict(zip(RANKING, np.mean(values, axis=0).tolist(), strict=True))
