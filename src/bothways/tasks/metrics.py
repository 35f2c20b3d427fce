"""Metrics of tasks, and probabilities that are right as often as they say.

Metrics come from counts, so that memory does not grow with the examples; formulas are as in
scikit-learn. Correlations and thresholds are exceptions: they need all scores at once.

nDCG@10, MRR@10 and MAP of rankings are as trec_eval defines them. The gain of a document is its
label (linear, not 2^label − 1), the discount of the place r is 1 / log2(r + 1), and a document is
relevant if its label is above 0. The best possible ranking is of the documents which were
scored. A query without a relevant document counts 0.

Documents with equal scores have no order: each metric is its mean over all orders of them (McSherry
and Najork 2008), where trec_eval orders them by their names.

A temperature T divides the logits of classes (Guo et al. 2017, section 4.2), and changes no answer.
Labels that each apply or not have a scale and an offset each, σ(a z + b) (Platt 1999). Both are
linear in the logits, so they become part of the head's last layer: W/T and b/T, or a W and a b + c.

A conformal set holds the labels at least as probable as the k-th most probable right
label on n examples that the model has not seen, k = ⌈(n + 1)(1 − α)⌉. On exchangeable new examples
it holds the right one with a probability from 1 − α to 1 − α + 1/(n + 1) (Sadinle et al. 2019).
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64
from numpy.typing import NDArray

from bothways.core.config.values import require_range
from bothways.core.errors import ConfigError
from bothways.tasks.base import softmax

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
    # One root of the product: of two roots, perfect predictions have 1.0000000000000002.
    norm = np.sqrt((total**2 - true @ true) * (total**2 - predicted @ predicted))
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


def _cuts(
    truth: NDArray[np.int64], probabilities: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return the candidate thresholds of a label, and the right and all assignments by each."""
    # A threshold is halfway between neighbouring probabilities, where rounding flips no example.
    # The last candidate is above all of them; none is above a probability of 1.
    levels, position = np.unique(probabilities, return_inverse=True)  # ascending
    correct = np.bincount(position, weights=truth)[::-1].cumsum()[::-1]
    assigned = np.bincount(position)[::-1].cumsum()[::-1]
    thresholds = (np.append(levels, 1.0) + np.insert(levels, 0, 0.0)) / 2
    count = len(thresholds) - int((levels == 1).any())
    return thresholds[:count], np.append(correct, 0.0)[:count], np.append(assigned, 0.0)[:count]


def _best(thresholds: NDArray[np.float64], value: NDArray[np.float64]) -> int:
    """Return the candidate with the greatest value; of equal ones the nearest to one half."""
    equal = np.flatnonzero(value >= value.max() - 1e-12)
    return int(equal[np.abs(thresholds[equal] - 0.5).argmin()])


def macro_thresholds(
    truth: Int64[np.ndarray, "examples labels"],
    probabilities: Float64[np.ndarray, "examples labels"],
) -> tuple[float, ...]:
    """Return for each label the threshold with its best F1; 0.5 for labels that no example has."""
    result = []
    for column, chances in zip(truth.T, probabilities.T, strict=True):
        thresholds, correct, assigned = _cuts(column, chances)
        f1 = 2 * correct / (assigned + max(1, column.sum()))
        result.append(float(thresholds[_best(thresholds, f1)]) if column.any() else 0.5)
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
        selected = [_best(limits, 2 * right - f1 * assigned) for limits, right, assigned in columns]
        pairs = list(zip(columns, selected, strict=True))
        correct = sum(float(right[at]) for (_, right, _), at in pairs)
        assigned = sum(float(all_assigned[at]) for (_, _, all_assigned), at in pairs)
        f1 = 2 * correct / max(1.0, assigned + total)
    thresholds = np.full(truth.shape[1], 0.5)
    thresholds[known] = [limits[at] for (limits, *_), at in zip(columns, selected, strict=True)]
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
    return min(gain / ideal, 1.0)  # which are sums in different orders


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


COLDEST, HOTTEST = 0.05, 20.0
"""The range of temperatures."""
FEW = 20
"""Examples with and without a label below which it has the scale of all labels together."""


class Scale(NamedTuple):
    """What a calibration does to logits: factor · z + offset, `(labels)` or one number for all."""

    factor: NDArray[np.float64]
    offset: NDArray[np.float64]


