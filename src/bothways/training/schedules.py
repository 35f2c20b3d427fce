"""Durations in steps, tokens, epochs or hours, the state of a run, and learning-rate schedules.

One type of duration serves for the end of a run, warm-up, evaluation and saving. A schedule is a
pure function of progress: a shape, to which the run's duration gives the scale. `Linear`
is the shape of today's libraries, `GoogleLinear` that of BERT's own code, in which the rate drops
at the end of warm-up. A `floor` is the multiple of the peak at the end.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from typing_extensions import Self, assert_never

from bothways.core.config.values import require_range
from bothways.core.errors import ConfigError, setting
from bothways.core.source import Cursor, TrainingStep

_SHORT = len("0.25 hours")
"""Characters of a time in hours, at most, where minutes or seconds would be as exact."""


@dataclass(frozen=True)
class _Amount:
    count: float
    kind: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.count < math.inf:
            raise ConfigError(f"{self} is not a valid duration: it must be above 0 and finite")

    def __str__(self) -> str:
        return f"{self.count:.12g} {self.kind}"

    def part(self, share: float) -> Self:
        """Return the duration of a share of this one, at least one step or token."""
        count = self.count * share
        is_counted = isinstance(self, Steps | Tokens)
        return dataclasses.replace(self, count=max(1, round(count)) if is_counted else count)

    def steps(self, rates: StepRates) -> float | None:
        """Return the duration in steps, 3 epochs of 100 steps as 300; None if its rate is unknown.

        The one place where a unit becomes another one.
        """
        hours = None if rates.seconds is None else rates.seconds / 3600
        per_step = {"steps": 1.0, "tokens": rates.tokens, "epochs": rates.epochs, "hours": hours}
        rate = per_step[self.kind]
        return None if rate is None else self.count / rate


@dataclass(frozen=True)
class Steps(_Amount):
    """A number of updates of the weights."""

    count: int
    kind: Literal["steps"] = "steps"


@dataclass(frozen=True)
class Tokens(_Amount):
    """A number of tokens read over all ranks, specials included."""

    count: int
    kind: Literal["tokens"] = "tokens"


@dataclass(frozen=True)
class Epochs(_Amount):
    """A number of passes over the data; fractions are allowed."""

    count: float
    kind: Literal["epochs"] = "epochs"


@dataclass(frozen=True)
class Hours(_Amount):
    """Time in hours, with evaluation, saving and the sessions before a resume."""

    count: float
    kind: Literal["hours"] = "hours"

    def __str__(self) -> str:
        """Return the time in hours if that is a short number, else in whole minutes or seconds."""
        text = super().__str__()
        if len(text) > _SHORT:
            for unit, per_hour in (("minutes", 60), ("seconds", 3600)):
                number = round(self.count * per_hour)
                if number / per_hour == self.count:
                    return f"{number} {unit}"
        return text


_UNITS: dict[str, Callable[[float], Steps | Tokens | Epochs | Hours]] = {
    "steps": lambda n: Steps(int(n)),
    "tokens": lambda n: Tokens(int(n)),
    "epochs": Epochs,
    "hours": Hours,
    "minutes": lambda n: Hours(n / 60),
    "seconds": lambda n: Hours(n / 3600),
}
_SHORT_UNITS = {"h": "hours", "m": "minutes", "min": "minutes", "s": "seconds", "sec": "seconds"}
_FORM = re.compile(r"\s*([-+]?\d+(?:_\d+)*(?:\.\d*)?(?:[eE][-+]?\d+)?)\s*([a-z]+)\s*")


def duration(text: str) -> Steps | Tokens | Epochs | Hours:
    """Read a duration such as "1000 steps", "2e9 tokens", "3 epochs", "30 minutes" or "2h".

    Raises:
        ConfigError: the text is not a number above 0 with one of these units.
    """
    form = _FORM.fullmatch(text)
    unit = _SHORT_UNITS.get(form[2], form[2].removesuffix("s") + "s") if form else ""
    if form is None or unit not in _UNITS:
        units = ", ".join(_UNITS)
        raise ConfigError(
            f"invalid duration {text!r}",
            fix=f"Write a number and one of {units}, such as '1000 steps' or 2h.",
        )
    number = float(form[1])
    # 2.5e3 is a whole number; 1.000 may be meant as a thousand.
    written = "." not in form[1] or "e" in form[1].lower()
    if unit in ("steps", "tokens") and not (written and number.is_integer()):
        message = f"{text!r} is not a valid duration: {unit} are whole numbers"
        raise ConfigError(message, fix="Write 1000 or 1e3 for a thousand.")
    return _UNITS[unit](number)


Duration = Annotated[
    Steps | Tokens | Epochs | Hours,
    BeforeValidator(lambda value: duration(value) if isinstance(value, str) else value),
]
"""Steps, Tokens, Epochs or Hours; a configuration may give it as a text that `duration` reads."""


Auto = Literal["auto"]
"""A setting that fine-tuning chooses by the model and the data (`finetuning.prepare`)."""


@dataclass(frozen=True)
class StepRates:
    """What a step adds to each unit of the length of a run, on average.

    Attributes:
        tokens: tokens of a step.
        epochs: share of an epoch; None if the size of the data is unknown.
        seconds: seconds of a step; None if they are unknown.
    """

    tokens: float
    epochs: float | None = None
    seconds: float | None = None

    def times(self, interval_length: Duration | None, steps: float) -> int:
        """Count the ends of intervals in a run of `steps`; its own end counts."""
        interval = None if interval_length is None else interval_length.steps(self)
        return 1 if interval is None else max(1, math.ceil(steps / interval - 1e-9))


@dataclass(frozen=True)
class RunState:
    """What a run needs to continue, besides weights, optimizer and random state.

    Attributes:
        steps: updates done.
        tokens: tokens read over all ranks.
        epochs: passes over the data, those of earlier phases included.
        seconds: time until the last step began, earlier sessions included; equal on all ranks.
        cursor: the place in the data of the current phase from which the next step reads.
        ends: the cursors at which the earlier phases ended.
        phase: which of the run's phases is the current one, from 0.
        early: True if early stopping ended the run before its length.
        plateau: the step of the checkpoint from which a longer run continues, since the decay of
            its `WSD` schedule began there; 0 before.
    """

    steps: int = 0
    tokens: int = 0
    epochs: float = 0.0
    seconds: float = 0.0
    cursor: Cursor = Cursor()
    phase: int = 0
    ends: tuple[Cursor, ...] = ()
    early: bool = False
    plateau: int = 0

    def amount(self, unit: Duration) -> float:
        """Return the progress in the unit of a duration."""
        amounts = {
            "steps": self.steps,
            "tokens": self.tokens,
            "epochs": self.epochs,
            "hours": self.seconds / 3600,
        }
        return float(amounts[unit.kind])

    def share(self, duration: Duration) -> float:
        """Return the fraction of a duration that is done: 0 at the start, 1 or more at its end."""
        return self.amount(duration) / duration.count

    def finished(self, run: Duration) -> bool:
        """Return True if a run of this length is at its end or has ended early."""
        return self.early or self.share(run) >= 1

    def passed(self, interval: Duration, since: RunState) -> bool:
        """Return True if a multiple of `interval` was reached after `since`."""
        previous, current = (
            math.floor(progress.share(interval) + 1e-9) for progress in (since, self)
        )  # 0.3 / 0.1 < 3 in floating-point numbers
        return previous < current

    def after(self, step: TrainingStep) -> RunState:
        """Return the state after a step."""
        return dataclasses.replace(
            self,
            steps=self.steps + 1,
            tokens=self.tokens + step.tokens,
            epochs=step.epochs,
            cursor=step.cursor,
        )

    def next_phase(self) -> RunState:
        """Return the state at the start of the next phase, which continues the current epoch."""
        return dataclasses.replace(
            self,
            phase=self.phase + 1,
            cursor=self.cursor.at_next_phase(),
            ends=(*self.ends, self.cursor),
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values, which `from_json` reads."""
        ends = [end.to_json() for end in self.ends]
        return dataclasses.asdict(self) | {"cursor": self.cursor.to_json(), "ends": ends}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunState:
        """Read the values of `to_json`."""
        ends = tuple(map(Cursor.from_json, values["ends"]))
        return cls(**{**values, "cursor": Cursor.from_json(values["cursor"]), "ends": ends})


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
        require_range("(0, inf)", "training.schedule", power=self.power)


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
        left = (total - done) / (total - warmup)
        match schedule:
            case Linear():
                return left
            case GoogleLinear():
                return (total - done) / total
            case Constant():
                return 1.0
            case Polynomial(power=power, floor=floor):
                return floor + (1 - floor) * math.pow(left, power)
            case Cosine(floor=floor):
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
    require_range("[0, 1]", "training.schedule", floor=floor, fix="It is a share of the peak.")


def _amount(name: str, span: ScheduleSpan, run: Duration) -> float:
    """Return a part of the run in the run's unit."""
    location = f"training.schedule.{name}"
    if isinstance(span, float | int):
        fix = "A number is a share of the run; for an amount, write 100 steps, for example."
        require_range("[0, 1)", "training.schedule", fix=fix, **{name: span})
        return span * run.count
    share = setting(location, 0.1)
    if type(span) is not type(run):
        raise ConfigError(
            f"the part is given in {span.kind} ({span}), the run in {run.kind} ({run})",
            where=location,
            fix=f"Give both in {run.kind}, or a share of the run, such as {share}.",
        )
    if span.count >= run.count:
        fix = f"Give it as a share of the run, such as {share}, or make the run longer."
        raise ConfigError(
            f"{span} is as long as the run ({run}) or longer", where=location, fix=fix
        )
    return float(span.count)
