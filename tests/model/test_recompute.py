"""Blocks computed again in the backward pass: bit for bit the losses and gradients of blocks that are kept, in every family."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from bothways.core.batch import Batch, Layout
from bothways.core.runtime.tuning import TUNING
from bothways.model import block
from bothways.model.attention.dispatch import AttentionCall, choose
from bothways.model.config import EncoderConfig, Gated
from bothways.model.heads import token_head
from bothways.model.model import Encoder, Model
from bothways.training import step_cost as operations
from bothways.training.step_cost import kept_floats
from small_models import SHAPES, SMALL, batch_for, kept_bytes
from spread import first_of


def trained(
    model: Model, recompute: bool, run: Callable[[Model], Tensor]
) -> tuple[Tensor, dict[str, Tensor | None], Tensor]:
    """The loss, all gradients, and the next number that torch's generator would have drawn."""
    model.encoder.recompute = recompute
    torch.manual_seed(5)
    loss = run(model)
    model.zero_grad()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}, torch.rand(())


def assert_equal(model: Model, run: Callable[[Model], Tensor]) -> None:
    kept, again = (trained(model, recompute, run) for recompute in (False, True))
    assert torch.equal(kept[0], again[0])
    assert torch.equal(kept[2], again[2])
    for name, gradient in kept[1].items():
        found = again[1][name]
        assert (found is None) == (gradient is None), name
        assert gradient is None or found is None or torch.equal(gradient, found), name


@pytest.mark.parametrize(
    "config", [SMALL, replace(SMALL, mlp=Gated(0.2)), replace(SMALL, activation="silu")], ids=repr
)
def test_activations_computed_again_change_nothing(config, monkeypatch):
    """Those of the feed-forward layer alone, as in large batches, and within blocks that are computed again."""
    model, batch = Model(config, ()).train(), batch_for(config)
    usual, size = trained(model, False, square), kept_bytes(model, batch)
    monkeypatch.setattr(block, "TUNING", replace(TUNING, activation_elements=0))
    again, smaller = trained(model, False, square), kept_bytes(model, batch)
    assert size - smaller >= 4 * config.depth * config.intermediate_size * batch.layout.tokens
    for name, gradient in usual[1].items():
        assert torch.equal(gradient, again[1][name]), name
    assert torch.equal(usual[0], again[0])
    assert_equal(model, square)


def structure(config: EncoderConfig) -> str:
    """The kinds of an encoder's parts, whatever their sizes."""
    parts = (config.position, config.order, config.mlp, *config.patterns)
    return repr(([type(part) for part in parts], config.sharing, config.task_types > 0))


KINDS = first_of(
    [(config,) for config in SHAPES.values()], [structure(c) for c in SHAPES.values()], [*SHAPES]
)


@pytest.mark.parametrize("config", KINDS)
def test_losses_gradients_and_draws_are_bit_equal(config):
    model, batch = Model(config, (token_head(config),)).train(), batch_for(config)
    only = torch.tensor([0, 80, 99])
    weights = torch.randn(3, config.width)

    def weighted(model: Model, asked: Tensor | None) -> Tensor:
        return (model.encoder(batch, only=asked).last[only] * weights).sum()

    def of_layers(model: Model) -> Tensor:
        return sum((x * x).sum() for x in model.encoder(batch, keep_layers=True).layers)

    for run in (partial(weighted, asked=None), partial(weighted, asked=only), of_layers):
        assert_equal(model, run)


def test_frozen_parts_and_autocast_too():
    model, batch = Model(SMALL, ()).train(), batch_for(SMALL)
    model.encoder.embedding.requires_grad_(False)
    model.encoder.blocks[0].requires_grad_(False)

    def run(model: Model) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model.encoder(batch).last.float().square().sum()

    assert_equal(model, run)


def square(model: Model) -> Tensor:
    return model.encoder(batch_for(model.config)).last.square().sum()


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("length", [32, 64])
def test_only_inputs_and_one_block_are_kept_as_the_forecast_has_it(length, monkeypatch):
    """It leaves room in each block, for 4 vectors more than attention of the library's own keeps, for 6 more than torch's.

    What it leaves out are two vectors of the embedding, and numbers that each token has a few of: ids, moments of the norms.
    """
    monkeypatch.setattr(operations.devices, "resolve_precision", lambda *_: torch.float32)
    config = EncoderConfig(100, 64, 12, 4, 192)
    model, layout = Model(config, ()).train(), Layout.of([length] * 4)
    ids = torch.randint(4, 100, (layout.tokens,))
    batch, held = Batch(ids, torch.zeros_like(ids), layout), {}
    call = AttentionCall(ids.device, torch.float32, 16, length, dropout=0.1, learning=True)
    room = 4 if choose(call) == "compiled" else 6
    for recompute, blocks in ((False, 12), (True, 1)):
        model.encoder.recompute = recompute
        held[recompute] = kept_bytes(model, batch) / 4 / layout.tokens
        forecast = kept_floats(config, length, ids.device, recompute)
        assert forecast - held[recompute] == pytest.approx(
            (room * blocks - 2) * 64, abs=10 + 10 * blocks
        )
    assert held[True] < held[False] / 6


@pytest.mark.parametrize(
    ("name", "grows"), [("bert-base-chinese", False), ("deberta-xlarge", True)]
)
def test_a_gpu_keeps_no_probabilities(name, grows, monkeypatch):
    """Its kernels compute them again, and need as much of each token however long its sequence is."""
    monkeypatch.setattr(operations.devices, "resolve_precision", lambda *_: torch.bfloat16)
    short, long = (kept_floats(SHAPES[name], length, torch.device("cuda")) for length in (16, 64))
    assert (long > short) == grows


def test_evaluation_computes_nothing_again(monkeypatch):
    encoder, batch = Encoder(SMALL), batch_for(SMALL)
    encoder.recompute = True
    monkeypatch.setattr("bothways.model.model.checkpoint", None)
    encoder.eval()(batch)
    with torch.no_grad():
        encoder.train()(batch)
    with pytest.raises(TypeError):
        encoder(batch)


META = torch.device("meta")


@pytest.mark.parametrize("config", KINDS)
def test_an_encoder_of_any_family(config):
    model = Model(config, (token_head(config),)).to(META).train()
    batch = replace(batch_for(config), global_attention_mask=None)  # whose values are looked at
    x = model.encoder(batch.to(META)).last
    assert x.device == META
    x.sum().backward()
    assert model.encoder.embedding.token.weight.grad is not None
