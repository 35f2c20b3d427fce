"""What is measured of a run: losses, accuracies and the gradient norm of the steps since the last
reading, the speed of the run, and the pace of each rank.

Adding does not wait for the device: sums stay there, as does the number of the first step with a
value that is not finite. Reading fetches and reduces them over ranks, only when a record is due. A
record is a flat table of numbers, one of which is the step.

Ranks wait for each other in every step, so the time of a step says nothing about one of them. What
does is the time in which a rank is at work by itself: reading the data, and the forward passes up
to the first exchange. On a GPU, where work is queued, it is the time until the work is queued.
"""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence as Many
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from bothways.core.errors import DivergedError, argument, render
from bothways.core.training_module import Loss
from bothways.training.parallel import Plan, all_gather, lost_contact
from bothways.training.schedules import Duration, RunState

Record = Mapping[str, int | float]


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
        pace: of each rank the seconds that it has worked by itself, and the tokens that it has
            read; empty for one process.
    """

    progress: RunState
    scores: EvaluationScores
    gradient_norm: float
    rate: float
    pace: Many[Many[float]] = ()


class Meter:
    """Sums over microbatches and steps. All ranks read at the same step."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._seconds, self._tokens = 0.0, 0
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
        # Total and hits of each loss; NaN for the hits of one that counts none.
        rows = []
        for loss in (losses[name] for name in sorted(weights)):
            total = loss.total.detach().double()
            hits = torch.full_like(total, math.nan) if loss.hits is None else loss.hits.detach()
            rows.append(torch.stack([total, hits.double()]))
        sums = torch.stack(rows)
        self._sums = sums if self._sums is None else self._sums + sums
        for name in weights:
            for kind, count in losses[name].counts.items():
                self._counts[name, kind] = self._counts.get((name, kind), 0) + count.double()
        self._weights = {
            name: self._weights.get(name, 0.0) + weight for name, weight in weights.items()
        }

    def close(
        self, progress: RunState, norm: Float[Tensor, ""], rate: float, seconds: float, tokens: int
    ) -> None:
        """End a step: the progress after it, its gradient norm on the device, its learning rate,
        the seconds that this rank has worked by itself, and the tokens that it has read.
        """
        self._seconds += seconds
        self._tokens += tokens
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
        work = torch.tensor([self._seconds, self._tokens], dtype=torch.float64)
        self._seconds, self._tokens = 0.0, 0
        pace = [] if self._plan.world == 1 else all_gather(self._plan, work).tolist()
        progress, norm, rate = self._progress, self._norm.item(), self._rate
        return StepReport(progress, self.scores(), norm, rate, pace)

    def scores(self) -> EvaluationScores:
        """Return mean losses and accuracies since the last reading, and start again."""
        if self._sums is None:
            return EvaluationScores()
        names = sorted(self._weights)
        weights = torch.tensor([self._weights[name] for name in names], dtype=torch.float64)
        counted = sorted(self._counts)
        counts = [self._counts[key].cpu()[None] for key in counted]
        local = torch.cat([self._sums.cpu().T.flatten(), weights, *counts])
        sums = all_gather(self._plan, local).sum(0).split([len(names)] * 3 + [len(counted)])
        self._clear()
        total, hits, weight = (dict(zip(names, row.tolist(), strict=True)) for row in sums[:3])
        weighted = [name for name in names if weight[name]]
        losses = {name: total[name] / weight[name] for name in weighted}
        accuracies = {
            name: hits[name] / weight[name] for name in weighted if not math.isnan(hits[name])
        }
        rates = {
            f"{name}/{kind}": count / weight[name]
            for (name, kind), count in zip(counted, sums[3].tolist(), strict=True)
            if weight[name]
        }
        return EvaluationScores(losses, accuracies, rates)


def _check(names: list[str | None], ranks: list[list[float]]) -> None:
    """Raise DivergedError, given for each rank the step at which each value first was not finite.

    The gradient norm, which is that of all ranks, comes last: a loss is nearer to the cause.
    """
    step = min(min(row) for row in ranks)
    if not math.isfinite(step):
        return
    # Of values that fail in the same step the first by name order, then the lowest rank.
    index, rank = min(
        (index, rank) for rank, row in enumerate(ranks) for index, s in enumerate(row) if s == step
    )
    of_rank = f" on rank {rank}" if len(ranks) > 1 and names[index] is not None else ""
    value = "gradient norm" if names[index] is None else f"loss {names[index]!r}"
    fix = "Lower the learning rate, lengthen the warm-up or set the precision to fp32, in another "
    fix += "folder: a resumed run keeps its settings, and so repeats its steps."
    raise DivergedError(f"the {value} is not finite{of_rank}", where=f"step {int(step)}", fix=fix)


def report_values(report: StepReport) -> dict[str, int | float]:
    """Return a report as a flat table, with keys such as "step" and "loss/NAME"."""
    return {
        **progress_values(report.progress),
        **score_values(report.scores),
        "gradient_norm": report.gradient_norm,
        "learning_rate": report.rate,
        **{f"rank/{rank}/seconds": seconds for rank, (seconds, _) in enumerate(report.pace)},
        **{f"rank/{rank}/tokens": tokens for rank, (_, tokens) in enumerate(report.pace)},
    }


def progress_values(progress: RunState) -> dict[str, int | float]:
    """Return the place of a record in the run."""
    return {
        "step": progress.steps,
        "tokens": progress.tokens,
        "epochs": progress.epochs,
        "seconds": progress.seconds,
    }


