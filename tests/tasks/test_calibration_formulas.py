"""Temperatures, scales and conformal sets: against scipy, and their guarantee by simulation."""

import numpy as np
import pytest
from scipy.optimize import minimize, minimize_scalar

from bothways.core.errors import ConfigError
from bothways.tasks import calibration
from bothways.tasks.base import softmax
from bothways.tasks.metrics import sigmoid

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
        return calibration.negative_log_likelihood(
            softmax(logits / t)[np.arange(len(truth)), truth]
        )

    best = minimize_scalar(loss, bounds=(0.05, 20), method="bounded", options={"xatol": 1e-10})
    found = calibration.fit_temperature(logits, truth)
    assert found == pytest.approx(best.x, rel=1e-6)
    assert found == pytest.approx(temperature, rel=0.15)
    assert loss(found) <= loss(1.0)


def test_temperature_stays_where_nothing_is_wrong_and_within_its_range():
    logits, _ = drawn(50, 3, 1.0)
    assert calibration.fit_temperature(logits, logits.argmax(1)) == 1.0
    assert calibration.fit_temperature(logits, logits.argmin(1)) == pytest.approx(20)


def test_each_label_has_the_scale_and_offset_of_platt():
    logits = DRAW.normal(size=(800, 3)) * np.array([3.0, 1.0, 5.0])
    truth = sigmoid(logits * np.array([0.5, 2.0, 0.3]) + np.array([1.0, -1, 0])) > DRAW.random(
        (800, 3)
    )
    factor, offset = calibration.fit_scales(logits, truth)
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
    truth[:, 0] = sigmoid(logits[:, 0] / 2) > DRAW.random(300)
    truth[:5, 1], truth[:19, 2] = True, True
    factor, offset = calibration.fit_scales(logits, truth)
    assert factor[1] == factor[2] != factor[0]
    assert offset[1:].tolist() == [0, 0]
    assert offset[0] != 0
    wrong = calibration.fit_scales(logits[:, :1], logits[:, :1] < 0)
    assert wrong.factor[0] > 0  # of a label that is predicted the wrong way round


def test_guarantee_of_conformal_sets_holds_over_draws():
    """Coverage ~ Beta(n + 1 − l, l), l = ⌊(n + 1) α⌋ = 10: mean .9010, deviation .0296."""
    coverage = []
    for _ in range(2000):
        # The probability of the right label is uniform: P(p ≥ t) = 1 − t.
        coverage.append(1 - calibration.conformal_threshold(DRAW.random(100), 0.1))
    assert np.mean(coverage) == pytest.approx(0.9010, abs=0.002)
    assert np.std(coverage) == pytest.approx(0.0296, abs=0.0015)


def test_conformal_threshold_is_the_right_order_statistic():
    right = np.array([0.9, 0.1, 0.5, 0.7, 0.3, 0.8, 0.2, 0.6, 0.4])
    assert calibration.conformal_threshold(right, 0.1) == 0.1  # k = 9 of 9
    assert calibration.conformal_threshold(right, 0.2) == 0.2  # k = 8
    assert calibration.conformal_threshold(right, 0.5) == 0.5
    for error in (0.0, 1.0, -0.1, float("nan"), 0.09):
        with pytest.raises(ConfigError) as refused:
            calibration.conformal_threshold(right, error)
        assert refused.value.where == "error"
