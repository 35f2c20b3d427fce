import pytest
import torch
from torch import nn

from bothways.core.errors import ConfigError
from bothways.training.optimizers import (
    AdamW,
    BertAdam,
    Lamb,
    Muon,
    ParameterRule,
    StableAdamW,
    build_optimizer,
    parameter_groups,
    set_rate,
    update,
)

MATRICES = {"1.weight": 1, "3.weight": 3}
KINDS = [AdamW, BertAdam, Lamb, StableAdamW, Muon]


def model(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(7, 4), nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3, bias=False)
    ).to(dtype)


def gradients(network, step):
    generator = torch.Generator().manual_seed(step)
    for parameter in network.parameters():
        parameter.grad = (
            torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.1
        )


def test_matrices_decay_and_vectors_do_not():
    named = dict(model().named_parameters())
    named["0.weight"].requires_grad_(False)
    decayed, others = parameter_groups(named.items(), AdamW(lr=0.5, decay=0.1))
    assert [decayed["weight_decay"], others["weight_decay"]] == [0.1, 0.0]
    assert {id(p) for p in decayed["params"]} == {
        id(named[name]) for name in ("1.weight", "3.weight")
    }
    assert {id(p) for p in others["params"]} == {
        id(named[name]) for name in ("1.bias", "2.weight", "2.bias")
    }


def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(ConfigError, match="no parameter to train"):
        build_optimizer(AdamW(), model().requires_grad_(False).named_parameters())


def test_bert_adam_is_adam_without_bias_correction():
    """Google's AdamWeightDecayOptimizer, written out: m, v, m / (√v + ε) + decay · w, times the rate."""
    config = BertAdam(lr=0.01, betas=(0.8, 0.99), eps=1e-6, decay=0.1)
    network = model()
    optimizer = build_optimizer(config, network.named_parameters())
    weights = {name: p.detach().clone() for name, p in network.named_parameters()}
    m, v = ({name: torch.zeros_like(w) for name, w in weights.items()} for _ in range(2))
    for step in range(50):
        gradients(network, step)
        for name, parameter in network.named_parameters():
            m[name] = 0.8 * m[name] + (1 - 0.8) * parameter.grad
            v[name] = 0.99 * v[name] + (1 - 0.99) * parameter.grad**2
            change = m[name] / (v[name].sqrt() + 1e-6)
            if weights[name].ndim >= 2:
                change = change + 0.1 * weights[name]
            weights[name] = weights[name] - 0.01 * (1 - step / 60) * change
        assert set_rate(optimizer, 1 - step / 60) == 0.01 * (1 - step / 60)
        update(optimizer, None)
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(parameter.detach(), weights[name], rtol=1e-12, atol=1e-14)


def test_bert_adam_without_its_endless_step_would_differ():
    ours, corrected = model(), model()
    optimizers = [
        build_optimizer(kind(lr=0.01, eps=1e-6), net.named_parameters())
        for kind, net in ((BertAdam, ours), (AdamW, corrected))
    ]
    for network, optimizer in zip((ours, corrected), optimizers, strict=True):
        gradients(network, 0)
        update(optimizer, None)
    # The first step of m / √v without correction is (1 − β₁) / √(1 − β₂) ≈ 3.16 times that of Adam.
    moved = [(net[1].bias - model()[1].bias).abs().mean().item() for net in (ours, corrected)]
    assert moved[0] / moved[1] == pytest.approx(0.1 / 0.001**0.5, rel=1e-3)


@pytest.mark.parametrize("clip_norm", [None, 0.05, 100.0])
def test_adamw_with_clipping_is_torchs(clip_norm):
    ours, theirs = model(), model()
    optimizer = build_optimizer(AdamW(lr=0.01, decay=0.1), ours.named_parameters())
    matrices = [p for p in theirs.parameters() if p.ndim >= 2]
    vectors = [p for p in theirs.parameters() if p.ndim < 2]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=0.01,
        foreach=False,
        fused=False,
    )
    for step in range(20):
        gradients(ours, step)
        gradients(theirs, step)
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip_norm or float("inf"))
        reference.step()
        norm = update(optimizer, clip_norm)
        assert norm.item() == pytest.approx(expected.item(), rel=1e-12)
        assert all(p.grad is None for p in ours.parameters())
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        # torch adds 1e-6 to the norm that it divides by, and the factor is rounded to float32 here.
        torch.testing.assert_close(
            mine,
            other,
            rtol=0 if clip_norm is None else 1e-4,
            atol=1e-12 if clip_norm is None else 1e-5,
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(kind, bad):
    network = model(torch.float32)
    optimizer = build_optimizer(kind(lr=0.01), network.named_parameters(), matrices=MATRICES)
    gradients(network, 0)
    update(optimizer, 1.0)
    before = [p.detach().clone() for p in network.parameters()]
    state = [
        {name: value.clone() for name, value in optimizer.state[p].items()}
        for p in network.parameters()
    ]
    gradients(network, 1)
    network[1].weight.grad[0, 0] = bad
    assert not update(optimizer, 1.0).isfinite()
    for p, old, kept in zip(network.parameters(), before, state, strict=True):
        assert torch.equal(p, old)
        assert all(torch.equal(optimizer.state[p][name], value) for name, value in kept.items())


@pytest.mark.parametrize("kind", KINDS)
def test_state_goes_through_a_file_and_back(kind, tmp_path):
    whole, stopped, resumed = model(torch.float32), model(torch.float32), model(torch.float32)
    optimizers = [
        build_optimizer(kind(lr=0.01), net.named_parameters(), matrices=MATRICES)
        for net in (whole, stopped, resumed)
    ]
    for step in range(10):
        gradients(whole, step)
        update(optimizers[0], 1.0)
    for step in range(6):
        gradients(stopped, step)
        update(optimizers[1], 1.0)
    torch.save(optimizers[1].state_dict(), tmp_path / "state.pt")
    optimizers[2].load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    resumed.load_state_dict(stopped.state_dict())
    for step in range(6, 10):
        gradients(resumed, step)
        update(optimizers[2], 1.0)
    assert all(
        torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True)
    )


