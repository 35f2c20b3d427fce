"""Metrics from counts equal scikit-learn's on the arrays themselves, correlations scipy's."""

import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from numpy.typing import NDArray
from scipy import stats
from scipy.optimize import minimize, minimize_scalar
from sklearn import metrics as sklearn

from bothways.core.errors import ConfigError
from bothways.tasks import metrics
from bothways.tasks.base import softmax


def _correlation(truth: NDArray[np.int64], predicted: NDArray[np.int64], count: int) -> float:
    """Gorodkin 2004: the correlation of the two arrays as rows of one-hot vectors; 0 where one of them does not vary."""
    x, y = np.eye(count)[truth], np.eye(count)[predicted]
    x, y = x - x.mean(0), y - y.mean(0)
    norm = np.sqrt((x * x).sum() * (y * y).sum())
    return float((x * y).sum() / norm) if norm > 0 else 0.0


@given(st.integers(2, 5), st.data())
def test_counts_give_what_the_arrays_give(count, data):
    labels = st.integers(0, count - 1)
    pairs = data.draw(st.lists(st.tuples(labels, labels), min_size=1))
    truth, predicted = (np.array(column) for column in zip(*pairs, strict=True))
    f1_macro = sklearn.f1_score(truth, predicted, average="macro", zero_division=0.0)
    accuracy, mcc = (truth == predicted).mean(), _correlation(truth, predicted, count)
    expected = {"accuracy": accuracy, "f1_macro": f1_macro, "mcc": mcc}
    if count == 2:
        expected["f1"] = sklearn.f1_score(truth, predicted, zero_division=0.0)
    assert metrics.classification_metrics(metrics.Confusion(count, pairs)) == pytest.approx(
        expected
    )


def test_no_metric_is_above_one():
    """Two roots, or sums in another order, would be 1.0000000000000002."""
    draw = np.random.default_rng(0)
    for _ in range(500):
        count = int(draw.integers(2, 200))
        truth = draw.integers(0, 2, count)
        for predicted, mcc in ((truth, 1), (1 - truth, -1)):
            pairs = zip(truth.tolist(), predicted.tolist(), strict=True)
            scores = metrics.classification_metrics(metrics.Confusion(2, pairs))
            assert scores["mcc"] in (0, mcc)
        grades = draw.integers(0, 4, 30).astype(float)
        assert metrics.ndcg(grades, grades) in (0, 1 - 2**-53, 1)


@given(st.integers(1, 30), st.integers(1, 5), st.floats(0, 1), st.integers(0, 999))
def test_counts_of_several_labels_give_what_the_arrays_give(rows, labels, share, seed):
    draw = np.random.default_rng(seed)
    truth, given = draw.random((2, rows, labels)) < share
    found = metrics.multilabel_metrics((truth & given).sum(0), (truth ^ given).sum(0))
    for name in ("micro", "macro"):
        # scikit-learn takes one column for two classes; it is the F1 of the second that is meant.
        average = "binary" if labels == 1 else name
        arrays = truth.astype(int), given.astype(int)
        wanted = sklearn.f1_score(*arrays, average=average, zero_division=0.0)
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
    thresholds = metrics.macro_thresholds(truth, probabilities)
    for y, p, threshold in zip(truth.T, probabilities.T, thresholds, strict=True):
        scores = {cut: f1(y, p >= cut) for cut in (threshold, 1.0, *p)}
        assert scores[threshold] == pytest.approx(max(scores.values()))
        assert 0 <= threshold <= 1
        # Elsewhere rounding moves nothing across.
        assert (threshold == 0 or threshold not in p) if y.any() else threshold == 0.5


@given(st.integers(1, 7), st.integers(0, 999), st.booleans())
@example(4, 1, True)  # a label that no example has
def test_thresholds_have_the_best_f1_of_all_decisions(rows, seed, coarse):
    draw = np.random.default_rng(seed)
    truth = (draw.random((rows, 2)) < 0.4).astype(np.int64)
    probabilities = draw.random((rows, 2))
    probabilities = probabilities.round(1) if coarse else probabilities

    held = truth.any(0).tolist()
    columns = zip(probabilities.T.tolist(), held, strict=True)
    cuts = [[1.0, *column] if known else [0.5] for column, known in columns]
    chosen = metrics.micro_thresholds(truth, probabilities)
    best = max(f1(truth, probabilities >= (a, b)) for a in cuts[0] for b in cuts[1])
    assert f1(truth, probabilities >= chosen) == pytest.approx(best)
    assert all(known or cut == 0.5 for cut, known in zip(chosen, held, strict=True))


