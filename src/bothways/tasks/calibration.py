"""Probabilities that are right as often as they say, and sets of labels with a guarantee.

A temperature T divides the logits of classes (Guo et al. 2017, section 4.2), and changes no answer.
Labels that each apply or not have a scale and an offset each, σ(a z + b) (Platt 1999). Both are
linear in the logits, so they become part of the head's last layer: W/T and b/T, or a W and a b + c.

A conformal set holds the labels at least as probable as the k-th most probable right
label on n examples that the model has not seen, k = ⌈(n + 1)(1 − α)⌉. On exchangeable new examples
it holds the right one with a probability from 1 − α to 1 − α + 1/(n + 1) (Sadinle et al. 2019).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy.typing import NDArray

from bothways.core.errors import ConfigError
from bothways.tasks.base import softmax
from bothways.tasks.metrics import TINY, sigmoid

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


def require_error_rate(error: float) -> None:
    """Check that the error rate of sets is between 0 and 1; raises ConfigError."""
    if not 0 < error < 1:
        raise ConfigError(f"must be between 0 and 1, not {error}", where="error")


def conformal_threshold(right: Float64[np.ndarray, " examples"], error: float) -> float:
    """Return the least probability of a label in a conformal set.

    Args:
        right: the probability of the right label of each example.
        error: the share of sets that may miss the right label, α.

    Raises:
        ConfigError: the error rate is outside of (0, 1), or too small for so few examples.
    """
    require_error_rate(error)
    # As 0.9 · 10 is 9.000000000000002 in floating point, a hair is taken off before rounding up.
    rank = math.ceil((len(right) + 1) * (1 - error) - 1e-9)
    if rank > len(right):
        needed = math.ceil(1 / error - 1e-9) - 1
        message = f"{error} needs at least {needed} examples for the sets, and there are "
        fix = "Give more data, or allow a higher error rate."
        raise ConfigError(f"{message}{len(right)}", where="error", fix=fix)
    return float(np.sort(right)[::-1][rank - 1])


def negative_log_likelihood(right: Float64[np.ndarray, "*shape"]) -> float:
    """Return the mean −log of the probabilities of what is true, in nats."""
    return -float(np.log(np.maximum(right, TINY)).mean())
