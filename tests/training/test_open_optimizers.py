"""Optimizers and schedules from outside: any `torch.optim.Optimizer`, any function."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import bothways
from bothways.core.config import reader as configs
from bothways.core.errors import ConfigError
from bothways.core.source import Cursor
from bothways.finetuning.config import expand_shorthands
from bothways.training.loop import Loop
from bothways.training.optimizers import AdamW, ParameterRule, build_optimizer
from bothways.training.saved_state import RunTensors
from bothways.training.schedules import RunState, Steps, rate_factor
from toy_folder import make_examples, make_folder
from toy_training import SINGLE, TRAINING, run_toy, steps, toy

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


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


@pytest.mark.parametrize("factory", [torch.optim.AdamW, SGD])
def test_fine_tuning_takes_any_optimizer_of_torch(tmp_path, factory):
    """None of them takes a sparse gradient with all of its own settings."""
    rows = [{"text": each.text, "label": each.label} for each in make_examples(64, 0)]
    done = bothways.finetune(
        make_folder(tmp_path / "bert", dropout=0.0), rows, rows, out=tmp_path / "run", epochs=3,
        batch_size=8, optimizer=factory, schedule=lambda share: 1.0, device="cpu", progress=False,
    )  # fmt: skip
    losses = [metrics["loss"] for _, metrics in done.history]
    assert losses[-1] < losses[0]
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    name = "functools.partial" if factory is SGD else "torch.optim."
    assert f"| optimizer | {name}" in card


def test_a_function_and_its_settings_are_given_together():
    for first in ("optimizer", "lr"):
        values = {"optimizer": torch.optim.SGD, "lr": 0.1}
        given = {first: values.pop(first), **values}
        with pytest.raises(ConfigError, match=r"^training\.optimizer: a function has no settings"):
            expand_shorthands(given)


def test_a_factory_and_a_function_train_and_resume(tmp_path):
    def run(folder: Path, stop: int) -> dict[str, torch.Tensor]:
        folder.mkdir(exist_ok=True)
        training = dataclasses.replace(
            TRAINING, until=Steps(8), optimizer=SGD, schedule=lambda share: 1 - share / 2,
            evaluate=None, keep=TRAINING.keep.__class__(), save=Steps(1),
        )  # fmt: skip
        training_module = toy()

        def end(event: object) -> None:
            if getattr(event, "kind", "") == "checkpoint" and event.progress.steps == stop:
                raise InterruptedError

        run_toy(folder, training, training_module, on_event=end)
        return training_module.state_dict()

    whole = run(tmp_path / "whole", 0)
    with pytest.raises(InterruptedError):
        run(tmp_path / "cut", 4)
    again = run(tmp_path / "cut", 0)
    assert all(torch.equal(tensor, again[name]) for name, tensor in whole.items())


def test_rules_apply_and_a_pull_is_refused():
    parameters = [*toy().named_parameters()]
    optimizer = build_optimizer(
        SGD, parameters, lambda name: ParameterRule(0.5 if "norm" in name else 1.0)
    )
    assert sorted(group["peak"] for group in optimizer.param_groups) == [0.05, 0.1]
    with pytest.raises(ConfigError, match="needs one of the library's own"):
        build_optimizer(SGD, parameters, lambda name: ParameterRule(pull=1.0))


def test_a_gradient_that_is_not_finite_changes_nothing():
    from bothways.training.optimizers import update

    training_module = toy()
    before = {name: tensor.clone() for name, tensor in training_module.state_dict().items()}
    optimizer = build_optimizer(SGD, training_module.named_parameters())
    for parameter in training_module.parameters():
        parameter.grad = torch.full_like(parameter, torch.inf)
    assert not update(optimizer, 1.0).isfinite()
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in training_module.state_dict().items()
    )


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


@pytest.mark.parametrize("lr", [1e308, float("inf"), float("nan"), 0.0])
def test_rates_that_overflow_are_refused(lr):
    with pytest.raises(ConfigError, match=r"optimizer\.lr: must be above 0 and at most 1000"):
        AdamW(lr=lr)
