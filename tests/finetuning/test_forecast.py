"""The forecast of a fine-tuning run: what is counted, and that measuring changes nothing."""

from __future__ import annotations

import dataclasses
import datetime
import re
from pathlib import Path

import pytest
import torch

from bothways.data.batching import ExampleBudget, TokenBudget
from bothways.finetuning import forecast as forecasting
from bothways.finetuning.config import FinetuneConfig, finetune_adam
from bothways.finetuning.data import LabelledData, label, updates_per_epoch
from bothways.finetuning.forecast import forecast, measure_tuning_step, steps_per_epoch
from bothways.model.flops import BACKWARD
from bothways.tasks.classification.task import ClassificationTask
from bothways.training.durations import Duration, Epochs, Hours, Steps
from bothways.training.preflight.machine import StepSeconds
from toy_task import make_examples, make_task, make_tokenizer

TRAINING = dataclasses.replace(finetune_adam(), precision="fp32")
SETTINGS = FinetuneConfig(TRAINING, 16)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> LabelledData:
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return label(ClassificationTask(), tokenizer, make_examples(320), make_examples(64, seed=1), 16)


def test_an_epoch_has_a_smaller_last_batch_of_examples(data: LabelledData) -> None:
    def steps(batch: ExampleBudget | TokenBudget) -> float:
        return steps_per_epoch(data, dataclasses.replace(SETTINGS, batch=batch))

    assert steps(ExampleBudget(30)) == 11
    assert steps(TokenBudget(100)) == pytest.approx(data.tokens / 100)


@pytest.mark.parametrize(("until", "steps"), [(Epochs(3.0), 33), (Steps(33), 33)])
def test_the_last_batch_of_an_epoch_is_a_step(
    data: LabelledData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Duration, steps: int
) -> None:
    """320 examples in batches of 30: the eleventh has 20."""
    monkeypatch.setattr(forecasting, "measure_tuning_step", lambda *_: StepSeconds((1e-4,), 0.25))
    settings = dataclasses.replace(SETTINGS, batch=ExampleBudget(30))
    training = dataclasses.replace(TRAINING, until=until, evaluate=Epochs(1.0))
    found = forecast(make_task(tmp_path), data, settings, training, None)
    assert found is not None
    assert re.match(rf"{steps} steps of \d+ ms and {steps // 11} evaluations, as", found.what)


def test_measuring_a_step_changes_no_weight(data: LabelledData, tmp_path: Path) -> None:
    task = make_task(tmp_path)
    before = {name: tensor.clone() for name, tensor in task.state_dict().items()}
    step = measure_tuning_step(task, data, SETTINGS, TRAINING)
    assert step.per_token[0] > 0
    assert step.update > 0
    assert all(parameter.grad is None for parameter in task.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in task.state_dict().items())
    assert not task.model.encoder.embedding.token.sparse


def test_updates_evaluations_and_checkpoints_are_counted(
    data: LabelledData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, disk = StepSeconds((1e-4,), 0.25), 1e-6
    monkeypatch.setattr(forecasting, "measure_tuning_step", lambda *_: step)
    monkeypatch.setattr(forecasting, "seconds_per_byte", lambda _: disk)
    task, training = make_task(tmp_path), dataclasses.replace(TRAINING, evaluate=Epochs(1.0))
    found = forecast(task, data, SETTINGS, training, tmp_path)
    assert found is not None
    dev = sum(len(sequence) for item in data.dev for sequence in item.sequences)
    weights = sum(parameter.numel() for parameter in task.parameters())
    seconds = 30 * 0.25 + 3 * data.tokens * 1e-4  # three epochs of ten updates
    seconds += 4 * dev * 1e-4 / (1 + BACKWARD)  # and the best weights at the end
    seconds += 3 * 12 * weights * disk
    words = re.fullmatch(
        r"30 steps of (\d+) ms, 3 evaluations and 3 checkpoints, as measured now: about (.*)",
        found.what,
    )
    assert words is not None
    assert int(words[1]) == pytest.approx(1000 * (0.25 + data.tokens / 10 * 1e-4), abs=1)
    hours, minutes, whole = map(int, words[2].split(":"))
    told = datetime.timedelta(hours=hours, minutes=minutes, seconds=whole).total_seconds()
    assert abs(told - seconds) <= 0.5
    assert updates_per_epoch(data, SETTINGS) == 10
    by_time = dataclasses.replace(training, until=Hours(1.0))
    assert forecast(task, data, SETTINGS, by_time, tmp_path) is None
