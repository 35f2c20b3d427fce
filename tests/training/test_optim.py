"""Optimizers against torch's, against Google's Adam, and against the formulas of LAMB, StableAdamW and Muon in float64."""

import copy
import dataclasses
import functools
import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bothways
from bothways.core.config import reader as configs
from bothways.core.errors import ConfigError
from bothways.core.source import Cursor
from bothways.core.training_module import hidden_matrices
from bothways.finetuning.config import FinetuneConfig, load_config
from bothways.model.families.catalogue import PRESETS
from bothways.model.heads import MaskedHead
from bothways.model.model import Model
from bothways.objectives.masked_lm import MaskedLMModule
from bothways.training.loop import Loop
from bothways.training.optimizers import (
    AdamW,
    BertAdam,
    Lamb,
    Muon,
    ParameterRule,
    StableAdamW,
    build_optimizer,
    orthogonalize,
    parameter_groups,
    set_rate,
    update,
)
from bothways.training.saved_state import RunTensors
from bothways.training.schedules import RunState, Steps, rate_factor
from spread import in_turn
from toy_folder import make_folder, make_rows
from toy_training import SGD, SINGLE, TRAINING, WHOLE, equal, steps, toy

STACKED = {"1.weight": 3}
KINDS = [AdamW, BertAdam, Lamb, StableAdamW, Muon]


