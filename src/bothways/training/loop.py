"""The only training loop, and its counterpart without gradients.

A loss is a sum. The weight of one step, over all microbatches and ranks, is known before any
computation, so each microbatch's backward pass is of its part of one mean: how a step is cut into
microbatches and ranks does not change the update.

A loss that compares the vectors of all texts of a step (`VectorStep`) is exact, in the memory of a
microbatch, by GradCache (Gao et al. 2021): the vectors are computed without a graph; their loss
gives a gradient for each; then each microbatch is computed again, with its graph, and the sum of
vectors times gradients is what goes backward. Dropout draws the same in both passes. On several
ranks each one has the vectors of all, computes the loss of the whole step, and goes backward
through its own vectors: summed over ranks, that is the gradient of one process.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence as Many
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bothways.core.batch import Batch
from bothways.core.errors import DivergedError
from bothways.core.runtime.devices import Precision, device_of, resolve_precision
from bothways.core.runtime.process import tune_allocator
from bothways.core.source import TrainingStep
from bothways.core.training_module import Loss, TrainingModule, VectorModule, evaluating
from bothways.training.cuda_graph import GraphedUpdates
from bothways.training.meter import EvaluationScores, Meter, StepReport, Watchdog
from bothways.training.optimizers import set_rate, update
from bothways.training.parallel import (
    Plan,
    all_gather,
    exchanging,
    is_main,
    replicate,
    sum_over_ranks,
)
from bothways.training.saved_state import RunTensors
from bothways.training.schedules import Duration, RunState

_CLOCK, _STOP = "(clock)", "(stop)"


@dataclass(frozen=True)
class Loop:
    """The training loop of a run.

    Attributes:
        tensors: the training module, on its device, its optimizer, and the ranks.
        rate: the state before a step → the multiple of the peak learning rate.
        on_step: called after each step; True asks all ranks to stop before the next one. Reading
            the meter reduces over ranks, so all ranks must read at the same steps.
        on_rest: called at the end with the report of the last steps, if `on_step` has not read it.
        clip_norm: the highest global gradient norm; None for no clipping.
        step_limit: seconds after which a step is taken for a hang (`meter.Watchdog`).
        graphs: whether updates are captured as CUDA graphs (`cuda_graph`).
    """

    tensors: RunTensors
    rate: Callable[[RunState], float]
    on_step: Callable[[RunState, Meter], bool] = lambda state, meter: False
    on_rest: Callable[[StepReport], object] = lambda report: None
    precision: Precision = "auto"
    clip_norm: float | None = 1.0
    step_limit: float | None = None
    graphs: bool = False

    def train(self, steps: Iterable[TrainingStep], until: Duration, state: RunState) -> RunState:
        """Train until a duration is over, the steps end, or a rank asks to stop.

        Args:
            steps: from `state.cursor` on; equally many on each rank.
            state: of the run; `RunState()` at its start.

        Returns:
            The state after the last step.

        Raises:
            DivergedError: a loss or a gradient is not finite; such a gradient changes nothing.
            ConfigError: this device lacks the precision, or an update cannot be captured.
        """
        tune_allocator()
        training_module, plan = self.tensors.training_module, self.tensors.plan
        model = replicate(training_module, plan)
        meter, clock, stop = Meter(plan), clock_from(state.seconds), False
        arithmetic = arithmetic_of(self.precision, device_of(training_module))
        graphed = GraphedUpdates(self.tensors, arithmetic, self.clip_norm) if self.graphs else None
        training_module.train()
        with Watchdog(plan, self.step_limit) as watchdog:
            watchdog.note("reading its batch", state.steps + 1)
            begin = time.perf_counter()
            for step in steps:
                weights = [training_module.weights(batch) for batch in step.microbatches]
                work_seconds = time.perf_counter() - begin
                watchdog.note("waiting for the other ranks", state.steps + 1)
                # All microbatches have the same losses.
                sums = {name: sum(weight[name] for weight in weights) for name in weights[0]}
                seconds = clock() if is_main(plan) else 0.0
                agreed = sum_over_ranks(plan, {**sums, _STOP: stop, _CLOCK: seconds})
                state = dataclasses.replace(state, seconds=agreed[_CLOCK])
                if agreed[_STOP] or state.share(until) >= 1:
                    break
                rate = set_rate(self.tensors.optimizer, self.rate(state))
                begin = time.perf_counter()
                watchdog.note("computing", state.steps + 1)
                captured = None
                if graphed is not None:
                    shares = loss_factors(weights[0], agreed, training_module.coefficients)
                    captured = graphed(step.microbatches, shares)
                if captured is None:
                    note = functools.partial(watchdog.note, step=state.steps + 1)
                    computed = self._accumulate(model, step, weights, agreed, meter, note)
                    work_seconds += computed - begin
                    with arithmetic:  # the matrix products of Muon
                        norm = update(self.tensors.optimizer, self.clip_norm)
                else:
                    losses, norm = captured
                    meter.add(weights[0], losses)
                    work_seconds += time.perf_counter() - begin
                # A process alone counts what the step asks for, without what pads its batch.
                tokens = sum(batch.layout.tokens for batch in step.microbatches)
                tokens = step.tokens if plan.world == 1 else tokens
                state = state.after(step)
                meter.close(state, norm, rate, work_seconds, tokens)
                watchdog.note("resting", state.steps)
                stop = self.on_step(state, meter)
                watchdog.note("reading its batch", state.steps + 1)
                begin = time.perf_counter()
        if meter.pending:
            self.on_rest(meter.read())
        return state

    def _accumulate(
        self,
        model: nn.Module,
        step: TrainingStep,
        weights: Many[Mapping[str, float]],
        agreed: Mapping[str, float],
        meter: Meter,
        note: Callable[[str], None],
    ) -> float:
        """Add up the gradients of a step; return the clock before they are exchanged.

        Args:
            model: the training module, or torch's replica of it.
            weights: the weight of each loss, by microbatch; `agreed` over the step and all ranks.
        """
        training_module, plan = self.tensors.training_module, self.tensors.plan
        device, compared = device_of(training_module), None
        arithmetic = arithmetic_of(self.precision, device)
        if isinstance(training_module, VectorModule):
            compared = VectorStep(
                model, training_module, step.microbatches, weights, agreed, plan, arithmetic
            )
        computed = 0.0
        for number, (batch, weight) in enumerate(zip(step.microbatches, weights, strict=True), 1):
            note("computing")
            is_last = number == len(weights)
            with exchanging(model, enabled=is_last):
                if compared is not None:
                    loss, losses = compared(number - 1)
                else:
                    with arithmetic:
                        losses = model(batch.to(device))
                    loss = weighted_sum(losses, agreed, training_module.coefficients)
                if is_last:
                    computed = time.perf_counter()
                    note("exchanging gradients")
                # The ranks' gradients are averaged: times `world` makes them a sum.
                torch.autograd.backward(loss * plan.world)
            meter.add(weight, losses)
        return computed


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
        DivergedError: a loss is not finite.
    """
    device, meter = device_of(training_module), Meter(plan)
    arithmetic = arithmetic_of(precision, device)
    with evaluating(training_module):
        for step in steps:
            for batch in step.microbatches:
                with arithmetic:
                    losses = training_module(batch.to(device))
                meter.add(training_module.weights(batch), losses)
    scores = meter.scores()
    for name, loss in scores.losses.items():
        if not math.isfinite(loss):
            raise DivergedError(
                f"the loss {name!r} of an evaluation is not finite",
                fix="Set the precision to fp32.",
            )
    return scores


