"""Steps whose loss compares the vectors of all their texts: exact, in the memory of a microbatch.

GradCache (Gao et al. 2021): the vectors of a step are computed without a graph; the loss of all of
them gives a gradient for each; then each microbatch is computed again, with its graph, and the sum
of vectors times gradients is what goes backward. Dropout draws the same in both passes.

On several ranks each one has the vectors of all, computes the loss of the whole step, and goes
backward through its own vectors: summed over ranks, that is the gradient of one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Many
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from bothways.core.batch import Batch
from bothways.core.runtime.devices import device_of
from bothways.core.training_module import Loss, VectorModule
from bothways.training.parallel import Plan, all_gather

RandomState = tuple[Tensor, Tensor | None]


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
        self._states = list[RandomState]()
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
