"""Batches: typed access to targets."""

import numpy as np
import pytest

from bothways.core.batch import LabelTargets, TokenTargets, pack
from bothways.core.source import Sequence


def test_targets_are_read_by_name_and_type():
    target = TokenTargets(np.array([1]), np.array([7]))
    sequence = Sequence(np.arange(3, dtype=np.int32), np.zeros(3, np.int8), {"masked": target})
    assert sequence.target("masked", TokenTargets) is target
    batch = pack([sequence])
    assert batch.target("masked", TokenTargets).ids.tolist() == [7]
    with pytest.raises(TypeError, match="'masked' are TokenTargets, not LabelTargets"):
        batch.target("masked", LabelTargets)
    with pytest.raises(KeyError):
        batch.target("pair", LabelTargets)
