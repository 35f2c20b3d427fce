"""BERT's losses of pre-training against transformers, with their gradients; attention probabilities."""

import itertools
from dataclasses import replace

import pytest
import torch

from bert_peers import FAMILIES, draw_config, draw_input, peer
from bothways.core.batch import LabelTargets, Layout, TokenTargets
from bothways.core.errors import ConfigError
from bothways.model.attention.dispatch import attend
from bothways.model.attention.mask import AttentionView, RotaryTables
from bothways.model.attention.patterns import Blocks, Causal, Full, Window
from bothways.model.attention.probabilities import attention_probabilities
from bothways.model.config import Sharing
from bothways.model.heads import MaskedHead, PairHead, PoolerHead
from bothways.model.model import Encoder, Model, recorded_attentions, recorded_projections
from bothways.objectives.masked_lm import MaskedLMModule
from family_peers import assert_gradients_equal
from small_models import SHAPES, SMALL, batch_for

LENGTHS = [7, 20, 19, 1, 17, 3, 20]


@pytest.mark.parametrize("order", ["post", "pre"])
def test_pretraining_losses_equal_transformers(order):
    config = draw_config(5, order)
    torch.manual_seed(5)
    mine = Model(config, (MaskedHead(), PoolerHead(), PairHead()))
    theirs = peer(mine, "ForPreTraining")
    text = draw_input(config, LENGTHS)
    masked = (torch.rand(text.kept.shape) < 0.3) & text.kept
    masked[:, 0] = False  # [CLS]
    labels = torch.where(masked, text.padded["input_ids"], -100)
    pairs = torch.tensor([0, 1, 1, 0, 1, 0, 0])
    wanted = theirs.train()(**text.padded, labels=labels, next_sentence_label=pairs)
    wanted.loss.backward()

    index = (labels[text.kept] != -100).nonzero()[:, 0]
    targets = {"masked": TokenTargets(index, labels[text.kept][index]), "pair": LabelTargets(pairs)}
    training_module = MaskedLMModule(mine.train())
    losses = training_module(replace(text.batch, targets=targets))
    weights = training_module.weights(replace(text.batch, targets=targets))
    assert weights == {"masked": float(len(index)), "pair": float(len(pairs))}
    loss = sum(losses[name].total / weight for name, weight in weights.items())
    loss.backward()
    torch.testing.assert_close(loss, wanted.loss, rtol=1e-5, atol=1e-5)
    assert_gradients_equal(FAMILIES[order], FAMILIES[order].architectures[0], mine, theirs)


@torch.no_grad()
def test_projections_of_a_layer_are_those_of_its_last_block():
    config = replace(SMALL, depth=4, sharing=Sharing(groups=2, layers_per_group=2))
    encoder, batch = Encoder(config).eval(), batch_for(config)
    with recorded_projections(encoder, {3}) as found:
        layers = encoder(batch, keep_layers=True).layers
    first, last = encoder.layer(2)
    expected = last.attention.qkv(first(layers[2], AttentionView(batch.layout)))
    assert found.keys() == {3}
    torch.testing.assert_close(found[3].flatten(1), expected)


SHORT = [9, 3, 40, 1]


@pytest.mark.parametrize(
    "pattern", [Full(), Causal(), Window(3), Window(3, global_attention=True)], ids=repr
)
def test_probabilities_times_values_are_the_output(pattern):
    torch.manual_seed(0)
    layout = Layout.of(SHORT)
    qkv, other = torch.randn(2, layout.tokens, 3, 2, 4)
    chosen = torch.rand(layout.tokens) < 0.2
    rotary = RotaryTables.of(layout.positions, 4, 100.0)
    view = AttentionView(layout, pattern, rotary, global_attention_mask=chosen)
    global_qkv = other if view.has_global_tokens else None
    shares = attention_probabilities(qkv, view, global_qkv=global_qkv)
    assert [tuple(share.shape) for share in shares] == [(2, n, n) for n in SHORT]
    starts = layout.cu_seqlens.tolist()
    values = [qkv[a:b, 2] for a, b in itertools.pairwise(starts)]
    outputs = [torch.einsum("hqk,khd->qhd", s, v) for s, v in zip(shares, values, strict=True)]
    if global_qkv is not None:
        own = [global_qkv[a:b, 2] for a, b in itertools.pairwise(starts)]
        theirs = [torch.einsum("hqk,khd->qhd", s, v) for s, v in zip(shares, own, strict=True)]
        outputs = [torch.where(chosen[:, None, None], torch.cat(theirs), torch.cat(outputs))]
    found = attend(qkv, view, 0.0, global_qkv)
    torch.testing.assert_close(torch.cat(outputs), found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SHAPES)
def test_every_family_has_attentions(name):
    config = SHAPES[name]
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
