"""Encoders, forward and backward, and BERT's losses wait for no device: they go through on one without values to wait for."""

from dataclasses import replace

import pytest
import torch

from bothways.core.batch import Batch, LabelTargets, Layout, TokenTargets
from bothways.model.attention import dispatch as kernels
from bothways.model.attention.dispatch import Packed
from bothways.model.config import Dropouts, EncoderConfig
from bothways.model.heads import MaskedHead, PairHead, PoolerHead, token_head
from bothways.model.model import Model
from bothways.objectives.masked_lm import MaskedLMModule
from small_models import LENGTHS, SHAPES

META = torch.device("meta")


def batch_of() -> Batch:
    """One of several rectangles, with masked tokens and pairs."""
    layout = Layout.of(LENGTHS)
    ids = torch.randint(4, 50, (layout.tokens,))
    targets = {
        "masked": TokenTargets(torch.tensor([1, 2, 75]), torch.tensor([4, 5, 6])),
        "pair": LabelTargets(torch.tensor([0, 1, 1, 0, 1])),
    }
    return Batch(ids, torch.zeros_like(ids), layout, targets)


@pytest.mark.parametrize(
    "name", [name for name, config in SHAPES.items() if isinstance(config, EncoderConfig)]
)
def test_an_encoder_of_any_family(name):
    config = SHAPES[name]
    model = Model(config, (token_head(config),)).to(META).train()
    x = model.encoder(batch_of().to(META)).last
    assert x.device == META
    x.sum().backward()
    assert model.encoder.embedding.token.weight.grad is not None


@pytest.mark.parametrize("name", ["no dropout", "window", "modernbert-large"])
def test_an_encoder_that_reads_packed_sequences(name, monkeypatch):
    pytest.importorskip("torch.nn.attention.varlen")  # of newer releases of torch
    monkeypatch.setattr(kernels, "choose", lambda _: Packed())
    config = replace(SHAPES[name], dropout=Dropouts(0.0, 0.0))
    encoder = Model(config, ()).encoder.to(META, torch.bfloat16)
    encoder(batch_of().to(META)).last.sum().backward()
    assert encoder.embedding.token.weight.grad is not None


def test_berts_pretraining():
    model = Model(SHAPES["bert-base-chinese"], (MaskedHead(), PoolerHead(), PairHead())).to(META)
    training_module, batch = (
        MaskedLMModule(model).train(),
        batch_of(),
    )
    assert training_module.weights(batch) == {"masked": 3.0, "pair": 5.0}
    losses = training_module(batch.to(META))
    torch.stack([loss.total for loss in losses.values()]).sum().backward()
    assert all(parameter.grad is not None for parameter in training_module.parameters())