def test_no_threshold_is_above_a_certain_label():
    truth = np.array([[1, 0], [1, 1], [1, 0], [0, 0]])
    probabilities = np.array([[0.9, 1.0], [0.8, 0.3], [0.7, 0.6], [0.1, 0.2]])
    chosen = metrics.micro_thresholds(truth, probabilities)
    # Every threshold assigns the second label to the first example.
    assert f1(truth, probabilities >= chosen) == pytest.approx(8 / 10)


def test_a_threshold_that_is_better_by_little_is_better():
    """Of many examples a single one makes a difference of less than a hundredth."""
    draw = np.random.default_rng(0)
    for _ in range(20):
        probabilities = draw.beta(1, 8, 400)
        truth = draw.random(400) < probabilities
        truth[0] = True
        best = max(f1(truth, probabilities >= cut) for cut in probabilities)
        (threshold,) = metrics.macro_thresholds(
            truth[:, None].astype(np.int64), probabilities[:, None]
        )
        assert f1(truth, probabilities >= threshold) == pytest.approx(best, abs=1e-12)


def test_of_equally_good_thresholds_the_nearest_to_one_half_is_taken():
    truth, probabilities = np.array([[0], [1]]), np.array([[0.2], [0.9]])
    assert metrics.macro_thresholds(truth, probabilities) == (pytest.approx(0.55),)
    truth, probabilities = np.array([[1], [1], [0], [0]]), np.array([[0.9], [0.2], [0.6], [0.1]])
    assert metrics.macro_thresholds(truth, probabilities) == (pytest.approx(0.15),)


@given(st.integers(2, 40), st.integers(0, 999), st.booleans())
def test_correlations_are_scipys(rows, seed, ties):
    draw = np.random.default_rng(seed)
    truth, predicted = draw.normal(size=(2, rows))
    truth = truth.round() + np.arange(rows) % 2 if ties else truth
    if np.ptp(truth) == 0:
        truth[0] += 1
    found = metrics.correlation(truth, predicted)
    ranks = [stats.rankdata(column) for column in (truth, predicted)]
    assert found["pearson"] == pytest.approx(np.corrcoef(truth, predicted)[0, 1])
    assert found["spearman"] == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert found["mse"] == pytest.approx(sklearn.mean_squared_error(truth, predicted))


def test_what_does_not_vary_correlates_with_nothing():
    flat, rising = np.ones(4), np.arange(4.0)
    for pair in ((flat, rising), (rising, flat), (rising[:1], rising[:1])):
        values = metrics.correlation(*pair)
        assert (values["pearson"], values["spearman"]) == (0.0, 0.0)
    assert metrics.correlation(flat + 1e-16 * rising, rising)["mse"] == pytest.approx(1.5)


DRAW = np.random.default_rng(3)


