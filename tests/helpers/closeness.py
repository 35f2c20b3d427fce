"""Equality to rounding: processors and kernels add in another order."""

from typing import Any

import numpy as np


def assert_close(actual: Any, expected: Any, tolerance: float = 4e-6, message: str = "") -> None:
    """Require equality up to a tolerance relative to the largest expected value.

    A bound that does not grow with the values fails on the processor that rounds otherwise.
    """
    one, other = np.asarray(actual, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    assert one.shape == other.shape, message
    difference = float(np.abs(one - other).max(initial=0.0))
    assert difference <= tolerance * float(np.abs(other).max(initial=0.0)), (difference, message)
