"""Bins of confidence against scikit-learn, the calibration error against its formula."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from bothways.prediction.analysis.base import Calibration


def filled(confidence: np.ndarray, right: np.ndarray) -> Calibration:
    calibration = Calibration()
    for one, hit in zip(confidence.tolist(), right.tolist(), strict=True):
        calibration.add(one, hit)
    return calibration


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=60))
def test_error_is_the_weighted_distance(pairs):
    confidence, right = np.array([c for c, _ in pairs]), np.array([r for _, r in pairs])
    expected = 0.0
    for number in range(15):
        low, high = np.linspace(0, 1, 16)[[number, number + 1]]
        inside = (confidence > low) & (confidence <= high) | ((confidence == 0) & (number == 0))
        if inside.any():
            expected += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    calibration = filled(confidence, right)
    assert calibration.error == pytest.approx(expected, abs=1e-9)
    assert sum(part.examples for part in calibration.bins) == len(pairs)


def test_a_bin_holds_its_upper_edge():
    edges = np.linspace(0, 1, 16)
    made = filled(edges[[0, 1, 2, 15]], np.ones(4, bool)).bins
    assert [part.examples for part in made] == [2, 1, 1]
    assert [part.confidence for part in made] == [edges[1] / 2, edges[2], 1.0]


def test_predictions_of_similar_confidence_are_not_one_point():
    """A model that is nearly always sure has one bin of equal width, and ten groups."""
    calibration, draw = Calibration(), np.random.default_rng(0)
    for value in draw.random(500):
        calibration.add(1 - 0.01 * value, bool(value < 0.5))
    assert len(calibration.bins) == 1
    groups = calibration.groups
    assert len(groups) == 10
    assert sum(part.examples for part in groups) == 500
    assert all(40 <= part.examples <= 60 for part in groups)
    assert [part.confidence for part in groups] == sorted(part.confidence for part in groups)
    assert groups[0].accuracy < 0.1
    assert groups[-1].accuracy > 0.9
    assert (Calibration().groups, Calibration().error) == ([], 0)