def fit_temperature(
    logits: Float64[np.ndarray, "examples classes"], truth: Int64[np.ndarray, " examples"]
) -> float:
    """Return the temperature with the least cross-entropy; 1 where every answer is right.

    Without an error the cross-entropy falls to 0 with T, and says nothing.
    """
    right = np.take_along_axis(logits, truth[:, None], axis=1)[:, 0]
    if (logits.argmax(1) == truth).all():
        return 1.0
    # With s = 1/T the derivative Σ E[z] − z(right) grows with s: its zero is bisected, in log s.
    low, high = math.log(1 / HOTTEST), math.log(1 / COLDEST)
    for _ in range(60):
        middle = (low + high) / 2
        expected = (softmax(math.exp(middle) * logits) * logits).sum(1)
        low, high = (middle, high) if (expected - right).sum() < 0 else (low, middle)
    return math.exp(-(low + high) / 2)


def fit_scales(
    logits: Float64[np.ndarray, "examples labels"], truth: Bool[np.ndarray, "examples labels"]
) -> Scale:
    """Return a factor and an offset for each label; one temperature for labels that few have."""
    decisions = logits.reshape(-1)
    two = np.stack([np.zeros_like(decisions), decisions], axis=1)  # σ(z) is a softmax of (0, z)
    shared = 1 / fit_temperature(two, truth.reshape(-1).astype(np.int64))
    factor, offset = np.full(logits.shape[1], shared), np.zeros(logits.shape[1])
    for label, (column, applies) in enumerate(zip(logits.T, truth.T, strict=True)):
        if min(applies.sum(), (~applies).sum()) >= FEW:
            a, b = _platt(column, applies, shared)
            # A label that the model has learned the wrong way round keeps its order.
            if 1 / HOTTEST <= a <= 1 / COLDEST:
                factor[label], offset[label] = a, b
    return Scale(factor, offset)


def _platt(
    logits: NDArray[np.float64], applies: NDArray[np.bool_], start: float
) -> tuple[float, float]:
    """Return a and b of σ(a z + b) with the least cross-entropy against Platt's targets.

    The targets (n₊ + 1)/(n₊ + 2) and 1/(n₋ + 2) keep both finite. The cross-entropy is convex:
    Newton's steps are halved until it falls (Lin et al. 2007).
    """
    positive, negative = int(applies.sum()), int((~applies).sum())
    target = np.where(applies, (positive + 1) / (positive + 2), 1 / (negative + 2))
    inputs = np.stack([logits, np.ones_like(logits)], axis=1)

    def cost(weights: NDArray[np.float64]) -> float:
        """Return the cross-entropy: log(1 + e^z) − target · z."""
        z = inputs @ weights
        return float((np.logaddexp(0, z) - target * z).sum())

    weights = np.array([start, 0.0])
    for _ in range(100):
        chances = sigmoid(inputs @ weights)
        gradient = inputs.T @ (chances - target)
        # Newton's method; the ridge keeps a curvature of separable data invertible.
        curvature = inputs.T @ (inputs * (chances * (1 - chances))[:, None])
        step = np.linalg.solve(curvature + 1e-12 * np.eye(2), gradient)
        # Halve the step until the cost falls: a full Newton step may overshoot.
        size = 1.0
        while size > 1e-10 and cost(weights - size * step) > cost(weights):
            size /= 2
        weights = weights - size * step
        if np.abs(size * step).max() < 1e-12:
            break
    return float(weights[0]), float(weights[1])


def conformal_threshold(right: Float64[np.ndarray, " examples"], error: float) -> float:
    """Return the least probability of a label in a conformal set.

    Args:
        right: the probability of the right label of each example.
        error: the share of sets that may miss the right label, α.

    Raises:
        ConfigError: the error rate is outside of (0, 1), or too small for so few examples.
    """
    require_range("(0, 1)", error=error)
    # As 0.9 · 10 is 9.000000000000002 in floating point, a hair is taken off before rounding up.
    rank = math.ceil((len(right) + 1) * (1 - error) - 1e-9)
    if rank > len(right):
        needed = math.ceil(1 / error - 1e-9) - 1
        message = f"{error} needs at least {needed} examples for the sets, and there are "
        fix = "Give more data, or allow a higher error rate."
        raise ConfigError(f"{message}{len(right)}", where="error", fix=fix)
    return float(np.sort(right)[::-1][rank - 1])