def weighted_sum(
    losses: Mapping[str, Loss], weights: Mapping[str, float], coefficients: Mapping[str, float]
) -> Tensor:
    """Return this microbatch's part of Σ coefficient · total / weight of the step."""
    shares = loss_factors(losses, weights, coefficients)
    return torch.stack([loss.total * shares[name] for name, loss in losses.items()]).sum()


def loss_factors(
    names: Iterable[str], weights: Mapping[str, float], coefficients: Mapping[str, float]
) -> dict[str, float]:
    """Return coefficient / weight of the step, by loss.

    A loss without any weight in the step is 0/1, and its parameters still get a gradient of 0.
    """
    return {name: coefficients.get(name, 1.0) / (weights[name] or 1.0) for name in names}


def clock_from(elapsed: float) -> Callable[[], float]:
    """Return a clock that counts on from the seconds of earlier sessions."""
    start = time.perf_counter() - elapsed
    return lambda: time.perf_counter() - start


def arithmetic_of(precision: Precision, device: torch.device) -> torch.autocast:
    """Return the context of matrix products in a precision; of weights in float64, in float64."""
    if precision == "auto" and torch.get_default_dtype() is torch.float64:
        precision = "fp32"  # autocast makes no bf16 of float64, and does not multiply the two
    dtype = resolve_precision(precision, device)
    return torch.autocast(device.type, dtype, enabled=dtype is not torch.float32)


