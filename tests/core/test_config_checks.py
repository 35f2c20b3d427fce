"""The ranges of numbers: what lies outside is named by its dotted path, what is absent passes."""

import math

import pytest

from bothways.core.config.values import require_at_least, require_probability
from bothways.core.errors import ConfigError


def test_what_lies_within_or_is_absent_passes():
    require_at_least(1, "encoder", width=1, embedding=None, most=0.5 + 0.5)
    require_probability("encoder", hidden=0.0, attention=0.999, embedding=None)


@pytest.mark.parametrize("number", [0, -3, 0.99, math.nan])
def test_the_first_number_below_is_named(number):
    with pytest.raises(ConfigError, match=rf"^encoder\.width: must be at least 1, not {number}$"):
        require_at_least(1, "encoder", depth=1, width=number, heads=0)


@pytest.mark.parametrize("rate", [1, 1.0, -0.1, math.nan])
def test_a_rate_outside_is_named(rate):
    with pytest.raises(ConfigError, match=rf"^dropout: must be in \[0, 1\), not {rate}$"):
        require_probability(dropout=rate)
