"""LAMB, StableAdamW and Muon against their formulas in float64, written out with NumPy."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from bothways.core.errors import ConfigError
from bothways.model.families.catalogue import PRESETS
from bothways.model.heads import MaskedHead
from bothways.model.model import Model
from bothways.objectives.masked_lm import MaskedLMModule
from bothways.training.optimizers import (
    AdamW,
    Lamb,
    Muon,
    StableAdamW,
    build_optimizer,
    orthogonalize,
    parameter_groups,
    set_rate,
    update,
)

STACKED = {"block.weight": 3}


def network():
    """A table, three stacked matrices in a dense layer, a LayerNorm."""
    torch.manual_seed(0)
    parts = {
        "table": nn.Embedding(7, 4),
        "block": nn.Linear(4, 15),
        "norm": nn.LayerNorm(15),
        "head": nn.Linear(15, 2),
    }
    return nn.ModuleDict(parts).double()


def draw(parameters, step, size=0.1):
    """Give each parameter a gradient that depends on the step; return them by name."""
    generator = torch.Generator().manual_seed(step)
    for _, parameter in parameters:
        parameter.grad = size * torch.randn(
            parameter.shape, generator=generator, dtype=parameter.dtype
        )
    return {name: parameter.grad.numpy().copy() for name, parameter in parameters}


def compare(config, change, steps, sizes=lambda step: 0.1, tolerance=1e-12):
    """Compare an optimizer with a formula.

    Args:
        change: (name, weight, gradients so far) → what lr times is subtracted, of one matrix.
    """
    ours = network()
    parameters = [*ours.named_parameters()]
    optimizer = build_optimizer(config, parameters, matrices=STACKED)
    weights = {name: p.detach().numpy().copy() for name, p in parameters}
    history = {name: [] for name in weights}
    for step in range(steps):
        for name, gradient in draw(parameters, step, sizes(step)).items():
            history[name].append(gradient)
        factor = 1 - step / (2 * steps)
        set_rate(optimizer, factor)
        update(optimizer, None)
        for name, weight in weights.items():
            parts = STACKED.get(name, 1)
            rows = np.split(weight, parts)
            past = zip(*(np.split(g, parts) for g in history[name]), strict=True)
            weights[name] = np.concatenate(
                [w - factor * change(name, w, [*g]) for w, g in zip(rows, past, strict=True)]
            )
    for name, parameter in parameters:
        np.testing.assert_allclose(
            parameter.detach().numpy(), weights[name], rtol=tolerance, atol=tolerance
        )


def moments(gradients, first, second):
    """m and v of Adam without correction, as sums over the gradients so far."""
    powers = np.arange(len(gradients))[::-1]
    stacked = np.stack(gradients, -1)
    m = (1 - first) * (stacked * first**powers).sum(-1)
    return m, (1 - second) * (stacked**2 * second**powers).sum(-1)


@pytest.mark.parametrize("steps", [1, 30])
def test_lamb_is_alberts_formula(steps):
    config = Lamb(lr=0.02, betas=(0.8, 0.99), eps=1e-6, decay=0.1)

    def change(name, w, gradients):
        m, v = moments(gradients, 0.8, 0.99)
        u = m / (np.sqrt(v) + 1e-6)
        if w.ndim < 2:
            return 0.02 * u
        u += 0.1 * w
        return 0.02 * np.linalg.norm(w) / np.linalg.norm(u) * u

    compare(config, change, steps, tolerance=1e-11)


def test_a_zero_matrix_has_the_trust_ratio_1():
    weight = nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))
    optimizer = build_optimizer(Lamb(lr=0.01, eps=1e-12), [("w", weight)])
    weight.grad = torch.ones_like(weight)
    update(optimizer, None)
    torch.testing.assert_close(
        weight.detach(), torch.full_like(weight, -0.01 * 0.1 / math.sqrt(0.001))
    )


@pytest.mark.parametrize("steps", [1, 30])
def test_stable_adamw_divides_the_rate_by_the_rms(steps):
    config = StableAdamW(lr=0.02, betas=(0.8, 0.9), eps=1e-3, decay=0.1)
    clipped = []

    def change(name, w, gradients):
        m, v = moments(gradients, 0.8, 0.9)
        t = len(gradients)
        mean, square = m / (1 - 0.8**t), v / (1 - 0.9**t)
        rms = np.sqrt(np.mean(gradients[-1] ** 2 / np.maximum(square, 1e-6)))
        clipped.append(rms > 1)
        decay = 0.1 * w if w.ndim >= 2 else 0.0
        return 0.02 / max(1.0, rms) * (mean / (np.sqrt(square) + 1e-3) + decay)

    # Every seventh gradient is fifty times as large.
    compare(config, change, steps, lambda step: 5.0 if step % 7 == 2 else 0.1, tolerance=1e-11)
    assert any(clipped) == (steps > 1)
    assert not all(clipped)


@pytest.mark.parametrize(
    "config", [AdamW(lr=0.1), Lamb(lr=0.1), StableAdamW(lr=0.1), Muon(lr=0.1)], ids=lambda c: c.kind
)
def test_a_single_number_is_updated_as_a_vector_of_one(config):
    """Such as the factor of a learned sum of layers."""
    weights = {
        "scale": nn.Parameter(torch.tensor(2.0)),
        "vector": nn.Parameter(torch.tensor([2.0])),
    }
    block = nn.Parameter(torch.ones(2, 2))
    optimizer = build_optimizer(config, [*weights.items(), ("block", block)], matrices={"block": 1})
    for size in (0.5, -3.0, 40.0):
        for weight in (*weights.values(), block):
            weight.grad = torch.full_like(weight, size)
        update(optimizer, clip_norm=None)
    assert weights["scale"].item() == weights["vector"].item() != 2.0


def newton_schulz(x):
    """The iteration in NumPy."""
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x - 4.775 * square @ x + 2.0315 * square @ square @ x
    return x.T if tall else x


@pytest.mark.parametrize("steps", [1, 30])
def test_muon_is_momentum_and_newton_schulz_next_to_adamw(steps):
    others = AdamW(lr=0.01, betas=(0.8, 0.9), eps=1e-3, decay=0.3)
    config = Muon(lr=0.02, momentum=0.9, decay=0.1, others=others)

    def change(name, w, gradients):
        if name not in STACKED:
            m, v = moments(gradients, 0.8, 0.9)
            t = len(gradients)
            decay = 0.3 * w if w.ndim >= 2 else 0.0
            return 0.01 * (m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.9**t)) + 1e-3) + decay)
        m, _ = moments(gradients, 0.9, 0.0)
        ahead = 0.1 * gradients[-1] + 0.9 * m
        scale = math.sqrt(max(1.0, w.shape[0] / w.shape[1]))
        return 0.02 * (scale * newton_schulz(ahead) + 0.1 * w)

    compare(config, change, steps, tolerance=1e-8)  # the rate of the fused kernel is float32


@pytest.mark.parametrize("shape", [(12, 12), (12, 40), (40, 12), (1, 9)])
@pytest.mark.parametrize("autocast", [False, True])
def test_singular_values_of_orthogonal_updates_are_in_the_known_band(shape, autocast):
    torch.manual_seed(1)
    u, s, v = torch.linalg.svd(torch.randn(2, *shape, dtype=torch.float64), full_matrices=False)
    s = torch.logspace(0, -1.5, min(shape), dtype=torch.float64).expand_as(s)
    assert (s > 0.01 * s.norm(dim=1, keepdim=True)).all()
    x = ((u * s[:, None]) @ v).to(torch.float32 if autocast else torch.float64) * 7
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = orthogonalize(x)
    assert y.dtype == x.dtype
    found = torch.linalg.svdvals(y)
    low, high = (0.6, 1.25) if autocast else (0.68, 1.14)
    assert (found > low).all()
    assert (found < high).all()
    cosine = (y * (u @ v)).sum((1, 2)) / y.flatten(1).norm(dim=1) / math.sqrt(min(shape))
    assert (cosine > 0.97).all(), "the singular vectors are those of the matrix"


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9")
def test_muon_agrees_with_torchs_own():
    """torch's, which iterates in bfloat16."""
    torch.manual_seed(2)
    ours = nn.Parameter(torch.randn(24, 16))
    theirs = nn.Parameter(ours.detach().clone())
    settings = {"lr": 0.02, "momentum": 0.95}
    optimizer = build_optimizer(Muon(**settings, decay=0.1), [("w", ours)], matrices={"w": 1})
    reference = torch.optim.Muon([theirs], **settings, weight_decay=0.1, nesterov=True)
    for _ in range(5):
        ours.grad = torch.randn(24, 16)
        theirs.grad = ours.grad.clone()
        update(optimizer, None)
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5 * 0.02 * 0.03)


