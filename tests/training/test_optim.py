import copy
import dataclasses
import functools
import io
from typing import Any

import pytest
import torch
from torch import nn

import bothways
from bothways.core.config import reader as configs
from bothways.core.errors import ConfigError
from bothways.core.source import Cursor
from bothways.finetuning.config import FinetuneConfig, load_config
from bothways.training.loop import Loop
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
from bothways.training.saved_state import RunTensors
from bothways.training.schedules import RunState, Steps, rate_factor
from spread import in_turn
from toy_folder import make_examples, make_folder
from toy_training import SINGLE, TRAINING, equal, steps, toy

MATRICES = {"1.weight": 1, "3.weight": 3}
KINDS = [AdamW, BertAdam, Lamb, StableAdamW, Muon]


def model(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(7, 4), nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3, bias=False)
    ).to(dtype)


def gradients(network, step):
    generator = torch.Generator().manual_seed(step)
    for weight in network.parameters():
        weight.grad = torch.randn(weight.shape, generator=generator, dtype=weight.dtype) * 0.1


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
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=rtol, atol=atol)


SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("kind", [*KINDS, SGD])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(kind, bad):
    network = model(torch.float32)
    own = kind is not SGD
    config, rule = kind(lr=0.01) if own else SGD, ParameterRule(pull=0.5 if own else 0.0)
    optimizer = build_optimizer(config, network.named_parameters(), lambda name: rule, MATRICES)
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
    for mine, other, origin in zip(ours.parameters(), theirs.parameters(), start, strict=True):
        # The rate of a step is rounded to float32 here.
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-9)
        assert not torch.equal(mine, origin)


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
    rows = [{"text": each.text, "label": each.label} for each in make_examples(64, 0)]
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


def assert_equal(first, second):
    for mine, other in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=5e-5)


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
    assert_equal(ours, theirs)
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
    assert_equal(ours, theirs)