def score_values(scores: EvaluationScores, prefix: str = "") -> dict[str, float]:
    """Return scores as a flat table: "PREFIXloss/NAME" and "PREFIXaccuracy/NAME"."""
    losses = {f"{prefix}loss/{name}": value for name, value in scores.losses.items()}
    return losses | {f"{prefix}accuracy/{name}": value for name, value in scores.accuracies.items()}


def record_text(record: Record) -> str:
    """Return a record in words: the step, losses with accuracies, other metrics, speed.

    Metrics of single classes, such as "dev/f1/person", are in the file alone.
    """
    metrics = {
        name: value
        for name, value in record.items()
        if name not in _FORMS
        and name not in _NOT_SHOWN
        and (name.count("/") < 2 or "loss/" in name or "accuracy/" in name)
    }
    texts = [f"step {record['step']:,.0f}"]
    for name, value in metrics.items():
        accuracy = metrics.get(name.replace("loss/", "accuracy/"))
        if "loss/" in name:
            suffix = "" if accuracy is None else f" ({accuracy:.1%} right)"
            texts.append(f"{name.replace('loss/', '')} {value:.3f}{suffix}")
        elif "accuracy/" not in name or name.replace("accuracy/", "loss/") not in metrics:
            texts.append(f"{name} {value:.3f}")
    texts += [form(record[name]) for name, form in _FORMS.items() if name in record]
    return " · ".join(texts)


_NOT_SHOWN = {"step", "tokens", "epochs", "seconds", "seconds_left", "share", "gemm_share"}
_FORMS: dict[str, Callable[[float], str]] = {
    "learning_rate": lambda value: f"rate {value:.2e}",
    "gradient_norm": lambda value: f"gradient {value:.2f}",
    "tokens_per_second": lambda value: f"{value:,.0f} tokens/s",
}


class Speed:
    """Measures tokens a second and the time left over a sliding window, with evaluation and saving.

    Args:
        run: the duration of the whole run.
        peak: the highest possible speed, in tokens a second; None for no comparison.
        window: in seconds.
    """

    def __init__(self, run: Duration, peak: float | None = None, window: float = 60.0) -> None:
        self._run, self._peak, self._window = run, peak, window
        self._marks: deque[tuple[float, int, float]] = deque()

    def mark(self, progress: RunState) -> dict[str, float]:
        """Return "share" and, from the second call on, "tokens_per_second" and "seconds_left"."""
        self._marks.append((time.perf_counter(), progress.tokens, progress.share(self._run)))
        # The speed is measured over a window of time; two marks are kept however old they are.
        while len(self._marks) > 2 and self._marks[-1][0] - self._marks[0][0] > self._window:
            self._marks.popleft()
        (start, tokens, share), (end, tokens_now, share_now) = self._marks[0], self._marks[-1]
        result = {"share": share_now}
        if share_now > share:
            speed = (tokens_now - tokens) / (end - start)
            result["tokens_per_second"] = speed
            if self._peak:
                result["gemm_share"] = speed / self._peak
            result["seconds_left"] = max(0.0, 1 - share_now) * (end - start) / (share_now - share)
        return result


SLOW = 1.5
"""A rank is a straggler from this multiple of the median time on."""
ENDED_BY_WATCHDOG = 75
"""Exit status of a process that the watchdog ends (EX_TEMPFAIL of sysexits.h)."""

Doing = Literal[
    "reading its batch",
    "waiting for the other ranks",
    "computing",
    "exchanging gradients",
    "resting",
]
"""What a rank does in a step; "resting" is evaluation and saving, which no limit is for."""


def stragglers(times: Many[float]) -> dict[int, float]:
    """Return the ranks that take much longer than the median, with the multiple of it."""
    # The lower one of two: of two ranks, the slow one must not be the measure.
    median = sorted(times)[(len(times) - 1) // 2] if times else 0.0
    return {
        rank: seconds / median
        for rank, seconds in enumerate(times)
        if median and seconds > SLOW * median
    }


class Watchdog:
    """Ends the process when a step takes too long, and says who waits for whom.

    A rank that hangs makes all others wait. Each one then reports what it was doing: the one that
    did not wait is the cause. torchrun starts all of them again.

    Args:
        limit: in seconds; None for no limit.
    """

    def __init__(self, plan: Plan, limit: float | None) -> None:
        self._plan, self._limit = plan, limit
        self._now: tuple[Doing, int, float] = ("resting", 0, time.monotonic())
        self._over = threading.Event()

    def note(self, doing: Doing, step: int) -> None:
        """Note what is done, for which step."""
        self._now = doing, step, time.monotonic()

    def __enter__(self) -> Watchdog:
        if self._limit is not None:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._over.set()
        prefix = f"step {self._now[1]}: "
        if error is not None and (lost := lost_contact(self._plan, error, prefix)):
            raise lost from error

    def _watch(self) -> None:
        assert self._limit is not None
        while not self._over.wait(min(1.0, self._limit / 4)):
            doing, step, since = self._now
            if doing != "resting" and time.monotonic() - since > self._limit:
                message = (
                    f"\nstep {step}: rank {self._plan.rank} has been {doing} for more than "
                    f"{self._limit:g} seconds, and ends.\n  The rank that did not wait for others "
                    "is the cause. Look at its batch, if this is pre-training: bothways "
                    f"inspect-step RUN {step}; continue with {argument(resume=True)}.\n"
                )
                os.write(2, render(message).encode())
                faulthandler.dump_traceback(sys.__stderr__ or 2)
                os._exit(ENDED_BY_WATCHDOG)
