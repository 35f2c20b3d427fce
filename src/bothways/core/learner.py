"""The protocols between the parts: what a model is to a trainer, and what data is to a loader."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import numpy as np
from torch import nn

from bothways.core.batch import Batch
from bothways.core.loss import Loss
from bothways.core.sequence import Sequence


class Learner(nn.Module):
    """A model that knows its losses. Subclasses define `prepare`, `weights` and `forward`."""

    @property
    def partial(self) -> bool:
        """Whether a batch may leave some parameters without a gradient: a module with such parameters has a true `partial`."""
        return any(getattr(part, "partial", False) for part in [*self.modules()][1:])

    def prepare(self, sequence: Sequence, rng: np.random.Generator) -> Sequence:
        """The sequence as this learner wants it (masked, say), with targets. CPU only, pure: equal draws give equal results."""
        raise NotImplementedError

    def weights(self, batch: Batch) -> dict[str, float]:
        """How much each loss sums up on this batch, on the CPU: its targets or their weights, known before any computation."""
        raise NotImplementedError

    def forward(self, batch: Batch) -> Mapping[str, Loss]:
        """The losses by name; the same names as `weights`."""
        raise NotImplementedError


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """While it is open the module is in evaluation mode, without dropout; then in the mode that it had."""
    mode = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(mode)
