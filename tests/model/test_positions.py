"""Fixed positions against the formula of Vaswani et al. 2017, section 3.5, in float64; learned ones with an offset."""

from __future__ import annotations

import math

import pytest
import torch

from bothways.core.errors import ConfigError
from bothways.model.config import EncoderConfig, Learned, Sinusoidal
from bothways.model.embedding import positions, sinusoids
from bothways.model.heads import Model
from bothways.model.ledger import ledger


@pytest.mark.parametrize("width", [6, 7])
@pytest.mark.parametrize("interleaved", [True, False])
def test_sines_and_cosines(width: int, interleaved: bool) -> None:
    found = sinusoids(Sinusoidal(9, interleaved), width)
    pairs = (width + 1) // 2
    for place in range(9):
        angles = [place / 10_000 ** (2 * pair / width) for pair in range(pairs)]
        if interleaved:
            row = [function(angle) for angle in angles for function in (math.sin, math.cos)]
        else:
            row = [*map(math.sin, angles), *map(math.cos, angles)]
        assert found[place].tolist() == pytest.approx(row[:width], abs=1e-6)


def test_rows_before_the_first_position_are_passed_over() -> None:
    module = positions(Learned(5, offset=2), 3)
    assert module.weight.shape == (7, 3)
    assert torch.equal(module(torch.tensor([0, 4])), module.weight[[2, 6]])


def test_fixed_positions_are_no_parameters() -> None:
    config = EncoderConfig(11, 8, 1, 2, 8, position=Sinusoidal(9))
    model = Model(config, ())
    assert ledger(config).total == sum(parameter.numel() for parameter in model.parameters())
    assert not any("position" in name for name in model.state_dict())


@pytest.mark.parametrize("position", [Learned, Sinusoidal])
def test_no_position_at_all_is_refused(position: type) -> None:
    with pytest.raises(ConfigError, match=r"^encoder\.position\.most: must be at least 1, not 0"):
        position(0)
    with pytest.raises(ConfigError, match=r"^encoder\.position\.offset: must be at least 0, not -1"):
        Learned(4, offset=-1)
