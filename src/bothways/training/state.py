"""How far a run is, and how long it is to be.

One type of duration serves for the end of a run, warm-up, evaluation and saving. Progress is a value: a run that is killed
continues from the last one that was written down.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from typing_extensions import assert_never

from bothways.core.errors import ConfigError
from bothways.core.learner import Cursor, Step


@dataclass(frozen=True)
class _Amount:
    count: float

    def __post_init__(self) -> None:
        if not 0 < self.count < math.inf:
            raise ConfigError(f"{self} is no duration: it must be greater than 0 and finite")

    def __str__(self) -> str:
        return f"{self.count:.12g} {type(self).__name__.lower()}"


@dataclass(frozen=True)
class Steps(_Amount):
    """So many updates of the weights."""

    count: int
    kind: Literal["steps"] = "steps"


@dataclass(frozen=True)
class Tokens(_Amount):
    """So many tokens read over all ranks, specials included."""

    count: int
    kind: Literal["tokens"] = "tokens"


@dataclass(frozen=True)
class Epochs(_Amount):
    """So many passes over the data; fractions are allowed."""

    count: float
    kind: Literal["epochs"] = "epochs"


@dataclass(frozen=True)
class Hours(_Amount):
    """So much time, evaluation and saving included; a resumed run counts what it took before."""

    count: float
    kind: Literal["hours"] = "hours"


_UNITS: dict[str, Callable[[float], Steps | Tokens | Epochs | Hours]] = {
    "steps": lambda n: Steps(_whole(n, "steps")),
    "tokens": lambda n: Tokens(_whole(n, "tokens")),
    "epochs": Epochs,
    "hours": Hours,
    "minutes": lambda n: Hours(n / 60),
    "seconds": lambda n: Hours(n / 3600),
}
_FORM = re.compile(r"\s*([-+]?\d[\d_]*(?:\.\d*)?(?:[eE][-+]?\d+)?)\s*([a-z]+)\s*")


def _whole(number: float, unit: str) -> int:
    if not number.is_integer():
        raise ConfigError(f"{number:g} {unit} is no duration: {unit} are counted in whole numbers")
    return int(number)


def duration(text: str) -> Steps | Tokens | Epochs | Hours:
    """The duration that a text such as "1000 steps", "2e9 tokens", "3 epochs", "0.5 hours" or "30 minutes" names.

    Raises:
        ConfigError: the text is no number with one of these units, or the number is not above 0.
    """
    form = _FORM.fullmatch(text)
    unit = form[2].removesuffix("s") + "s" if form else ""
    if form is None or unit not in _UNITS:
        units = ", ".join(_UNITS)
        raise ConfigError(f"{text!r} is no duration", fix=f"Write a number and one of {units}, such as '1000 steps'.")
    return _UNITS[unit](float(form[1]))


Duration = Annotated[
    Steps | Tokens | Epochs | Hours, BeforeValidator(lambda given: duration(given) if isinstance(given, str) else given)
]
"""Steps, Tokens, Epochs or Hours; a configuration may give it as a text that `duration` reads."""


def part_of(run: Duration, share: float) -> Duration:
    """The duration up to a share of a run, at least one step or token."""
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


START = Cursor()
"""The place before the first sequence."""


@dataclass(frozen=True)
class Progress:
    """How far a run is: all that it needs, beside weights, optimiser and random state, to continue.

    Attributes:
        steps: updates done.
        tokens: tokens read over all ranks.
        epochs: passes over the data, those of earlier phases included.
        seconds: time taken until the last step began, sessions before a resume included; equal on all ranks.
        cursor: the place in the data of the current phase from which the next step reads.
        phase: which of the run's phases is the current one, from 0.
        earlier_epochs: passes over the data of earlier phases.
        early: whether the run has ended before its length, for want of anything better (`Training.patience`).
    """

    steps: int = 0
    tokens: int = 0
    epochs: float = 0.0
    seconds: float = 0.0
    cursor: Cursor = START
    phase: int = 0
    earlier_epochs: float = 0.0
    early: bool = False

    def amount(self, unit: Duration) -> float:
        """How much is done, in the unit of a duration."""
        match unit:
            case Steps():
                return float(self.steps)
            case Tokens():
                return float(self.tokens)
            case Epochs():
                return self.epochs
            case Hours():
                return self.seconds / 3600
            case _:
                assert_never(unit)

    def share(self, duration: Duration) -> float:
        """The part of a duration that is done: 0 at the start, 1 and above at its end."""
        return self.amount(duration) / duration.count

    def finished(self, run: Duration) -> bool:
        """Whether a run of this length is at its end, or ended before it on its own."""
        return self.early or self.share(run) >= 1

    def passed(self, every: Duration, since: Progress) -> bool:
        """Whether a multiple of `every` lies after `since` and not after this."""
        before, now = (math.floor(progress.share(every) + 1e-9) for progress in (since, self))  # 0.3 is no multiple of 0.1
        return before < now

    def after(self, step: Step) -> Progress:
        """The progress once the step is done."""
        return dataclasses.replace(
            self,
            steps=self.steps + 1,
            tokens=self.tokens + step.tokens,
            epochs=self.earlier_epochs + step.epochs,
            cursor=step.cursor,
        )

    def next_phase(self) -> Progress:
        """The progress at the start of the next phase, whose data is read from its beginning."""
        return dataclasses.replace(self, phase=self.phase + 1, cursor=START, earlier_epochs=self.epochs)

    def to_json(self) -> dict[str, Any]:
        """Plain values, from which `from_json` makes an equal progress."""
        return dataclasses.asdict(self) | {"cursor": list(self.cursor)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Progress:
        """The progress that `to_json` wrote down."""
        return cls(**{**values, "cursor": Cursor(*values["cursor"])})
