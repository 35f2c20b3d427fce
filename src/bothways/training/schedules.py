"""Learning-rate schedules: pure functions of progress.

A schedule is a shape; the run's duration gives the scale: steps, tokens, epochs or hours. `Linear`
is the shape of today's libraries, `GoogleLinear` that of BERT's own code, in which the rate drops
at the end of warm-up. A `floor` is the multiple of the peak at the end.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from typing_extensions import assert_never

from bothways.core.errors import ConfigError
from bothways.training.durations import Duration, RunState

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
class Polynomial:
    """Up from 0 to the peak in `warmup`, then down as a power of the share of the rest, to `floor`.

    floor + (1 − floor) · ((T − s)/(T − w))^power.
    """

    warmup: ScheduleSpan = 0.0
    power: float = 1.0
    floor: float = 0.0
    kind: Literal["polynomial"] = "polynomial"

    def __post_init__(self) -> None:
        _check_floor(self.floor)
        if not 0 < self.power < math.inf:
            message = f"must be above 0 and finite, not {self.power}"
            raise ConfigError(message, where="training.schedule.power")


@dataclass(frozen=True)
class Cosine:
    """Up from 0 to the peak in `warmup`, then down by half a cosine to `floor`.

    floor + (1 − floor) · (1 + cos(π · (s − w)/(T − w)))/2 (Loshchilov & Hutter 2016).
    """

    warmup: ScheduleSpan = 0.0
    floor: float = 0.1
    kind: Literal["cosine"] = "cosine"

    def __post_init__(self) -> None:
        _check_floor(self.floor)


@dataclass(frozen=True)
class WSD:
    """Warm-up, stable, decay: up to the peak in `warmup`, constant, down to `floor` in `decay`.

    With p the part of the decay that is done, the rate falls as 1 − p ("linear") or 1 − √p
    ("sqrt"). The run can be made longer from the end of its plateau: see `RunState.plateau`.

    Sources: Hu et al. 2024 (MiniCPM); Hägele et al. 2024 for the root.
    """

    warmup: ScheduleSpan = 0.0
    decay: ScheduleSpan = 0.2
    shape: Literal["linear", "sqrt"] = "linear"
    floor: float = 0.0
    kind: Literal["wsd"] = "wsd"

    def __post_init__(self) -> None:
        _check_floor(self.floor)


Schedule = Linear | GoogleLinear | Constant | Polynomial | Cosine | WSD
ScheduleFunction = Callable[[float], float]
"""The share of the run that is done, from 0 to 1 → the multiple of the peak rate."""


def rate_factor(
    schedule: Schedule | ScheduleFunction, run: Duration
) -> Callable[[RunState], float]:
    """Return the multiple of the peak rate as a function of the state before a step.

    Args:
        schedule: the shape, or a function of the share that is done.
        run: the duration of the whole run, which may be longer than the phase that is trained now.

    Raises:
        ConfigError: a part is out of range, of another unit than the run, or as long as the run.
    """
    if callable(schedule):
        return lambda progress: schedule(min(1.0, progress.share(run)))
    total = run.count
    warmup = _amount("warmup", schedule.warmup, run)
    decay = _amount("decay", schedule.decay, run) if isinstance(schedule, WSD) else 0.0
    if warmup + decay > total * (1 + ROUNDING):
        spans = f"warm-up ({warmup:g}) and decay ({decay:g})"
        raise ConfigError(
            f"{spans} together are longer than the run ({run})", where="training.schedule"
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
            case Polynomial(power=power, floor=floor):
                left = (total - done) / (total - warmup)
                return floor + (1 - floor) * math.pow(left, power)
            case Cosine(floor=floor):
                left = (total - done) / (total - warmup)
                return floor + (1 - floor) * (1 - math.cos(math.pi * left)) / 2
            case WSD(shape=shape, floor=floor):
                left = min(1.0, (total - done) / decay) if decay else 1.0
                share = left if shape == "linear" else 1 - math.sqrt(1 - left)
                return floor + (1 - floor) * share
            case _:
                assert_never(schedule)

    return at


def plateau_end(schedule: Schedule | ScheduleFunction, run: Duration) -> float:
    """Return the begin of the decay of `WSD`, in the run's unit; infinity without a plateau."""
    if not isinstance(schedule, WSD):
        return math.inf
    return run.count - _amount("decay", schedule.decay, run)


def _check_floor(floor: float) -> None:
    if not 0 <= floor <= 1:
        message = f"must be a share of the peak, from 0 to 1, not {floor}"
        raise ConfigError(message, where="training.schedule.floor")


def _amount(name: str, span: ScheduleSpan, run: Duration) -> float:
    """Return a part of the run in the run's unit."""
    location = f"training.schedule.{name}"
    if isinstance(span, float | int):
        if not 0 <= span < 1:
            raise ConfigError(
                f"a share of a run must be at least 0 and below 1, not {span:g}", where=location
            )
        return span * run.count
    if type(span) is not type(run):
        raise ConfigError(
            f"the part is given in {span.kind} ({span}), the run in {run.kind} ({run})",
            where=location,
            fix=f"Give both in {run.kind}, or a share of the run, such as {location}=0.1.",
        )
    if span.count >= run.count:
        fix = f"Give it as a share of the run, such as {location}=0.1, or make the run longer."
        raise ConfigError(
            f"{span} is as long as the run ({run}) or longer", where=location, fix=fix
        )
    return float(span.count)
