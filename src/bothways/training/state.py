"""The state of a run: its progress in steps, tokens, epochs and seconds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import assert_never

from bothways.core.source import Cursor, TrainingStep
from bothways.training.durations import Duration, Epochs, Hours, Steps, Tokens

START = Cursor()
"""The place before the first sequence."""


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
    cursor: Cursor = START
    phase: int = 0
    ends: tuple[Cursor, ...] = ()
    early: bool = False
    plateau: int = 0

    def amount(self, unit: Duration) -> float:
        """Return the progress in the unit of a duration."""
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
