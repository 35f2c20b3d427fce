"""Attention probabilities, against the kernels' outputs; `test_model_output.py` compares them with transformers."""

import itertools

import pytest
import torch

from bothways.core.batch import Layout
from bothways.core.errors import ConfigError
from bothways.model.attention.dispatch import attend
from bothways.model.attention.mask import AttentionView
from bothways.model.attention.patterns import Blocks, Causal, Full, Window
from bothways.model.attention.probabilities import attention_probabilities
from bothways.model.config import EncoderConfig
from bothways.model.model import Encoder, recorded_attentions
from small_models import SHAPES, batch_for

LENGTHS = [9, 3, 40, 1]


@pytest.mark.parametrize(
    "pattern", [Full(), Causal(), Window(3), Window(3, global_attention=True)], ids=repr
)
def test_probabilities_times_values_are_the_output(pattern):
    torch.manual_seed(0)
    layout = Layout.of(LENGTHS)
    qkv, other = torch.randn(2, layout.tokens, 3, 2, 4)
    chosen = torch.rand(layout.tokens) < 0.2
    view = AttentionView(layout, pattern, global_attention_mask=chosen)
    global_qkv = other if view.has_global_tokens else None
    shares = attention_probabilities(qkv, view, global_qkv=global_qkv)
    assert [tuple(share.shape) for share in shares] == [(2, n, n) for n in LENGTHS]
    starts = layout.cu_seqlens.tolist()
    values = [qkv[a:b, 2] for a, b in itertools.pairwise(starts)]
    outputs = [torch.einsum("hqk,khd->qhd", s, v) for s, v in zip(shares, values, strict=True)]
    if global_qkv is not None:
        own = [global_qkv[a:b, 2] for a, b in itertools.pairwise(starts)]
        theirs = [torch.einsum("hqk,khd->qhd", s, v) for s, v in zip(shares, own, strict=True)]
        outputs = [torch.where(chosen[:, None, None], torch.cat(theirs), torch.cat(outputs))]
    found = attend(qkv, view, 0.0, global_qkv)
    torch.testing.assert_close(torch.cat(outputs), found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name", [name for name, c in SHAPES.items() if isinstance(c, EncoderConfig)]
)
def test_every_family_has_attentions(name):
    config = SHAPES[name]
    assert isinstance(config, EncoderConfig)
    encoder, batch = Encoder(config).eval(), batch_for(config)
    if any(isinstance(pattern, Blocks) for pattern in config.patterns):
        message = "block-sparse sequences longer than 44 tokens"
        with pytest.raises(ConfigError, match=message), recorded_attentions(encoder):
            encoder(batch)
        return
    with recorded_attentions(encoder) as attentions:
        encoder(batch)
    assert len(attentions) == config.steps
    for layer in attentions:
        assert [share.shape[-1] for share in layer] == batch.layout.lengths
        for share in layer:
            torch.testing.assert_close(share.sum(-1), torch.ones(share.shape[:-1]))
    assert not any(module._forward_pre_hooks for module in encoder.modules())
