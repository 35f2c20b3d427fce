"""Metrics from counts equal scikit-learn's on the arrays themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn import metrics

from bothways.tasks.metrics import classification


def _correlation(truth: NDArray[np.int64], predicted: NDArray[np.int64], count: int) -> float:
    """Gorodkin 2004: the correlation of the two arrays as rows of one-hot vectors; 0 where one of them does not vary."""
    x, y = np.eye(count)[truth], np.eye(count)[predicted]
    x, y = x - x.mean(0), y - y.mean(0)
    norm = np.sqrt((x * x).sum() * (y * y).sum())
    return float((x * y).sum() / norm) if norm > 0 else 0.0


@given(st.integers(2, 5).flatmap(lambda n: st.lists(st.tuples(*[st.integers(0, n - 1)] * 2), min_size=1).map(lambda x: (n, x))))
def test_counts_give_what_the_arrays_give(case: tuple[int, list[tuple[int, int]]]) -> None:
    count, pairs = case
    truth, predicted = (np.array(column) for column in zip(*pairs, strict=True))
    confusion = np.zeros((count, count), dtype=np.int64)
    np.add.at(confusion, (truth, predicted), 1)
    expected = {
        "accuracy": (truth == predicted).mean(),
        "f1_macro": metrics.f1_score(truth, predicted, average="macro", zero_division=0.0),
        "mcc": _correlation(truth, predicted, count),
    }
    if count == 2:
        true_positives, wrong = ((truth == 1) & (predicted == 1)).sum(), (truth != predicted).sum()
        expected["f1"] = 2 * true_positives / (2 * true_positives + wrong) if true_positives + wrong else 0.0
    assert classification(confusion) == pytest.approx(expected)
