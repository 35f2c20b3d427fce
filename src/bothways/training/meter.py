"""The meter: losses, accuracies and the gradient norm of the steps since the last reading.

Adding does not wait for the device: sums stay there, as does the number of the first step with a
value that is not finite. Reading fetches and reduces them over ranks, only when a record is due.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from bothways.core.errors import DivergedError
from bothways.core.loss import Loss
from bothways.training.pace import Pace
from bothways.training.parallel import Plan, all_gather
from bothways.training.state import RunState


@dataclass(frozen=True)
class EvaluationScores:
    """The results of an evaluation, or of some steps.

    Attributes:
        losses: mean per target by name, in nats; none of weight 0.
        accuracies: share of targets predicted right, for the losses that count hits.
        rates: further shares of targets, by "LOSS/COUNT" (`Loss.counts`).
    """

    losses: Mapping[str, float] = field(default_factory=dict)
    accuracies: Mapping[str, float] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepReport:
    """What is reported of the steps since the last report.

    Attributes:
        progress: after the last step.
        scores: over the steps since the last report, on all ranks.
        gradient_norm: of the last step, before clipping.
        rate: the learning rate of the last step; the highest, if groups differ.
        pace: the work of each rank (`pace.Pace`); empty for one process.
    """

    progress: RunState
    scores: EvaluationScores
    gradient_norm: float
    rate: float
    pace: Mapping[str, float] = field(default_factory=dict)


class Meter:
    """Sums over microbatches and steps. All ranks read at the same step.

    Attributes:
        pace: the time and the tokens of this rank.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self.pace = plan, Pace(plan)
        self._clear()

    def _clear(self) -> None:
        self._sums: Float[Tensor, "names 2"] | None = None
        self._counts: dict[tuple[str, str], Tensor] = {}
        self._weights: dict[str, float] = {}
        self._broken: Tensor | None = None

    @property
    def pending(self) -> bool:
        """True if a step was added since the last reading."""
        return self._broken is not None

    def add(self, weights: Mapping[str, float], losses: Mapping[str, Loss]) -> None:
        """Add one microbatch of this rank: its losses with their weights."""
        sums = torch.stack([_sums(losses[name]) for name in sorted(weights)])
        self._sums = sums if self._sums is None else self._sums + sums
        for name in weights:
            for kind, count in losses[name].counts.items():
                self._counts[name, kind] = self._counts.get((name, kind), 0) + count.double()
        self._weights = {
            name: self._weights.get(name, 0.0) + weight for name, weight in weights.items()
        }

    def close(self, progress: RunState, norm: Float[Tensor, ""], rate: float) -> None:
        """End a step: the progress after it, its gradient norm on the device, its learning rate."""
        assert self._sums is not None, "a step has at least one microbatch"
        values = torch.cat([self._sums[:, 0], norm.detach().double()[None]])
        broken = torch.full_like(values, math.inf) if self._broken is None else self._broken
        # Sums that were not finite once stay so: the smallest step is the first.
        self._broken = torch.where(values.isfinite(), broken, broken.clamp(max=progress.steps))
        self._progress, self._norm, self._rate = progress, norm.detach(), rate

    def read(self) -> StepReport:
        """Return the report of what was added since the last reading, and start again.

        Raises:
            DivergedError: a loss or the gradient norm was not finite; says which, at what step and
                on which rank.
        """
        assert self._broken is not None, "a step was added since the last reading"
        _check([*sorted(self._weights), None], all_gather(self._plan, self._broken.cpu()).tolist())
        progress, norm, rate = self._progress, self._norm.item(), self._rate
        return StepReport(progress, self.scores(), norm, rate, self.pace.read())

    def scores(self) -> EvaluationScores:
        """Return mean losses and accuracies since the last reading, and start again."""
        if self._sums is None:
            return EvaluationScores()
        names = sorted(self._weights)
        weights = torch.tensor([self._weights[name] for name in names], dtype=torch.float64)
        counted = sorted(self._counts)
        counts = [self._counts[key].cpu()[None] for key in counted]
        local = torch.cat([self._sums.cpu().flatten(), weights, *counts])
        sums = all_gather(self._plan, local).sum(0).tolist()
        self._clear()
        rows = zip(
            names,
            sums[0 : 2 * len(names) : 2],
            sums[1 : 2 * len(names) : 2],
            sums[2 * len(names) : 3 * len(names)],
            strict=True,
        )
        weighted = [row for row in rows if row[3]]
        losses = {name: loss / weight for name, loss, _, weight in weighted}
        accuracies = {
            name: hits / weight for name, _, hits, weight in weighted if not math.isnan(hits)
        }
        totals = {name: weight for name, _, _, weight in weighted}
        rates = {
            f"{name}/{kind}": count / totals[name]
            for (name, kind), count in zip(counted, sums[3 * len(names) :], strict=True)
            if name in totals
        }
        return EvaluationScores(losses, accuracies, rates)


def _sums(loss: Loss) -> Float[Tensor, " sums"]:
    """Return total and hits; NaN for the hits of a loss that has none."""
    loss_total = loss.total.detach().double()
    hits = (
        torch.full_like(loss_total, math.nan) if loss.hits is None else loss.hits.detach().double()
    )
    return torch.stack([loss_total, hits])


def _check(names: list[str | None], ranks: list[list[float]]) -> None:
    """Raise DivergedError, given for each rank the step at which each value first was not finite.

    The gradient norm, which is that of all ranks, comes last: a loss is nearer to the cause.
    """
    step = min(min(row) for row in ranks)
    if not math.isfinite(step):
        return
    index, rank = min(
        (index, rank) for rank, row in enumerate(ranks) for index, s in enumerate(row) if s == step
    )
    of_rank = f" on rank {rank}" if len(ranks) > 1 and names[index] is not None else ""
    value = "gradient norm" if names[index] is None else f"loss {names[index]!r}"
    raise DivergedError(
        f"the {value} is not finite{of_rank}",
        where=f"step {int(step)}",
        fix="Lower the learning rate, lengthen the warm-up or set the precision to fp32; "
        "resume from the last checkpoint.",
    )
