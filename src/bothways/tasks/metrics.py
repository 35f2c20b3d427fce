"""Metrics from counts, so that their memory does not grow with the number of examples; the formulas are scikit-learn's.

Correlations are the exception: ranks need all scores at once.
"""

from __future__ import annotations

import warnings

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray


def classification_metrics(confusion: Int[NDArray[np.int64], "labels labels"]) -> dict[str, float]:
    """Accuracy, macro F1 and Matthews correlation, and for two classes the F1 of the second.

    Args:
        confusion: `[i, j]` counts examples of class i that were predicted as j; at least one in all.

    Returns:
        "accuracy", "f1_macro" (over the classes that occur or are predicted), "mcc", and "f1" for two classes; 0 where a
        quotient has no meaning.
    """
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    truth, predicted = np.nonzero(confusion)
    counts, single = confusion[truth, predicted], len({*truth.tolist(), *predicted.tolist()}) == 1
    scores = {
        "accuracy": accuracy_score(truth, predicted, sample_weight=counts),
        "f1_macro": f1_score(
            truth, predicted, average="macro", sample_weight=counts, zero_division=0.0
        ),
        # Where there is but one class, scikit-learn says 0 too, with a warning.
        "mcc": 0.0 if single else matthews_corrcoef(truth, predicted, sample_weight=counts),
    }
    if len(confusion) == 2:
        scores["f1"] = f1_score(
            truth, predicted, average="binary", sample_weight=counts, zero_division=0.0
        )
    return {name: float(score) for name, score in scores.items()}


def multilabel_metrics(
    right: Int[NDArray[np.int64], " labels"], wrong: Int[NDArray[np.int64], " labels"]
) -> dict[str, float]:
    """F1 where an example has any number of labels.

    Args:
        right: for each label, the examples that have it and were given it.
        wrong: for each label, the examples that have it or were given it, not both.

    Returns:
        "f1_micro" of all decisions together and "f1_macro", the mean over the labels; 0 where nothing has or gets one.
    """
    pooled = int(2 * right.sum() + wrong.sum())
    each = 2 * right / np.maximum(1, 2 * right + wrong)
    return {"f1_micro": 2 * int(right.sum()) / max(1, pooled), "f1_macro": float(each.mean())}


def best_thresholds(
    truth: Int[NDArray[np.int64], "examples labels"],
    probabilities: Float[NDArray[np.float64], "examples labels"],
) -> tuple[float, ...]:
    """For each label the threshold with the best F1, where a label is given from its threshold on.

    It lies halfway between the last probability that is above it and the next one below, so that rounding moves nothing across.
    Of equally good ones it is the nearest to one half; a label that no example has keeps one half.
    """
    return tuple(
        _best_threshold(truth[:, at], probabilities[:, at]) for at in range(truth.shape[1])
    )


def _best_threshold(
    truth: Int[NDArray[np.int64], " examples"],
    probabilities: Float[NDArray[np.float64], " examples"],
) -> float:
    if not truth.any():
        return 0.5
    levels, place = np.unique(probabilities, return_inverse=True)  # ascending
    have = np.bincount(place, weights=truth)[::-1].cumsum()[::-1]
    given = np.bincount(place)[::-1].cumsum()[::-1]
    f1 = 2 * have / (given + truth.sum())
    between = (levels + np.concatenate([[0.0], levels[:-1]])) / 2
    best = between[f1 >= f1.max() - 1e-12]
    return float(best[np.abs(best - 0.5).argmin()])


def correlation(
    truth: Float[NDArray[np.float64], " n"], predicted: Float[NDArray[np.float64], " n"]
) -> dict[str, float]:
    """How two arrays of scores agree; 16 bytes an example.

    Returns:
        "pearson" and "spearman" (0 where one of the arrays does not vary, and for a single example), and "mse".
    """
    from scipy import stats

    result = {"pearson": 0.0, "spearman": 0.0, "mse": float(np.square(truth - predicted).mean())}
    if np.ptp(truth) > 0 and np.ptp(predicted) > 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # scipy's, about arrays that hardly vary
            result["pearson"] = float(stats.pearsonr(truth, predicted).statistic)
            result["spearman"] = float(stats.spearmanr(truth, predicted).statistic)
    return result
