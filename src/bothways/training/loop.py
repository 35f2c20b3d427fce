"""The only training loop, and its counterpart without gradients.

A loss is a sum. The weight of one step, over all microbatches and ranks, is known before any
computation, so each microbatch's backward pass is of its part of one mean: how a step is cut into
microbatches and ranks does not change the update.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from bothways.core.errors import BothwaysError
from bothways.core.loss import Loss
from bothways.core.runtime.allocator import tune_allocator
from bothways.core.runtime.devices import Precision, device_of, resolve_precision
from bothways.core.source import TrainingStep
from bothways.core.training_module import TrainingModule, evaluating
from bothways.training.durations import Duration
from bothways.training.meter import EvaluationScores, Meter, StepReport
from bothways.training.optimizers import set_rate, update
from bothways.training.pace import Watchdog
from bothways.training.parallel import Plan, exchanging, is_main, replicate, sum_over_ranks
from bothways.training.state import RunState

_CLOCK, _STOP = "(clock)", "(stop)"


def fit(  # noqa: PLR0913 – one independent value per question that a run answers
    training_module: TrainingModule,
    steps: Iterable[TrainingStep],
    optimizer: torch.optim.Optimizer,
    schedule: Callable[[RunState], float],
    plan: Plan,
    *,
    until: Duration,
    progress: RunState,
    on_step: Callable[[RunState, Meter], bool],
    on_rest: Callable[[StepReport], object] = lambda report: None,
    precision: Precision = "auto",
    clip_norm: float | None = 1.0,
    step_limit: float | None = None,
) -> RunState:
    """Train until a duration is over, the steps end, or a rank asks to stop.

    Args:
        training_module: the model with its losses, on its device.
        steps: from `progress.cursor` on; equally many on each rank.
        schedule: progress before a step → multiple of the peak learning rate.
        progress: the state of the run; `RunState()` at its start.
        on_step: called after each step; True asks all ranks to stop before the next one. Reading
            the meter reduces over ranks, so all ranks must read at the same steps.
        on_rest: called at the end with the report of the last steps, if `on_step` has not read it.
        clip_norm: the highest global gradient norm; None for no clipping.
        step_limit: seconds after which a step is taken for a hang (`pace.Watchdog`).

    Returns:
        The progress after the last step.

    Raises:
        BothwaysError: a loss or a gradient is not finite; such a gradient changes nothing.
        ConfigError: this device does not support the precision.
    """
    tune_allocator()
    device, model, meter = device_of(training_module), replicate(training_module, plan), Meter(plan)
    arithmetic, clock, stop = _arithmetic(precision, device), clock_from(progress.seconds), False
    training_module.train()
    with Watchdog(plan, step_limit) as watchdog:
        watchdog.note("reading its batch", progress.steps + 1)
        begin = time.perf_counter()
        for step in steps:
            weights = [training_module.weights(batch) for batch in step.microbatches]
            work_seconds = time.perf_counter() - begin
            watchdog.note("waiting for the other ranks", progress.steps + 1)
            agreed = sum_over_ranks(
                plan, {**_sum(weights), _STOP: stop, _CLOCK: clock() if is_main(plan) else 0.0}
            )
            progress = dataclasses.replace(progress, seconds=agreed[_CLOCK])
            if agreed[_STOP] or progress.share(until) >= 1:
                break
            rate = set_rate(optimizer, schedule(progress))
            begin = time.perf_counter()
            for number, batch in enumerate(step.microbatches, 1):
                watchdog.note("computing", progress.steps + 1)
                is_last, weight = number == len(weights), weights[number - 1]
                with exchanging(model, enabled=is_last):
                    with arithmetic:
                        losses = model(batch.to(device))
                    if is_last:
                        work_seconds += time.perf_counter() - begin
                        watchdog.note("exchanging gradients", progress.steps + 1)
                    # The ranks' gradients are averaged: times `world` makes them a sum.
                    share = weighted_sum(losses, agreed, training_module.coefficients) * plan.world
                    torch.autograd.backward(share)
                meter.add(weight, losses)
            meter.pace.add(work_seconds, sum(batch.layout.tokens for batch in step.microbatches))
            with arithmetic:  # the matrix products of Muon
                norm = update(optimizer, clip_norm)
            progress = progress.after(step)
            meter.close(progress, norm, rate)
            watchdog.note("resting", progress.steps)
            stop = on_step(progress, meter)
            watchdog.note("reading its batch", progress.steps + 1)
            begin = time.perf_counter()
    if meter.pending:
        on_rest(meter.read())
    return progress


@torch.no_grad()
def evaluate_losses(
    training_module: TrainingModule,
    steps: Iterable[TrainingStep],
    plan: Plan,
    *,
    precision: Precision = "auto",
) -> EvaluationScores:
    """Return mean losses and accuracies over all steps, without dropout.

    Every rank has equally many steps. The training module keeps its mode.

    Raises:
        BothwaysError: a loss is not finite.
    """
    device, meter = device_of(training_module), Meter(plan)
    arithmetic = _arithmetic(precision, device)
    with evaluating(training_module):
        for step in steps:
            for batch in step.microbatches:
                with arithmetic:
                    losses = training_module(batch.to(device))
                meter.add(training_module.weights(batch), losses)
    scores = meter.scores()
    for name, loss in scores.losses.items():
        if not math.isfinite(loss):
            raise BothwaysError(
                f"the loss {name!r} of an evaluation is not finite",
                fix="Set the precision to fp32.",
            )
    return scores


def weighted_sum(
    losses: Mapping[str, Loss], weights: Mapping[str, float], coefficients: Mapping[str, float]
) -> Tensor:
    """Return this microbatch's part of Σ coefficient · total / weight of the step."""
    # A loss without any weight in the step is 0/1, and its parameters still get a gradient of 0.
    terms = [
        loss.total * (coefficients.get(name, 1.0) / (weights[name] or 1.0))
        if name in coefficients
        else loss.total / (weights[name] or 1.0)
        for name, loss in losses.items()
    ]
    return torch.stack(terms).sum()


def _sum(weights: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the weight of each loss over a rank's microbatches."""
    result: dict[str, float] = {}
    for weight in weights:
        for name, value in weight.items():
            result[name] = result.get(name, 0.0) + value
    return result


def clock_from(elapsed: float) -> Callable[[], float]:
    """Return a clock that counts on from the seconds of earlier sessions."""
    start = time.perf_counter() - elapsed
    return lambda: time.perf_counter() - start


def _arithmetic(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    dtype = resolve_precision(precision, device)
    return (
        torch.autocast(device.type, dtype)
        if dtype is not torch.float32
        else contextlib.nullcontext()
    )