class VectorStep:
    """The forward passes of one step; called once for each microbatch, in order.

    Args:
        model: what computes the vectors: `module`, or torch's replica of it.
        module: the model with its loss.
        microbatches: the batches of this rank.
        weights: the weights of each batch, and `total` the sums over the step and all ranks.
        arithmetic: the context of the model's precision.
    """

    def __init__(
        self,
        model: nn.Module,
        module: VectorModule,
        microbatches: Many[Batch],
        weights: Many[Mapping[str, float]],
        total: Mapping[str, float],
        plan: Plan,
        arithmetic: AbstractContextManager[Any],
    ) -> None:
        self._model, self._module, self._weights, self._total = model, module, weights, total
        self._microbatches, self._plan, self._arithmetic = microbatches, plan, arithmetic
        self._device = device_of(module)
        self._states = list[tuple[Tensor, Tensor | None]]()
        if len(microbatches) == 1:  # one pass is enough
            return
        vectors = list[Tensor]()
        with torch.no_grad(), arithmetic:
            for batch in microbatches:
                # The state of the generators that dropout draws from.
                on_device = (
                    torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
                )
                self._states.append((torch.get_rng_state(), on_device))
                vectors.append(module(batch.to(self._device)).float())
        self._gradients, self._losses = self._compared(vectors)

    def __call__(self, index: int) -> tuple[Tensor, Mapping[str, Loss]]:
        """Return the tensor to go backward from, and the batch's share of the losses."""
        if self._states:
            state = self._states[index]
            torch.set_rng_state(state[0])
            if state[1] is not None:
                torch.cuda.set_rng_state(state[1], self._device)
        with self._arithmetic:
            vectors = self._model(self._microbatches[index].to(self._device)).float()
        if not self._states:
            self._gradients, self._losses = self._compared([vectors.detach()])
        losses = {
            name: Loss(total * (self._weights[index][name] / (self._total[name] or 1.0)))
            for name, total in self._losses.items()
        }
        return (vectors * self._gradients[index]).sum(), losses

    def _compared(self, vectors: Many[Tensor]) -> tuple[Many[Tensor], Mapping[str, Tensor]]:
        """Return the gradient of each batch's vectors, and the losses of the step."""
        local = torch.cat([*vectors])
        values = [*map(self._module.text_values, self._microbatches)]
        fields = {name: torch.cat([batch[name] for batch in values]) for name in values[0]}
        start, gathered = gather_rows(self._plan, local)
        texts = {name: gather_rows(self._plan, rows)[1] for name, rows in fields.items()}
        gathered.requires_grad_()
        with torch.enable_grad(), torch.autocast(self._device.type, enabled=False):
            losses = self._module.compare(gathered, texts)
            terms = [
                loss * (self._module.coefficients.get(name, 1.0) / (self._total[name] or 1.0))
                for name, loss in losses.items()
            ]
            (gradient,) = torch.autograd.grad(torch.stack(terms).sum(), gathered)
        local_gradient = gradient[start : start + len(local)]
        return local_gradient.split([len(rows) for rows in vectors]), losses


def gather_rows(plan: Plan, rows: Tensor) -> tuple[int, Tensor]:
    """Return the rows of all ranks in their order, and how many stand before this rank's."""
    if plan.world == 1:
        return 0, rows.clone()
    counts = all_gather(plan, torch.tensor([len(rows)]))[:, 0].tolist()
    # `all_gather` needs one shape on all ranks: shorter ranks are padded.
    padded = rows.new_zeros((max(counts), *rows.shape[1:]), device="cpu")
    padded[: len(rows)] = rows.cpu()
    gathered = all_gather(plan, padded)
    joined = [part[:count] for part, count in zip(gathered, counts, strict=True)]
    return sum(counts[: plan.rank]), torch.cat(joined).to(rows.device)
