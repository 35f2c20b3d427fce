"""Learning-rate schedules: pure functions of progress.

A schedule is a shape; the run's duration gives the scale: steps, tokens, epochs or hours. `Linear`
is the shape of today's libraries, `GoogleLinear` that of BERT's own code, in which the rate drops at
the end of warm-up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from typing_extensions import assert_never

from bothways.core.errors import ConfigError
from bothways.training.durations import Duration
from bothways.training.state import RunState

ScheduleSpan = float | Duration
"""A part of a run: a share from 0 to below 1, or a duration of the same kind as the run's."""

ROUNDING = 2 * sys.float_info.epsilon
"""Share of a run by which the sum of two parts may exceed it in floating-point numbers."""


@dataclass(frozen=True)
class Linear:
    """Up from 0 to the peak in `warmup`, then straight down to 0 at the end: (T − s)/(T − w)."""

    warmup: ScheduleSpan = 0.0
    kind: Literal["linear"] = "linear"


@dataclass(frozen=True)
class GoogleLinear:
    """Straight down from step 0, (T − s)/T, the first `warmup` of it replaced by s/w.

    Where the two meet, the rate drops by w/T.
    """

    warmup: ScheduleSpan = 0.0
    kind: Literal["google_linear"] = "google_linear"


@dataclass(frozen=True)
class Constant:
    """Up from 0 to the peak in `warmup`, then constant."""

    warmup: ScheduleSpan = 0.0
    kind: Literal["constant"] = "constant"


@dataclass(frozen=True)
class Trapezoid:
    """Up from 0 to the peak in `warmup`, constant, then straight down to 0 in the last `decay`."""

    warmup: ScheduleSpan = 0.0
    decay: ScheduleSpan = 0.2
    kind: Literal["trapezoid"] = "trapezoid"


Schedule = Linear | GoogleLinear | Constant | Trapezoid
ScheduleFunction = Callable[[float], float]
"""The share of the run that is done, from 0 to 1 → the multiple of the peak rate."""


def factor(schedule: Schedule | ScheduleFunction, run: Duration) -> Callable[[RunState], float]:
    """Return the multiple of the peak rate as a function of the state before a step.

    Args:
        schedule: the shape, or a function of the share that is done.
        run: the duration of the whole run, which may be longer than the phase that is trained now.

    Raises:
        ConfigError: a part is out of range, of another unit than the run, or as long as the run.
    """
    if not isinstance(schedule, Linear | GoogleLinear | Constant | Trapezoid):
        return lambda progress: schedule(min(1.0, progress.share(run)))
    total = run.count
    warmup = _amount("warmup", schedule.warmup, run)
    decay = _amount("decay", schedule.decay, run) if isinstance(schedule, Trapezoid) else 0.0
    if warmup + decay > total * (1 + ROUNDING):
        parts = f"warm-up ({warmup:g}) and decay ({decay:g})"
        raise ConfigError(
            f"{parts} together are longer than the run ({run})", where="training.schedule"
        )

    def at(progress: RunState) -> float:
        """Return the multiple of the peak rate before a step."""
        done = min(progress.amount(run), total)
        if done < warmup:
            return done / warmup
        match schedule:
            case Linear():
                return (total - done) / (total - warmup)
            case GoogleLinear():
                return (total - done) / total
            case Constant():
                return 1.0
            case Trapezoid():
                return min(1.0, (total - done) / decay) if decay else 1.0
            case _:
                assert_never(schedule)

    return at


def _amount(name: str, part: ScheduleSpan, run: Duration) -> float:
    """Return a part of the run in the run's unit."""
    where = f"training.schedule.{name}"
    if isinstance(part, float | int):
        if not 0 <= part < 1:
            raise ConfigError(
                f"a share of a run must be at least 0 and below 1, not {part:g}", where=where
            )
        return part * run.count
    if type(part) is not type(run):
        raise ConfigError(
            f"the part is given in {part.kind} ({part}), the run in {run.kind} ({run})",
            where=where,
            fix=f"Give both in {run.kind}, or the part as a share of the run, such as 0.1.",
        )
    if part.count >= run.count:
        raise ConfigError(f"{part} is as long as the run ({run}) or longer", where=where)
    return float(part.count)