def model(dtype=torch.float64):
    """A table, three stacked matrices in a dense layer, a LayerNorm, a matrix."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(7, 4), nn.Linear(4, 15), nn.LayerNorm(15), nn.Linear(15, 3, bias=False)
    ).to(dtype)


def gradients(network, step, size=0.1):
    """Give each parameter a gradient that depends on the step."""
    generator = torch.Generator().manual_seed(step)
    for weight in network.parameters():
        weight.grad = torch.randn(weight.shape, generator=generator, dtype=weight.dtype) * size


def assert_close(first, second, rtol=0.0, atol=5e-5):
    pair = ([*network.parameters()] for network in (first, second))
    torch.testing.assert_close(*pair, rtol=rtol, atol=atol)


def test_matrices_decay_and_vectors_do_not():
    named = dict(model().named_parameters())
    named["0.weight"].requires_grad_(False)
    decayed, others = parameter_groups(named.items(), AdamW(lr=0.5, decay=0.1))
    assert [decayed["weight_decay"], others["weight_decay"]] == [0.1, 0.0]
    matrices, vectors = ({*map(id, group["params"])} for group in (decayed, others))
    assert matrices == {id(named[name]) for name in ("1.weight", "3.weight")}
    assert vectors == {id(named[name]) for name in ("1.bias", "2.weight", "2.bias")}


def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(ConfigError, match="no parameter to train"):
        build_optimizer(AdamW(), model().requires_grad_(False).named_parameters())


@pytest.mark.parametrize("clip_norm", [None, 0.05, 100.0])
def test_adamw_with_clipping_is_torchs(clip_norm):
    ours, theirs = model(), model()
    optimizer = build_optimizer(AdamW(lr=0.01, decay=0.1), ours.named_parameters())
    matrices = [p for p in theirs.parameters() if p.ndim >= 2]
    vectors = [p for p in theirs.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.01, foreach=False, fused=False)
    for step in range(20):
        gradients(ours, step)
        gradients(theirs, step)
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip_norm or float("inf"))
        reference.step()
        norm = update(optimizer, clip_norm)
        assert norm.item() == pytest.approx(expected.item(), rel=1e-12)
        assert all(p.grad is None for p in ours.parameters())
    # torch adds 1e-6 to the norm that it divides by, and the factor is rounded to float32 here.
    rtol, atol = (0, 1e-12) if clip_norm is None else (1e-4, 1e-5)
    assert_close(ours, theirs, rtol, atol)


@pytest.mark.parametrize("kind", [*KINDS, SGD])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(kind, bad):
    network = model(torch.float32)
    own = kind is not SGD
    config, rule = kind(lr=0.01) if own else SGD, ParameterRule(pull=0.5 if own else 0.0)
    optimizer = build_optimizer(config, network.named_parameters(), lambda name: rule, STACKED)
    gradients(network, 0)
    update(optimizer, 1.0)
    before = [p.detach().clone() for p in network.parameters()]
    state = [copy.deepcopy(optimizer.state[p]) for p in network.parameters()]
    gradients(network, 1)
    network[1].weight.grad[0, 0] = bad
    assert not update(optimizer, 1.0).isfinite()
    for p, old, kept in zip(network.parameters(), before, state, strict=True):
        assert torch.equal(p, old)
        assert all(torch.equal(optimizer.state[p][name], value) for name, value in kept.items())


@pytest.mark.parametrize(
    ("kinds", "values"),
    [
        *((KINDS, {"lr": rate}) for rate in (0.0, float("nan"), float("inf"), 1e308)),
        (KINDS, {"decay": -0.01}),
        (KINDS[:-1], {"eps": -1e-8}),
        (KINDS[:-1], {"betas": (0.9, 1.0)}),
        ([Muon], {"momentum": 1.0}),
    ],
)
def test_settings_out_of_range_are_refused(kinds, values):
    for kind in kinds:
        with pytest.raises(ConfigError) as caught:
            kind(**values)
        assert caught.value.where == f"optimizer.{next(iter(values))}"


def test_rules_make_groups_of_their_own():
    named = dict(model().named_parameters())
    factors, config = {"0": 0.25, "1": 0.5}, AdamW(lr=0.5, decay=0.1)

    def rule(name: str) -> ParameterRule:
        return ParameterRule(factors.get(name[0], 1.0), 0.1 * (name == "0.weight"))

    seen = {
        id(p): (g["lr"], g["peak"], g["weight_decay"], g["pull"])
        for g in parameter_groups(named.items(), config, rule)
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
    optimizer = build_optimizer(config, named.items(), rule)
    assert set_rate(optimizer, 0.5) == 0.25
    assert sorted({group["lr"] for group in optimizer.param_groups}) == [0.0625, 0.125, 0.25]


@pytest.mark.parametrize("kind", [AdamW, BertAdam, Lamb, StableAdamW])
def test_the_pull_is_a_decay_toward_the_start(kind):
    """w ← w − rate · pull · (w − w₀), then the optimizer's own step: against torch's Adam with the pull written out."""
    ours, theirs = model(), model()
    start = [p.detach().clone() for p in theirs.parameters()]
    rules = {name: ParameterRule(1.0) if name[0] == "3" else ParameterRule(0.5, 2.0)
             for name, _ in ours.named_parameters()}  # fmt: skip
    config = kind(lr=0.01, decay=0.1, eps=1e-6)
    optimizer = build_optimizer(config, ours.named_parameters(), rules.__getitem__)
    reference = build_optimizer(
        config, theirs.named_parameters(), lambda name: ParameterRule(rules[name].factor)
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
    assert_close(ours, theirs, atol=1e-9)  # the rate of a step is rounded to float32 here
    assert not any(map(torch.equal, ours.parameters(), start))


def test_an_instance_is_fitted_with_its_own_rate_as_the_peak():
    training_module, rates = toy(), list[float]()
    optimizer = torch.optim.SGD(training_module.parameters(), lr=0.5)
    loop = Loop(
        RunTensors(training_module, optimizer, SINGLE), lambda progress: 1 - progress.steps / 4,
        lambda progress, meter: rates.append(meter.read().rate) or False,
        precision="fp32", clip_norm=None,
    )  # fmt: skip
    loop.train(steps(Cursor()), Steps(2), RunState())
    assert rates == [0.5, 0.375]


def test_fine_tuning_takes_any_optimizer_of_torch(tmp_path):
    """None of them takes a sparse gradient with all of its own settings."""
    rows = make_rows(64, 0)
    done = bothways.finetune(
        make_folder(tmp_path / "bert", dropout=0.0), rows, rows, out=tmp_path / "run", epochs=3,
        batch_size=8, optimizer=SGD, schedule=lambda share: 1.0, device="cpu", progress=False,
    )  # fmt: skip
    losses = [metrics["loss"] for _, metrics in done.history]
    assert losses[-1] < losses[0]
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "| optimizer | functools.partial" in card


def test_a_function_and_its_settings_are_given_together():
    for first in ("optimizer", "lr"):
        values = {"optimizer": torch.optim.SGD, "lr": 0.1}
        given = {first: values.pop(first), **values}
        with pytest.raises(ConfigError, match=r"^training\.optimizer: a function has no settings"):
            load_config(FinetuneConfig(), given)


def test_rules_apply_and_a_pull_is_refused():
    parameters = [*toy().named_parameters()]
    rules = {True: ParameterRule(0.5), False: ParameterRule()}
    optimizer = build_optimizer(SGD, parameters, lambda name: rules["norm" in name])
    assert sorted(group["peak"] for group in optimizer.param_groups) == [0.05, 0.1]
    with pytest.raises(ConfigError, match="needs one of the library's own"):
        build_optimizer(SGD, parameters, lambda name: ParameterRule(pull=1.0))


class WithoutRate(torch.optim.Optimizer):
    """An optimizer whose groups have no rate."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (torch.optim.LBFGS, "LBFGS does not make a step of one dense gradient and a rate"),
        (torch.optim.SparseAdam, "SparseAdam does not make a step of one dense gradient"),
        (WithoutRate, "WithoutRate does not make a step of one dense gradient and a rate"),
        (functools.partial(torch.optim.SGD, speed=1), "cannot make an optimizer of groups:"),
        (lambda groups: groups, "must make an optimizer of torch, not a list"),
    ],
)
def test_an_optimizer_that_cannot_train_here_is_one_message(factory, message):
    with pytest.raises(ConfigError, match=rf"^training\.optimizer: {message}.*\n  Give"):
        build_optimizer(factory, toy().named_parameters())


