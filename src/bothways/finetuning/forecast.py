"""A forecast of the time of a fine-tuning run: its steps with updates, evaluations and checkpoints.

Each part is timed on a small amount of the run's own work. Neither the weights nor the data change;
torch's generator is used.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bothways.core.batch import pack
from bothways.core.finding import Finding
from bothways.core.progress import SILENT, Progress
from bothways.core.runtime.devices import device_of
from bothways.core.terminal import quantity, time_text
from bothways.data.batching import ExampleBudget
from bothways.finetuning.automatic import learning_by_rows
from bothways.finetuning.config import FinetuneConfig
from bothways.finetuning.data import LabelledData, updates_per_epoch
from bothways.finetuning.failed_runs import join
from bothways.model.flops import BACKWARD
from bothways.tasks.base import TaskModel
from bothways.training.durations import StepRates
from bothways.training.optimizers import FusedAdamW, build_optimizer
from bothways.training.preflight.machine import StepSeconds, measure_updates, seconds_per_byte
from bothways.training.preflight.memory import WEIGHT, moment_bytes
from bothways.training.run import Training

SAMPLE = 1024
"""Maximum number of tokens that are read to measure the speed."""


def forecast(
    task_model: TaskModel[Any, Any],
    data: LabelledData,
    settings: FinetuneConfig,
    training: Training,
    folder: Path | None,
    progress: Progress = SILENT,
) -> Finding | None:
    """Return a forecast of the time; None for a run whose length is a time.

    Args:
        training: settings with the evaluations and checkpoints of the run.
        folder: folder of the run; None for a run in memory, which writes no checkpoints.
        progress: receives the stages of the measurement.
    """
    per_epoch = steps_per_epoch(data, settings)
    rates = StepRates(data.tokens / per_epoch, 1 / per_epoch)
    length = rates.steps(training.end)
    if length is None:
        return None
    updates, epochs = math.ceil(length - 1e-9), length / per_epoch
    step = measure_tuning_step(task_model, data, settings, training, progress)
    (per_token,) = step.per_token
    scored = rates.times(training.evaluate, length) if data.dev else 0
    saved = 0 if folder is None else max(scored, rates.times(training.save, length))
    dev = sum(len(sequence) for item in data.dev for sequence in item.sequences)
    size, moment_sizes, matrices = 0, moment_bytes(training.optimizer), task_model.matrices()
    for name, weight in task_model.trained_parameters():
        moments = moment_sizes.hidden if name in matrices else moment_sizes.others
        size += weight.numel() * (WEIGHT + moments * weight.requires_grad)
    # The best weights are scored once more at the end.
    tokens_read = data.tokens * epochs + (scored + bool(scored)) * dev / (1 + BACKWARD)
    seconds = (
        tokens_read * per_token
        + updates * step.update
        + (0.0 if folder is None else saved * size * seconds_per_byte(folder))
    )
    per_step = step.update + data.tokens * epochs / updates * per_token
    items = [f"{quantity(updates, 'step(s)')} of {1000 * per_step:,.0f} ms"]
    items += [quantity(scored, "evaluation(s)")] if scored else []
    items += [quantity(saved, "checkpoint(s)")] if saved else []
    message = f"{join(items)}, as measured now: about {time_text(seconds)}"
    return Finding("time", "note", message)


def measure_tuning_step(
    task_model: TaskModel[Any, Any],
    data: LabelledData,
    settings: FinetuneConfig,
    training: Training,
    progress: Progress = SILENT,
) -> StepSeconds:
    """Measure a step on a sample of the data, at a rate of 0: no weight changes."""
    device = device_of(task_model)
    tokens = min(SAMPLE, data.tokens / updates_per_epoch(data, settings))
    sequences = sorted(data.sequences, key=len)
    sample = pack(sequences[:: max(1, round(data.tokens / tokens))])
    with learning_by_rows(task_model.model, device, 1, training.optimizer):
        optimizer = build_optimizer(training.optimizer, task_model.trained_parameters())
        if isinstance(optimizer, FusedAdamW):
            # Late in the run all tokens of the data have been seen.
            table = task_model.model.encoder.embedding.token.weight
            assert isinstance(table, torch.nn.Parameter)
            optimizer.seen[table] = torch.zeros(len(table), dtype=torch.bool, device=device)
            optimizer.seen[table][np.concatenate([s.ids for s in sequences])] = True
        return measure_updates(task_model, [sample], optimizer, training, progress)


def steps_per_epoch(data: LabelledData, settings: FinetuneConfig) -> float:
    """Return the steps of an epoch: the last one of examples is smaller; of tokens, about."""
    steps = updates_per_epoch(data, settings)
    return math.ceil(steps) if isinstance(settings.batch, ExampleBudget) else steps
