"""Metrics from counts, so that their memory does not grow with the number of examples; the formulas are scikit-learn's."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int
from numpy.typing import NDArray


def classification(confusion: Int[NDArray[np.int64], "labels labels"]) -> dict[str, float]:
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
        "f1_macro": f1_score(truth, predicted, average="macro", sample_weight=counts, zero_division=0.0),
        # Where there is but one class, scikit-learn says 0 too, with a warning.
        "mcc": 0.0 if single else matthews_corrcoef(truth, predicted, sample_weight=counts),
    }
    if len(confusion) == 2:
        scores["f1"] = f1_score(truth, predicted, average="binary", sample_weight=counts, zero_division=0.0)
    return {name: float(score) for name, score in scores.items()}