def build_training_module(preset):
    with torch.device("meta"):
        return MaskedLMModule(Model(PRESETS[preset](), (MaskedHead(),)))


@pytest.mark.parametrize(
    ("preset", "stacked"),
    [
        ("bert-tiny", {"qkv": 3, "out": 1, "up": 1, "down": 1}),
        ("albert-base-v2", {"qkv": 3, "out": 1, "up": 1, "down": 1}),
        ("modernbert-base", {"qkv": 3, "out": 1, "up": 2, "down": 1}),
        ("longformer-base-4096", {"qkv": 3, "global_qkv": 3, "out": 1, "up": 1, "down": 1}),
        (
            "deberta-base",
            {"qkv": 3, "out": 1, "position_key": 1, "position_query": 1, "up": 1, "down": 1},
        ),
    ],
)
def test_muon_gets_the_matrices_of_blocks_and_adamw_all_else(preset, stacked):
    training_module = build_training_module(preset)
    named = dict(training_module.trained_parameters())
    found = parameter_groups(named.items(), Muon(), matrices=training_module.matrices())
    kinds = {id(p): (g["update"], g.get("parts")) for g in found for p in g["params"]}
    assert len(kinds) == len(named)
    for name, parameter in named.items():
        layer = name.removesuffix(".weight").rpartition(".")[2]
        own = ".blocks." in name and parameter.ndim == 2
        assert kinds[id(parameter)] == (("muon", stacked[layer]) if own else ("adamw", None)), name
    for group in found:
        vectors = {parameter.ndim < 2 for parameter in group["params"]}
        assert len(vectors) == 1
        assert group["weight_decay"] == (0.0 if True in vectors else 0.01)