def test_a_function_has_a_name_in_the_record():
    training = dataclasses.replace(TRAINING, optimizer=torch.optim.SGD)
    assert configs.to_dict(training)["optimizer"] == "torch.optim.sgd.SGD"
    assert rate_factor(lambda share: share, Steps(4))(RunState(steps=3)) == 0.75


ROWS, WIDTH = 523, 20  # more than a thread takes at once, and no whole number of vectors


def networks(dtype=torch.float32):
    torch.manual_seed(0)
    first = nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 3)).to(dtype)
    return first, copy.deepcopy(first)


def lose(network, step, sparse, factor=1.0):
    """Two microbatches, with tokens that come back after steps without them."""
    generator = torch.Generator().manual_seed(step)
    network[0].sparse = sparse
    for _ in range(2):
        rows = min(ROWS - 3, 40 + 20 * step)  # the last three rows are never read
        ids = torch.randint(rows, (60,), generator=generator)
        (network(ids).square().sum() * factor).backward()
    assert network[0].weight.grad.is_sparse == sparse


BY_ROWS = AdamW(lr=0.02, decay=0.3), AdamW(lr=0.02, decay=0.0), BertAdam(lr=0.02, decay=0.3)


@pytest.mark.parametrize(
    ("clip_norm", "pull", "config"),
    in_turn([(None, 0.0), (None, 1.5), (0.5, 0.0), (0.5, 1.5)], BY_ROWS),
)
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)]
)
def test_by_rows_is_the_dense_update(clip_norm, pull, config, dtype):
    ours, theirs = networks(dtype)
    optimizers = [
        build_optimizer(config, net.named_parameters(), lambda _: ParameterRule(pull=pull))
        for net in (ours, theirs)
    ]
    start = ours[0].weight.detach().clone()
    for step in range(40):
        for net, optimizer in zip((ours, theirs), optimizers, strict=True):
            lose(net, step, sparse=net is ours)
            set_rate(optimizer, 1 - step / 50)
        norms = [update(optimizer, clip_norm) for optimizer in optimizers]
        torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
        assert all(p.grad is None for p in ours.parameters())
    assert_close(ours, theirs)
    unchanged = ours[0].weight == start
    assert not unchanged[:30].all(1).any()
    assert unchanged[-3:].all() if config.decay == 0.0 else not unchanged[-3:].any()


@pytest.mark.parametrize("config", [AdamW(lr=0.02), BertAdam(lr=0.02)])
def test_rows_take_no_gradient_that_is_not_finite(config):
    network, _ = networks()
    optimizer = build_optimizer(config, network.named_parameters())
    lose(network, 3, sparse=True)
    update(optimizer, 1.0)
    before = copy.deepcopy((network.state_dict(), optimizer.state_dict()["state"]))
    lose(network, 9, sparse=True, factor=float("nan"))
    update(optimizer, 1.0)
    assert all(torch.equal(value, before[0][name]) for name, value in network.state_dict().items())
    for number, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, before[1][number][name]) for name, value in state.items())


@pytest.mark.parametrize("config", [AdamW(lr=0.02), BertAdam(lr=0.02)])
def test_a_run_goes_on_from_its_state(config):
    """Which rows have moments is no part of the state: a restored run finds it out."""
    whole, cut = networks()
    optimizer, early = (build_optimizer(config, net.named_parameters()) for net in (whole, cut))
    for step in range(12):
        lose(whole, step, sparse=True)
        update(optimizer, 1.0)
        if step < 5:
            lose(cut, step, sparse=True)
            update(early, 1.0)
    file = io.BytesIO()
    torch.save(early.state_dict(), file)
    file.seek(0)
    again = build_optimizer(config, cut.named_parameters())
    # Of a run that is none of this state's.
    again.seen = {cut[0].weight: torch.zeros(ROWS, dtype=torch.bool)}
    again.load_state_dict(torch.load(file, weights_only=True))
    for step in range(5, 12):
        lose(cut, step, sparse=True)
        update(again, 1.0)
    assert equal(whole, cut)


