"""Fixed positions against the formula of Vaswani et al. 2017, section 3.5, in float64; learned ones with an offset."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from bothways.core.batch import Batch, Layout
from bothways.model.config import EncoderConfig
from bothways.model.embedding import build_positions, sinusoids
from bothways.model.families.catalogue import preset
from bothways.model.model import Model
from bothways.model.positions import Learned, Sinusoidal


@pytest.mark.parametrize("width", [6, 7])
@pytest.mark.parametrize("interleaved", [True, False])
def test_sines_and_cosines(width, interleaved):
    found = sinusoids(torch.arange(9), width, interleaved)
    pairs = (width + 1) // 2
    for place in range(9):
        angles = [place / 10_000 ** (2 * pair / width) for pair in range(pairs)]
        if interleaved:
            row = [function(angle) for angle in angles for function in (math.sin, math.cos)]
        else:
            row = [*map(math.sin, angles), *map(math.cos, angles)]
        assert found[place].tolist() == pytest.approx(row[:width], abs=1e-6)


def test_rows_before_the_first_position_are_passed_over():
    module = build_positions(Learned(5, offset=2), 3)
    assert module.weight.shape == (7, 3)
    assert torch.equal(module(torch.tensor([0, 4])), module.weight[[2, 6]])


def test_fixed_positions_are_no_parameters():
    config = EncoderConfig(11, 8, 1, 2, 8, position=Sinusoidal(9))
    model = Model(config, ())
    assert not any("position" in name for name in model.state_dict())


def test_the_first_transformer_is_torchs():
    """The preset's encoder against torch's TransformerEncoder, with embeddings scaled and waves added by hand."""
    torch.manual_seed(3)
    config = replace(
        preset("transformer-base"), vocab=30, width=12, depth=2, heads=3, intermediate_size=20
    )
    encoder = Model(config, ()).encoder.double().eval()
    layer = nn.TransformerEncoderLayer(
        12, 3, 20, layer_norm_eps=1e-6, batch_first=True, dtype=torch.float64
    )
    theirs = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    for block, other in zip(encoder.blocks, theirs.layers, strict=True):
        pairs = [
            (block.attention.qkv.weight, other.self_attn.in_proj_weight),
            (block.attention.qkv.bias, other.self_attn.in_proj_bias),
            *((getattr(mine, part), getattr(its, part)) for mine, its in (
                (block.attention.out, other.self_attn.out_proj), (block.attention_norm, other.norm1),
                (block.mlp.up, other.linear1), (block.mlp.down, other.linear2), (block.mlp_norm, other.norm2),
            ) for part in ("weight", "bias")),
        ]  # fmt: skip
        with torch.no_grad():
            for mine, its in pairs:
                its.copy_(mine.add_(torch.randn_like(mine) * 0.3))
    ids = torch.randint(30, (2, 7))
    waves = sinusoids(torch.arange(7), 12, interleaved=True).double()
    wanted = theirs(encoder.embedding.token(ids) * math.sqrt(12) + waves).flatten(0, 1)
    batch = Batch(ids.flatten(), torch.zeros(14, dtype=torch.int64), Layout.of([7, 7]))
    torch.testing.assert_close(encoder(batch).last, wanted, rtol=1e-6, atol=1e-6)