@pytest.mark.parametrize("kind", [AdamW, BertAdam, Lamb, StableAdamW])
@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"lr": 0.0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"eps": -1e-8}, "eps"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"decay": -0.01}, "decay"),
    ],
)
def test_settings_out_of_range_are_refused(kind, values, where):
    with pytest.raises(ConfigError) as caught:
        kind(**values)
    assert caught.value.where == f"optimizer.{where}"


@pytest.mark.parametrize(
    ("values", "where"),
    [({"lr": 0.0}, "lr"), ({"decay": -1.0}, "decay"), ({"momentum": 1.0}, "momentum")],
)
def test_settings_of_muon_out_of_range_are_refused(values, where):
    with pytest.raises(ConfigError) as caught:
        Muon(**values)
    assert caught.value.where == f"optimizer.{where}"


def test_rules_make_groups_of_their_own():
    named = dict(model().named_parameters())
    factors = {"0": 0.25, "1": 0.5}
    found = parameter_groups(
        named.items(),
        AdamW(lr=0.5, decay=0.1),
        lambda name: ParameterRule(factors.get(name[0], 1.0), 0.1 * (name == "0.weight")),
    )
    seen = {
        id(p): (g["lr"], g["peak"], g["weight_decay"], g["pull"])
        for g in found
        for p in g["params"]
    }
    assert {name: seen[id(p)] for name, p in named.items()} == {
        "0.weight": (0.125, 0.125, 0.1, 0.1),
        "1.weight": (0.25, 0.25, 0.1, 0.0),
        "1.bias": (0.25, 0.25, 0.0, 0.0),
        "2.weight": (0.5, 0.5, 0.0, 0.0),
        "2.bias": (0.5, 0.5, 0.0, 0.0),
        "3.weight": (0.5, 0.5, 0.1, 0.0),
    }
    optimizer = build_optimizer(
        AdamW(lr=0.5), named.items(), lambda name: ParameterRule(factors.get(name[0], 1.0))
    )
    assert set_rate(optimizer, 0.5) == 0.25
    assert sorted({group["lr"] for group in optimizer.param_groups}) == [0.0625, 0.125, 0.25]


@pytest.mark.parametrize("kind", [AdamW, BertAdam, Lamb, StableAdamW])
def test_the_pull_is_a_decay_toward_the_start(kind):
    """w ← w − rate · pull · (w − w₀), then the optimizer's own step: against torch's Adam with the pull written out."""
    ours, theirs = model(), model()
    config, start = (
        kind(lr=0.01, decay=0.1, eps=1e-6),
        [p.detach().clone() for p in theirs.parameters()],
    )
    optimizer = build_optimizer(
        config,
        ours.named_parameters(),
        lambda name: ParameterRule(1.0 if name[0] == "3" else 0.5, 2.0 * (name[0] != "3")),
    )
    reference = build_optimizer(
        config,
        theirs.named_parameters(),
        lambda name: ParameterRule(1.0 if name[0] == "3" else 0.5),
    )
    for step in range(25):
        gradients(ours, step)
        gradients(theirs, step)
        factor = 1 - step / 30
        for (name, parameter), origin in zip(theirs.named_parameters(), start, strict=True):
            if name[0] != "3":
                parameter.data = parameter.data - 0.005 * factor * 2.0 * (parameter.data - origin)
        for one in (optimizer, reference):
            set_rate(one, factor)
            update(one, None)
    for mine, other, origin in zip(ours.parameters(), theirs.parameters(), start, strict=True):
        torch.testing.assert_close(
            mine, other, rtol=0, atol=1e-9
        )  # the rate of a step is rounded to float32 here
        assert not torch.equal(mine, origin)


def test_a_pull_changes_nothing_where_a_gradient_is_not_finite():
    network = model(torch.float32)
    optimizer = build_optimizer(
        AdamW(lr=0.01), network.named_parameters(), lambda name: ParameterRule(pull=1.0)
    )
    gradients(network, 0)
    update(optimizer, None)
    before = [p.detach().clone() for p in network.parameters()]
    gradients(network, 1)
    next(network.parameters()).grad[0, 0] = float("nan")
    update(optimizer, None)
    assert all(torch.equal(p, old) for p, old in zip(network.parameters(), before, strict=True))