def test_muon_without_matrices_is_refused():
    with pytest.raises(ConfigError, match="this model has none") as caught:
        build_optimizer(Muon(), network().named_parameters())
    assert caught.value.where == "training.optimizer"


@pytest.mark.parametrize("config", [Lamb(lr=0.02), StableAdamW(lr=0.02), Muon(lr=0.02)])
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_a_sparse_gradient_gives_the_dense_update(config, clip_norm):
    ours = network()
    theirs = copy.deepcopy(ours)
    ours["table"].sparse = True
    optimizers = [
        build_optimizer(config, net.named_parameters(), matrices=STACKED) for net in (ours, theirs)
    ]
    for step in range(12):
        ids = torch.randint(5, (6,), generator=torch.Generator().manual_seed(step))
        for net, optimizer in zip((ours, theirs), optimizers, strict=True):
            x = net["norm"](net["block"](net["table"](ids)))
            net["head"](x).square().sum().backward()
            update(optimizer, clip_norm)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("config", [Lamb(lr=0.1), StableAdamW(lr=0.1), Muon(lr=0.1)])
def test_whole_matrices_are_refused_in_parts(config):
    """A tensor that ranks share has placements."""
    parameters = [*network().named_parameters()]
    dict(parameters)["block.weight"].placements = ()
    with pytest.raises(ConfigError, match=f"{config.kind} updates whole matrices, and the ranks"):
        build_optimizer(config, parameters, matrices=STACKED)
