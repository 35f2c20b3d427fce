"""Losses and gradients of a task's model and of the class of transformers that its folder opens as."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import toy_training
from bothways.core.batch import Batch, pack
from bothways.hub.model_folder import load_model, save_model
from bothways.tasks.base import EncodedExample, TaskModel


def make_theirs(task: TaskModel[Any, Any], folder: Path, kind: str) -> Any:
    """The model as transformers opens it, strictly; the dropout is that of the configuration."""
    import transformers

    save_model(folder, task.model, task.tokenizer, labels=task.labels, problem=task.task.problem)
    theirs, report = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    return theirs


def batch_of(inputs: list[EncodedExample]) -> Batch:
    return pack([sequence for item in inputs for sequence in item.sequences])


def padded(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def check_gradients(task: TaskModel[Any, Any], theirs: Any, folder: Path) -> None:
    """Their gradients, read back as a model of ours, equal ours."""
    for parameter in theirs.parameters():
        gradient = parameter.grad
        parameter.data = torch.zeros_like(parameter) if gradient is None else gradient.clone()
    theirs.save_pretrained(folder)
    expected = load_model(folder, task.model.specification).model.state_dict()
    for name, parameter in task.model.named_parameters():
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        message = functools.partial("{}: {}".format, name)
        torch.testing.assert_close(found, expected[name], rtol=2e-4, atol=2e-6, msg=message)


def check_sum(task: TaskModel[Any, Any], inputs: list[EncodedExample]) -> None:
    """The loss of a batch is the sum of those of its examples, each alone; so are weights and hits."""
    task.eval()
    name = task.loss_name
    whole = task(batch_of(inputs))[name]
    parts = [task(batch_of([item]))[name] for item in inputs]
    assert whole.total.item() == pytest.approx(sum(part.total.item() for part in parts), rel=1e-5)
    weights = [task.weights(batch_of([item]))[name] for item in inputs]
    assert task.weights(batch_of(inputs))[name] == pytest.approx(sum(weights))
    if whole.hits is not None:
        assert int(whole.hits) == sum(int(part.hits) for part in parts)
    sequences = [sequence for item in inputs for sequence in item.sequences]
    void = [toy_training.void(sequence) for sequence in sequences]
    assert task.weights(pack(void)) == {name: 0.0}
    assert task(pack(void))[name].total.item() == 0
