"""Whole updates as CUDA graphs: the kernels of a step start without Python between them.

A step of BERT-base with 2,048 tokens has some 800 kernels. They take 7 ms on an H200, and starting
them one by one takes 34. A graph is captured for batches of one shape, which `core.batch.pad_batch`
makes recur; inputs, rates and weights of the losses are written into its memory before each replay.

The first step of a shape runs as usual: it makes the state of the optimizer, and compiles what is
compiled. Nothing that is captured may depend on the host: attention reads the borders of packed
sequences on the GPU, and the optimizer its rates.

Source: PyTorch's documentation, "CUDA semantics", section "CUDA Graphs".
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence as Many
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bothways.core.batch import Batch
from bothways.core.errors import ConfigError
from bothways.core.runtime.devices import device_of
from bothways.core.training_module import Loss
from bothways.training.optimizers import FusedAdamW, update
from bothways.training.saved_state import RunTensors

KEPT = 16
"""Graphs that are kept."""


@dataclass(frozen=True)
class CapturedUpdate:
    """A captured update.

    Attributes:
        batch: its input, on the GPU.
        shares: the factor of each loss in the sum that goes backward.
        losses, norm: what it computes.
    """

    graph: torch.cuda.CUDAGraph
    batch: Batch
    shares: Mapping[str, Tensor]
    losses: Mapping[str, Loss]
    norm: Tensor


class GraphedUpdates:
    """The updates of a run, each shape of a batch captured at its second use.

    Args:
        arithmetic: the context of the run's precision.
        clip_norm: as in `optimizers.update`.

    Raises:
        ConfigError: this run's updates cannot be captured.
    """

    def __init__(
        self,
        tensors: RunTensors,
        arithmetic: AbstractContextManager[Any],
        clip_norm: float | None,
    ) -> None:
        module, optimizer = tensors.training_module, tensors.optimizer
        _require(device_of(module).type == "cuda" and torch.version.hip is None, "an NVIDIA GPU")
        _require(tensors.plan.world == 1, "one process")
        _require(module.allows_padding, "an objective of masked LM or of it with pairs")
        plain = isinstance(optimizer, FusedAdamW) and all(
            group["update"] == "adamw" and not group["pull"] for group in optimizer.param_groups
        )
        _require(plain, "Adam as the optimizer of all parameters")
        self._module, self._optimizer = module, optimizer
        self._arithmetic, self._clip_norm = arithmetic, clip_norm
        self._device = device_of(module)
        # One memory for all: a graph needs its activations and gradients only while it runs.
        self._pool = torch.cuda.graph_pool_handle()
        self._captured = OrderedDict[tuple[int, ...], CapturedUpdate | None]()
        # The rate of each group, as the fused kernel reads it on the GPU.
        self._rates = [torch.zeros((), device=self._device) for _ in optimizer.param_groups]

    def __call__(
        self, microbatches: Many[Batch], shares: Mapping[str, float]
    ) -> tuple[Mapping[str, Loss], Tensor] | None:
        """Make an update; return its losses and the norm of the gradient, valid until the next one.

        None for the first batch of a shape: the caller makes the update.

        Args:
            microbatches: of the step, on the CPU, in pinned memory.
            shares: the factor of each loss in the sum that goes backward.

        Raises:
            ConfigError: there are several, or a layer has no kernel for packed sequences.
        """
        _require(len(microbatches) == 1, "one microbatch an update: a higher microbatch_tokens")
        (batch,) = microbatches
        key = batch.layout.max_seqlen, *map(len, batch.tensors())
        if key not in self._captured:
            with self._arithmetic:
                packed = self._module.is_static(batch.to(self._device))
            _require(packed, "bf16, and attention over packed sequences in all layers")
            if len(self._captured) == KEPT:
                self._captured.popitem(last=False)
            self._captured[key] = None
            return None
        captured = self._captured[key] or self._capture(batch.to(self._device), shares)
        self._captured[key] = captured
        self._captured.move_to_end(key)
        for here, there in zip(batch.tensors(), captured.batch.tensors(), strict=True):
            there.copy_(here, non_blocking=True)
        for name, share in captured.shares.items():
            share.fill_(shares[name])
        for rate, group in zip(self._rates, self._optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        captured.graph.replay()
        return captured.losses, captured.norm

    def _capture(self, batch: Batch, shares: Mapping[str, float]) -> CapturedUpdate:
        """Capture an update; nothing is computed yet."""
        graph, groups = torch.cuda.CUDAGraph(), self._optimizer.param_groups
        factors = {name: torch.zeros((), device=self._device) for name in shares}
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, self._rates, strict=True):
            group |= {"lr": rate, "capturable": True}
        try:
            # Other threads copy into pinned memory meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                with self._arithmetic:
                    losses = self._module(batch)
                terms = [loss.total * factors[name] for name, loss in losses.items()]
                torch.stack(terms).sum().backward()
                norm = update(self._optimizer, self._clip_norm)
        finally:
            for group, lr in zip(groups, rates, strict=True):
                group |= {"lr": lr, "capturable": False}
        detached = {
            name: Loss(loss.total.detach(), loss.hits, loss.counts) for name, loss in losses.items()
        }
        return CapturedUpdate(graph, batch, factors, detached, norm)


def _require(condition: bool, requirement: str) -> None:
    if not condition:
        fix = "Leave training.graphs out: then kernels are started one by one."
        raise ConfigError(f"needs {requirement}", where="training.graphs", fix=fix)
