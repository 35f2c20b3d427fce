"""The cost and gain of int8 on labelled data: one model in fp32 and in int8, by the task's metric
and by the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from bothways.core.advice import argument
from bothways.core.errors import ConfigError
from bothways.prediction.predictor import Predictor
from bothways.tasks.base import Direction, Metrics

MAX_LOSS = 0.5
"""Points that int8 may lose by default."""
SHORT_SECONDS = 20.0
"""Measurements are repeated until they have taken this long together, at most three times."""


@dataclass(frozen=True)
class TimedMetrics:
    """The metrics in one precision, and the fewest seconds from texts to metrics."""

    metrics: Metrics
    seconds: float


@dataclass(frozen=True)
class Int8Report:
    """One model in two precisions on the same data.

    Attributes:
        metric: the metric that counts, the task's own.
        direction: its better direction.
        fp32, int8: the measurements.
    """

    metric: str
    direction: Direction
    fp32: TimedMetrics
    int8: TimedMetrics

    @property
    def points_lost(self) -> float:
        """Hundredths of the metric; where lower is better, percent of its value in fp32."""
        fp32, int8 = self.fp32.metrics[self.metric], self.int8.metrics[self.metric]
        points = 100 * (fp32 - int8 if self.direction == "highest" else int8 / fp32 - 1)
        return round(points, 9)  # 0.9 - 0.895 is a little more than half a point

    @property
    def speedup(self) -> float:
        """The time in fp32 divided by the time in int8."""
        return self.fp32.seconds / self.int8.seconds

    def check(self, limit: float = MAX_LOSS) -> None:
        """Raise ConfigError if more points than `limit` are lost, or the loss is not a number."""
        if not self.points_lost <= limit:
            message = (
                f"int8 loses {self.points_lost:#.3g} points of {self.metric} here; "
                f"the limit is {limit:g}"
            )
            fix = f"Predict in fp32, or allow more: {argument(limit='POINTS')}."
            raise ConfigError(message, where="precision", fix=fix)

    def __str__(self) -> str:
        change = "gains" if self.points_lost < 0 else "loses"
        points = f"{abs(self.points_lost):#.3g} points of {self.metric}"
        return f"int8 {change} {points}, and is {self.speedup:.2f} times as fast"

    def to_json(self) -> dict[str, Any]:
        """Return plain values, as `bothways evaluate --json` writes them."""
        metrics = {"fp32": dict(self.fp32.metrics), "int8": dict(self.int8.metrics)}
        summary = {"points_lost": self.points_lost, "speedup": self.speedup}
        return {"metric": self.metric, **summary, **metrics}


def measure_int8(
    open_in: Callable[[Literal["fp32", "int8"]], Predictor],
    evaluate: Callable[[Predictor], Metrics],
) -> Int8Report:
    """Measure the cost and gain of int8 now.

    Args:
        open_in: opens the model in a precision.
        evaluate: returns its metrics; called for both, so it opens the data on each call.

    Raises:
        ConfigError: int8 is not available for this model here.
    """
    quantised = open_in("int8")  # before the data is read for fp32
    int8, fp32 = (_measure(predictor, evaluate) for predictor in (quantised, open_in("fp32")))
    task_model = quantised.task_model
    direction = task_model.task.directions(task_model.labels)[task_model.task.metric]
    return Int8Report(task_model.task.metric, direction, fp32, int8)


def _measure(predictor: Predictor, evaluate: Callable[[Predictor], Metrics]) -> TimedMetrics:
    """Return the shortest of up to three times: the first one also reads modules and weights from
    the disk.
    """
    seconds: list[float] = []
    while not seconds or (len(seconds) < 3 and sum(seconds) < SHORT_SECONDS):
        start = time.perf_counter()
        metrics = evaluate(predictor)
        seconds.append(time.perf_counter() - start)
    return TimedMetrics(metrics, min(seconds))
