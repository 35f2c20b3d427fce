"""A loss is a sum, never a mean.

A mean of means depends on how a batch was split; sums do not. The sums of all microbatches and
ranks of a step are divided by the weight of the whole step, so that accumulation, batch split and
number of ranks do not change the update. The weight follows from the targets alone
(`TrainingModule.weights`), on the CPU, before the forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxtyping import Float, Int
from torch import Tensor


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
