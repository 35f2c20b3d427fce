"""Metrics from counts equal scikit-learn's on the arrays themselves, correlations scipy's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from sklearn import metrics

from bothways.tasks.metrics import (
    Confusion,
    classification_metrics,
    correlation,
    macro_thresholds,
    micro_thresholds,
    multilabel_metrics,
)


def _correlation(truth: NDArray[np.int64], predicted: NDArray[np.int64], count: int) -> float:
    """Gorodkin 2004: the correlation of the two arrays as rows of one-hot vectors; 0 where one of them does not vary."""
    x, y = np.eye(count)[truth], np.eye(count)[predicted]
    x, y = x - x.mean(0), y - y.mean(0)
    norm = np.sqrt((x * x).sum() * (y * y).sum())
    return float((x * y).sum() / norm) if norm > 0 else 0.0


@given(
    st.integers(2, 5).flatmap(
        lambda n: st.lists(st.tuples(*[st.integers(0, n - 1)] * 2), min_size=1).map(
            lambda x: (n, x)
        )
    )
)
def test_counts_give_what_the_arrays_give(case):
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
        expected["f1"] = (
            2 * true_positives / (2 * true_positives + wrong) if true_positives + wrong else 0.0
        )
    assert classification_metrics(Confusion.of_matrix(confusion)) == pytest.approx(expected)


@given(st.integers(1, 30), st.integers(1, 5), st.floats(0, 1), st.integers(0, 999))
def test_counts_of_several_labels_give_what_the_arrays_give(rows, labels, share, seed):
    draw = np.random.default_rng(seed)
    truth, given = draw.random((2, rows, labels)) < share
    found = multilabel_metrics((truth & given).sum(0), (truth ^ given).sum(0))
    for name in ("micro", "macro"):
        wanted = metrics.f1_score(
            truth.astype(int), given.astype(int), average=name, zero_division=0.0
        )
        # scikit-learn takes one column for two classes; it is the F1 of the second that is meant.
        if labels == 1:
            wanted = metrics.f1_score(truth[:, 0], given[:, 0], zero_division=0.0)
        assert found[f"f1_{name}"] == pytest.approx(wanted)


def f1(truth: NDArray[np.int64], decided: NDArray[np.bool_]) -> float:
    """2 TP ⁄ (2 TP + FP + FN), which scikit-learn takes a thousand times as long for."""
    return float(2 * (truth & decided).sum() / max(truth.sum() + decided.sum(), 1))


@given(st.integers(1, 25), st.floats(0, 1), st.integers(0, 999), st.booleans())
def test_thresholds_are_the_best_that_there_are(rows, share, seed, coarse):
    draw = np.random.default_rng(seed)
    truth = (draw.random((rows, 3)) < share).astype(np.int64)
    probabilities = draw.random((rows, 3))
    probabilities = probabilities.round(1) if coarse else probabilities
    thresholds = macro_thresholds(truth, probabilities)
    for y, p, threshold in zip(truth.T, probabilities.T, thresholds, strict=True):
        scores = {cut: f1(y, p >= cut) for cut in (threshold, 2.0, *p)}
        assert scores[threshold] == pytest.approx(max(scores.values()))
        assert 0 <= threshold <= 1
        # Elsewhere rounding moves nothing across.
        assert (threshold == 0 or threshold not in p) if y.any() else threshold == 0.5


@given(st.integers(1, 7), st.integers(0, 999), st.booleans())
def test_thresholds_have_the_best_f1_of_all_decisions(rows, seed, coarse):
    draw = np.random.default_rng(seed)
    truth = (draw.random((rows, 2)) < 0.4).astype(np.int64)
    probabilities = draw.random((rows, 2))
    probabilities = probabilities.round(1) if coarse else probabilities

    def f1(thresholds: tuple[float, ...]) -> float:
        given = probabilities >= np.array(thresholds)
        return float(metrics.f1_score(truth, given, average="micro", zero_division=0.0))

    held = truth.any(0).tolist()
    cuts = [
        [2.0, *column] if known else [0.5]
        for column, known in zip(probabilities.T.tolist(), held, strict=True)
    ]
    chosen = micro_thresholds(truth, probabilities)
    assert f1(chosen) == pytest.approx(max(f1((a, b)) for a in cuts[0] for b in cuts[1]))
    assert [at for at, known in zip(chosen, held, strict=True) if not known] == [0.5] * held.count(
        False
    )


def test_a_threshold_that_is_better_by_little_is_better():
    """Of many examples a single one makes a difference of less than a hundredth."""
    draw = np.random.default_rng()
    for _ in range(20):
        probabilities = draw.beta(1, 8, 400)
        truth = draw.random(400) < probabilities
        truth[0] = True
        cuts = np.sort(probabilities)[:, None]
        f1 = (
            2
            * (truth & (probabilities >= cuts)).sum(1)
            / (truth.sum() + (probabilities >= cuts).sum(1))
        )
        (threshold,) = macro_thresholds(truth[:, None].astype(np.int64), probabilities[:, None])
        assert metrics.f1_score(truth, probabilities >= threshold) == pytest.approx(
            f1.max(), abs=1e-12
        )


def test_of_equally_good_thresholds_the_nearest_to_one_half_is_taken():
    truth, probabilities = np.array([[0], [1]]), np.array([[0.2], [0.9]])
    assert macro_thresholds(truth, probabilities) == (pytest.approx(0.55),)
    assert macro_thresholds(
        np.array([[1], [1], [0], [0]]), np.array([[0.9], [0.2], [0.6], [0.1]])
    ) == (pytest.approx(0.15),)


@given(st.integers(2, 40), st.integers(0, 999), st.booleans())
def test_correlations_are_scipys(rows, seed, ties):
    draw = np.random.default_rng(seed)
    truth, predicted = draw.normal(size=(2, rows))
    truth = truth.round() + np.arange(rows) % 2 if ties else truth
    if np.ptp(truth) == 0:
        truth[0] += 1
    found = correlation(truth, predicted)
    ranks = [stats.rankdata(column) for column in (truth, predicted)]
    assert found["pearson"] == pytest.approx(np.corrcoef(truth, predicted)[0, 1])
    assert found["spearman"] == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert found["mse"] == pytest.approx(metrics.mean_squared_error(truth, predicted))


def test_what_does_not_vary_correlates_with_nothing():
    flat, rising = np.ones(4), np.arange(4.0)
    for pair in ((flat, rising), (rising, flat), (rising[:1], rising[:1])):
        assert {name: correlation(*pair)[name] for name in ("pearson", "spearman")} == {
            "pearson": 0.0,
            "spearman": 0.0,
        }
    assert correlation(flat + 1e-16 * rising, rising)["mse"] == pytest.approx(1.5)