def drawn(examples: int, classes: int, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Logits, and classes drawn with the probabilities softmax(z / T)."""
    logits = DRAW.normal(size=(examples, classes)) * 4
    shares = softmax(logits / temperature)
    truth = (shares.cumsum(1) > DRAW.random((examples, 1))).argmax(1)
    return logits, truth


@pytest.mark.parametrize(("classes", "temperature"), [(2, 3.0), (5, 0.4), (77, 1.7)])
def test_temperature_has_the_least_cross_entropy(classes, temperature):
    logits, truth = drawn(1500, classes, temperature)

    def loss(t: float) -> float:
        return -float(np.log(softmax(logits / t)[np.arange(len(truth)), truth]).mean())

    best = minimize_scalar(loss, bounds=(0.05, 20), method="bounded", options={"xatol": 1e-10})
    found = metrics.fit_temperature(logits, truth)
    assert found == pytest.approx(best.x, rel=1e-6)
    assert found == pytest.approx(temperature, rel=0.15)
    assert loss(found) <= loss(1.0)


def test_temperature_stays_where_nothing_is_wrong_and_within_its_range():
    logits, _ = drawn(50, 3, 1.0)
    assert metrics.fit_temperature(logits, logits.argmax(1)) == 1.0
    assert metrics.fit_temperature(logits, logits.argmin(1)) == pytest.approx(20)


def test_each_label_has_the_scale_and_offset_of_platt():
    logits = DRAW.normal(size=(800, 3)) * np.array([3.0, 1.0, 5.0])
    chances = metrics.sigmoid(logits * np.array([0.5, 2.0, 0.3]) + np.array([1.0, -1, 0]))
    truth = chances > DRAW.random((800, 3))
    factor, offset = metrics.fit_scales(logits, truth)
    for label in range(3):
        z, y = logits[:, label], truth[:, label]
        target = np.where(y, (y.sum() + 1) / (y.sum() + 2), 1 / ((~y).sum() + 2))

        def cost(w: np.ndarray, z: np.ndarray = z, target: np.ndarray = target) -> float:
            x = w[0] * z + w[1]
            return float((np.logaddexp(0, x) - target * x).sum())

        best = minimize(cost, [1.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-8}).x
        assert [factor[label], offset[label]] == pytest.approx(best, abs=1e-3)


def test_rare_labels_share_one_temperature():
    logits, truth = DRAW.normal(size=(300, 3)) * 4, np.zeros((300, 3), dtype=bool)
    truth[:, 0] = metrics.sigmoid(logits[:, 0] / 2) > DRAW.random(300)
    truth[:5, 1], truth[:19, 2] = True, True
    factor, offset = metrics.fit_scales(logits, truth)
    assert factor[1] == factor[2] != factor[0]
    assert offset[1:].tolist() == [0, 0]
    assert offset[0] != 0
    wrong = metrics.fit_scales(logits[:, :1], logits[:, :1] < 0)
    assert wrong.factor[0] > 0  # of a label that is predicted the wrong way round


def test_guarantee_of_conformal_sets_holds_over_draws():
    """Coverage ~ Beta(n + 1 − l, l), l = ⌊(n + 1) α⌋ = 10: mean .9010, deviation .0296."""
    # The probability of the right label is uniform: P(p ≥ t) = 1 − t.
    coverage = [1 - metrics.conformal_threshold(x, 0.1) for x in DRAW.random((2000, 100))]
    assert np.mean(coverage) == pytest.approx(0.9010, abs=0.002)
    assert np.std(coverage) == pytest.approx(0.0296, abs=0.0015)


def test_conformal_threshold_is_the_right_order_statistic():
    right = np.array([0.9, 0.1, 0.5, 0.7, 0.3, 0.8, 0.2, 0.6, 0.4])
    assert metrics.conformal_threshold(right, 0.1) == 0.1  # k = 9 of 9
    assert metrics.conformal_threshold(right, 0.2) == 0.2  # k = 8
    assert metrics.conformal_threshold(right, 0.5) == 0.5
    for error in (0.0, 1.0, -0.1, float("nan"), 0.09):
        with pytest.raises(ConfigError) as refused:
            metrics.conformal_threshold(right, error)
        assert refused.value.where == "error"


@pytest.mark.parametrize(
    ("base", "other", "best", "text"),
    [
        (0.90, 0.92, 1.0, "20 % fewer errors"),
        (0.5, 0.6, 1.0, "20 % fewer errors"),
        (0.9, 0.9034, 1.0, "3.4 % fewer errors"),
        (0.0, 0.0996, 1.0, "10 % fewer errors"),
        (0.9, 1.0, 1.0, "100 % fewer errors"),
        (0.99, 0.97, 1.0, "200 % more errors"),
        (101.0, 51.0, 1.0, "50 % fewer errors"),
        (-2.0, -1.0, 0.0, "50 % fewer errors"),
        (0.9, 0.9, 1.0, ""),
        (1.0, 0.9, 1.0, ""),
    ],
)
def test_differences_are_relative_to_errors(base, other, best, text):
    assert metrics.errors_text(metrics.error_reduction(base, other, best)) == text
