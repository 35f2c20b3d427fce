"""The module that a run trains, from a batch to named losses.

A loss is a sum, never a mean. A mean of means depends on how a batch was split; sums do not. The
sums of all microbatches and ranks of a step are divided by the weight of the whole step, so that
accumulation, batch split and number of ranks do not change the update. The weight follows from the
targets alone (`TrainingModule.weights`), on the CPU, before the forward pass.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

from jaxtyping import Float, Int
from torch import Tensor, nn

from bothways.core.batch import Batch

ModuleT = TypeVar("ModuleT", bound="TrainingModule")


@dataclass(frozen=True)
class Loss:
    """The loss of a batch.

    Attributes:
        total: the sum of the per-target losses, in nats, with its graph.
        hits: the number of correct predictions; None for a regression.
        counts: further numbers of targets, by name; `Objective.metrics` reads their shares.
    """

    total: Float[Tensor, ""]
    hits: Int[Tensor, ""] | None = None
    counts: Mapping[str, Int[Tensor, ""]] = field(default_factory=dict)


def perplexity(loss: float) -> float:
    """Return exp(loss) of a mean loss in nats, at most e⁷⁰⁰, as higher ones overflow."""
    return math.exp(min(loss, 700.0))


def hidden_matrices(module: nn.Module) -> dict[str, int]:
    """Return the hidden matrices by parameter name, and how many matrices each one stacks.

    Submodules declare theirs in an attribute of this name, such as {"qkv.weight": 3}.
    """
    return {
        f"{name}.{matrix_name}".removeprefix("."): count
        for name, submodule in module.named_modules()
        for matrix_name, count in getattr(submodule, "hidden_matrices", {}).items()
    }


class TrainingModule(nn.Module):
    """A model that knows its losses. Subclasses define `weights` and `forward`.

    Attributes:
        coefficients: the factor of each loss in the objective, 1 where none is given. The loop
            multiplies by it; meters, logs and evaluations show the bare losses.
        predicts: the losses that predict tokens; the perplexity is exp of their mean.
    """

    coefficients: Mapping[str, float] = MappingProxyType({})
    predicts: tuple[str, ...] = ()

    @property
    def partial(self) -> bool:
        """True if a batch may leave parameters without a gradient: a submodule is `partial`."""
        return any(getattr(module, "partial", False) for module in [*self.modules()][1:])

    @property
    def allows_padding(self) -> bool:
        """True if `core.batch.pad_batch` changes none of its losses."""
        return False

    def is_static(self, batch: Batch) -> bool:
        """Return True if it computes all batches of one shape alike, whatever they hold."""
        return False

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the weight of each loss on a CPU batch, known before any computation."""
        raise NotImplementedError

    def forward(self, batch: Batch) -> Mapping[str, Loss]:
        """Return the losses by name; the same names as `weights`."""
        raise NotImplementedError

    def saved(self) -> Mapping[str, nn.Module]:
        """Return the models that become model folders, by role; "model" is the run's result."""
        return {}

    def frozen(self) -> tuple[str, ...]:
        """Return the prefixes of frozen parts, such as ("teacher.",).

        They are in no optimizer, no checkpoint and no gradient exchange, and stay in evaluation
        mode; a resumed run builds them again.
        """
        return ()

    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the named parameters that are not frozen."""
        frozen = self.frozen()
        return (
            (name, parameter)
            for name, parameter in self.named_parameters()
            if not name.startswith(frozen)
        )

    def trained_state(self) -> dict[str, Tensor]:
        """Return the state that a checkpoint keeps, by name."""
        frozen = self.frozen()
        return {
            name: tensor
            for name, tensor in self.state_dict().items()
            if not name.startswith(frozen)
        }

    def train(self: ModuleT, mode: bool = True) -> ModuleT:
        """Set the mode; frozen parts stay in evaluation mode."""
        super().train(mode)
        if frozen := self.frozen():
            for name, module in self.named_modules():
                if f"{name}.".startswith(frozen):
                    module.training = False
        return self


class VectorModule(TrainingModule):
    """A model whose loss compares the vectors of all sequences of a step, over all ranks.

    `forward(batch)` returns a row for each sequence; `training.loop` does the rest.
    """

    def text_values(self, batch: Batch) -> Mapping[str, Tensor]:
        """Return the targets of the loss on a CPU batch: tensors with a row for each sequence."""
        raise NotImplementedError

    def compare(
        self, vectors: Float[Tensor, "texts width"], values: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Return the sum of each loss over a step; the same names as `weights`."""
        raise NotImplementedError


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode, without dropout; restore its mode at the end."""
    mode = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(mode)
