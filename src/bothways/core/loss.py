"""A loss is a sum, never a mean.

A mean of means depends on how a batch was split. Sums do not: one step's microbatches and ranks are divided by the one weight
of the whole step, so accumulation, batch split and number of ranks leave the update as it is. The weight is known from the
targets alone (`Learner.weights`), on the CPU, before anything is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Loss:
    """Attributes:
    total: the sum of the per-target losses, in nats; part of the graph.
    hits: how many of them were predicted right; none for a regression.
    """

    total: Float[Tensor, ""]
    hits: Int[Tensor, ""] | None = None
