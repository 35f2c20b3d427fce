"""Early stopping: a run ends after a number of evaluations in a row without improvement, or when a
metric has reached a target.

The count is kept in the metrics of checkpoints: a resumed run ends where an unbroken one does.

Source: Prechelt, Early stopping – but when? (1998): the number of evaluations without progress.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from bothways.core.errors import ConfigError
from bothways.core.progress import Progress
from bothways.training.checkpoint import Best

BEST, WAITED = "early_stopping/best", "early_stopping/waited"
REACHED = "early_stopping/reached"
Metrics = Mapping[str, int | float]
"""Results of an evaluation by name, such as "held-out/loss/masked"."""
Evaluation = Callable[[Progress], Metrics]
"""Returns the metrics of a training module as it is, and reports its progress."""


@dataclass(frozen=True)
class Target:
    """The value of a metric at which a run ends, such as a held-out loss.

    Attributes:
        at_most: the run ends at the first evaluation with this value or a lower one.
    """

    metric: str
    at_most: float

    def check(self, evaluated: Iterable[str]) -> None:
        """Raise ConfigError if the metric is not evaluated."""
        if self.metric not in (names := list(evaluated)):
            message = f"{self.metric!r} is not evaluated: there are {', '.join(names)}"
            raise ConfigError(message, where="training.target.metric")


class EarlyStopping:
    """Counts the evaluations since the best one, and looks for a target.

    Args:
        patience: the count that ends the run; None for no limit.
        best: the metric; None without patience.
        target: ends the run, too; None for none.
    """

    def __init__(
        self, patience: int | None, best: Best | None, target: Target | None = None
    ) -> None:
        self._patience, self._best, self._target = patience, best, target
        self._value = math.nan
        self._waited = 0
        self._reached = False

    @property
    def over(self) -> bool:
        """True if the run must end."""
        waited = self._patience is not None and self._waited >= self._patience
        return waited or self._reached

    def note(self, metrics: Metrics) -> None:
        """Count an evaluation; NaN is not an improvement."""
        if self._patience is not None and self._best is not None:
            value = metrics[self._best.metric]
            if self._best.prefers(value, self._value):
                self._value, self._waited = value, 0
            else:
                self._waited += 1
        if self._target is not None:
            self._reached = metrics[self._target.metric] <= self._target.at_most

    def state(self) -> dict[str, int | float]:
        """Return the state that a checkpoint keeps."""
        reached: dict[str, int | float] = {REACHED: 1} if self._reached else {}
        if self._patience is None:
            return reached
        best = {} if math.isnan(self._value) else {BEST: self._value}
        return {WAITED: self._waited} | best | reached

    def restore(self, state: Metrics) -> dict[str, int | float]:
        """Restore the state from a checkpoint's metrics, and return the other metrics."""
        self._value, self._waited = state.get(BEST, math.nan), int(state.get(WAITED, 0))
        self._reached = REACHED in state
        state_names = {BEST, WAITED, REACHED}
        return {name: value for name, value in state.items() if name not in state_names}
