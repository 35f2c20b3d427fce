"""Durations: steps, tokens, epochs and hours.

One type serves for the end of a run, warm-up, evaluation and saving.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator
from typing_extensions import assert_never

from bothways.core.errors import ConfigError

_SHORT = len("0.25 hours")
"""Characters of a time in hours, at most, where minutes or seconds would be as exact."""


@dataclass(frozen=True)
class _Amount:
    count: float

    def __post_init__(self) -> None:
        if not 0 < self.count < math.inf:
            raise ConfigError(f"{self} is not a valid duration: it must be above 0 and finite")

    def __str__(self) -> str:
        return f"{self.count:.12g} {type(self).__name__.lower()}"


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
    "steps": lambda n: Steps(_whole(n, "steps")),
    "tokens": lambda n: Tokens(_whole(n, "tokens")),
    "epochs": Epochs,
    "hours": Hours,
    "minutes": lambda n: Hours(n / 60),
    "seconds": lambda n: Hours(n / 3600),
}
_SHORT_UNITS = {"h": "hours", "m": "minutes", "min": "minutes", "s": "seconds", "sec": "seconds"}
_FORM = re.compile(r"\s*([-+]?\d+(?:_\d+)*(?:\.\d*)?(?:[eE][-+]?\d+)?)\s*([a-z]+)\s*")


def _whole(number: float, unit: str) -> int:
    if not number.is_integer():
        raise ConfigError(f"{number:g} {unit} is not a valid duration: {unit} are whole numbers")
    return int(number)


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
    return _UNITS[unit](float(form[1]))


Duration = Annotated[
    Steps | Tokens | Epochs | Hours,
    BeforeValidator(lambda value: duration(value) if isinstance(value, str) else value),
]
"""Steps, Tokens, Epochs or Hours; a configuration may give it as a text that `duration` reads."""


Auto = Literal["auto"]
"""A setting that fine-tuning chooses by the model and the data (`finetuning.automatic`)."""


def part_of(run: Duration, share: float) -> Duration:
    """Return the duration of a share of a run, at least one step or token."""
    match run:
        case Steps(count):
            return Steps(max(1, round(count * share)))
        case Tokens(count):
            return Tokens(max(1, round(count * share)))
        case Epochs(count):
            return Epochs(count * share)
        case Hours(count):
            return Hours(count * share)
        case _:
            assert_never(run)


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

    def steps(self, duration: Duration) -> float | None:
        """Return a duration in steps; None if its unit is unknown."""
        match duration:
            case Steps(count):
                return count
            case Tokens(count):
                return count / self.tokens
            case Epochs(count):
                return None if self.epochs is None else count / self.epochs
            case Hours(count):
                return None if self.seconds is None else 3600 * count / self.seconds
            case _:
                assert_never(duration)

    def times(self, interval_length: Duration | None, steps: float) -> int:
        """Count the ends of intervals in a run of `steps`; its own end counts."""
        interval = None if interval_length is None else self.steps(interval_length)
        return 1 if interval is None else max(1, math.ceil(steps / interval - 1e-9))