def test_a_run_may_change_from_dense_to_rows_and_back():
    ours, theirs = networks()
    optimizers = [build_optimizer(AdamW(lr=0.02), net.named_parameters()) for net in (ours, theirs)]
    for step in range(20):
        for net, optimizer in zip((ours, theirs), optimizers, strict=True):
            lose(net, step, sparse=net is ours and step // 5 % 2 == 1)
            update(optimizer, 1.0)
    assert_close(ours, theirs)


def compare(config, change, steps, sizes=lambda step: 0.1, tolerance=1e-12):
    """Compare an optimizer with a formula.

    Args:
        change: (name, weight, gradients so far) → what lr times is subtracted, of one matrix.
    """
    ours = model()
    parameters = [*ours.named_parameters()]
    optimizer = build_optimizer(config, parameters, matrices=STACKED)
    weights = {name: p.detach().numpy().copy() for name, p in parameters}
    history = {name: [] for name in weights}
    for step in range(steps):
        gradients(ours, step, sizes(step))
        for name, parameter in parameters:
            history[name].append(parameter.grad.numpy().copy())
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
            parameter.detach().numpy(), weights[name], rtol=tolerance, atol=tolerance / 100
        )


def moments(gradients, first, second):
    """m and v of Adam without correction, as sums over the gradients so far."""
    powers = np.arange(len(gradients))[::-1]
    stacked = np.stack(gradients, -1)
    m = (1 - first) * (stacked * first**powers).sum(-1)
    return m, (1 - second) * (stacked**2 * second**powers).sum(-1)


def test_bert_adam_is_adam_without_bias_correction():
    """Google's AdamWeightDecayOptimizer: m, v, m / (√v + ε) + decay · w, times the rate."""

    def change(name, w, gradients):
        m, v = moments(gradients, 0.8, 0.99)
        return 0.01 * (m / (np.sqrt(v) + 1e-6) + (0.1 * w if w.ndim >= 2 else 0.0))

    compare(BertAdam(lr=0.01, betas=(0.8, 0.99), eps=1e-6, decay=0.1), change, 12)


@pytest.mark.parametrize("steps", [1, 12])
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


@pytest.mark.parametrize("steps", [1, 12])
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


@pytest.mark.parametrize("config", [AdamW(lr=0.01), *WHOLE], ids=lambda config: config.kind)
def test_a_single_number_is_updated_as_a_vector_of_one(config):
    """Such as the factor of a learned sum of layers."""
    tensors = torch.tensor(2.0), torch.tensor([2.0]), torch.ones(2, 2)
    scale, vector, block = map(nn.Parameter, tensors)
    named = [("scale", scale), ("vector", vector), ("block", block)]
    optimizer = build_optimizer(config, named, matrices={"block": 1})
    for size in (0.5, -3.0, 40.0):
        for _, weight in named:
            weight.grad = torch.full_like(weight, size)
        update(optimizer, clip_norm=None)
    assert scale.item() == vector.item() != 2.0


def newton_schulz(x):
    """The iteration in NumPy."""
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x - 4.775 * square @ x + 2.0315 * square @ square @ x
    return x.T if tall else x


@pytest.mark.parametrize("steps", [1, 12])
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
    found = parameter_groups(named.items(), Muon(), matrices=hidden_matrices(training_module))
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
        build_optimizer(Muon(), model().named_parameters())
    assert caught.value.where == "training.optimizer"


@pytest.mark.parametrize("config", WHOLE)
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_a_sparse_gradient_gives_the_dense_update(config, clip_norm):
    ours, theirs = model(), model()
    ours[0].sparse = True
    optimizers = [
        build_optimizer(config, net.named_parameters(), matrices=STACKED) for net in (ours, theirs)
    ]
    for step in range(12):
        ids = torch.randint(5, (6,), generator=torch.Generator().manual_seed(step))
        for net, optimizer in zip((ours, theirs), optimizers, strict=True):
            net(ids).square().sum().backward()
            update(optimizer, clip_norm)
    assert_close(ours, theirs, 1e-9, 1e-9)


@pytest.mark.parametrize("config", WHOLE)
def test_whole_matrices_are_refused_in_parts(config):
    """A tensor that ranks share has placements."""
    parameters = [*model().named_parameters()]
    dict(parameters)["1.weight"].placements = ()
    with pytest.raises(ConfigError, match=f"{config.kind} updates whole matrices, and the ranks"):
        build_optimizer(config, parameters, matrices=STACKED)
