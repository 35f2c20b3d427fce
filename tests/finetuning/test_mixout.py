"""Mixout against its formula: for a given mask, in expectation, and not at all in evaluation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bothways.finetuning import stability
from bothways.finetuning.stability import MixoutLinear, mix_out


def moved(rate: float, seed: int = 0) -> tuple[MixoutLinear, torch.Tensor]:
    """A layer of float64 that has gone away from its start, and the start."""
    torch.manual_seed(seed)
    layer = MixoutLinear(nn.Linear(12, 8).double(), rate)
    start = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight.add_(torch.randn_like(start))
    return layer.train(), start


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_a_given_mask_gives_the_papers_formula(
    rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(M · w₀ + (1 − M) · w − p · w₀) / (1 − p), M = 1 where the weight goes back (Lee et al. 2020, equation 4)."""
    layer, start = moved(rate)
    back = (torch.rand(8, 12) < rate).double()
    monkeypatch.setattr(stability, "dropout", lambda x, p: x * (1 - back) / (1 - p))
    expected = (back * start + (1 - back) * layer.weight - rate * start) / (1 - rate)
    x = torch.randn(5, 12, dtype=torch.float64)
    torch.testing.assert_close(layer(x), x @ expected.T + layer.bias, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(layer(x).sum(), layer.weight)
    torch.testing.assert_close(gradient, (1 - back) / (1 - rate) * x.sum(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rate", [0.2, 0.7])
def test_draws_have_the_rate_and_the_expectation(rate: float) -> None:
    layer, start = moved(rate)
    draws = torch.stack([layer.mixed().detach() for _ in range(4000)])
    back = (draws == start).double().mean()
    # Standard deviations of the two means: √(p(1 − p)/n), and |w − w₀| · √(p/(1 − p)/n).
    assert abs(back - rate) < 5 * (rate * (1 - rate) / draws.numel()) ** 0.5
    away = (layer.weight.detach() - start).abs() * (rate / (1 - rate) / 4000) ** 0.5
    assert ((draws.mean(0) - layer.weight.detach()).abs() < 5 * away).all()


def test_an_evaluation_is_that_of_the_plain_layer() -> None:
    layer, _ = moved(0.5)
    x = torch.randn(3, 12, dtype=torch.float64)
    assert not torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    state = torch.get_rng_state()
    assert torch.equal(layer.eval()(x), nn.functional.linear(x, layer.weight, layer.bias))
    assert torch.equal(torch.get_rng_state(), state)


def test_layers_are_put_in_place_with_their_parameters() -> None:
    module = nn.Sequential(
        nn.Linear(3, 3),
        nn.ModuleDict({"inner": nn.Linear(3, 2, bias=False)}),
        nn.LayerNorm(2),
        nn.Linear(2, 2),
    )
    module[3].weight.requires_grad_(False)
    before = {name: (id(p), p.detach().clone()) for name, p in module.named_parameters()}
    mix_out(module, 0.3)
    assert [type(part) for part in (module[0], module[1]["inner"], module[3])] == [
        MixoutLinear,
        MixoutLinear,
        nn.Linear,
    ]
    assert {name: id(p) for name, p in module.named_parameters()} == {
        name: place for name, (place, _) in before.items()
    }
    assert module.state_dict().keys() == before.keys()
    x = torch.randn(4, 3)
    assert torch.equal(
        module[0](x), nn.functional.linear(x, module[0].weight, module[0].bias)
    )  # at its start nothing to mix
