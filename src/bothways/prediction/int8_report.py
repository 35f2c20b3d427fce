"""What int8 costs and gains on labelled data: the same model in fp32 and in int8, by the task's own metric and by the clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bothways.core.errors import ConfigError
from bothways.prediction.engine import prepare_task
from bothways.prediction.predictor import Predictor
from bothways.tasks.task import Direction, Metrics

LIMIT = 0.5
"""Points that may be lost, unless another limit is set."""
SHORT = 20.0
"""Seconds below which a measurement is repeated."""


@dataclass(frozen=True)
class Scored:
    """The metrics of one precision, and the fewest seconds from texts to metrics."""

    metrics: Metrics
    seconds: float


@dataclass(frozen=True)
class Price:
    """Attributes:
    metric: what counts, the task's own.
    direction: its best value.
    fp32, int8: the same model on the same data.
    """

    metric: str
    direction: Direction
    fp32: Scored
    int8: Scored

    @property
    def loss(self) -> float:
        """Points that int8 loses: hundredths of the metric; where the lowest is best, hundredths of its value in fp32."""
        before, after = self.fp32.metrics[self.metric], self.int8.metrics[self.metric]
        return 100 * (before - after if self.direction == "highest" else after / before - 1)

    @property
    def speedup(self) -> float:
        """How many times as fast int8 is."""
        return self.fp32.seconds / self.int8.seconds

    def check(self, limit: float = LIMIT) -> None:
        """ConfigError: more points are lost than this, or nobody knows how many."""
        if not self.loss <= limit:
            what = f"int8 loses {self.loss:.2f} points of {self.metric} here, and the limit is {limit:g}"
            raise ConfigError(
                what, where="precision", fix="Predict in fp32, or allow more: --limit POINTS."
            )

    def __str__(self) -> str:
        return f"int8 loses {self.loss:.2f} points of {self.metric}, and is {self.speedup:.2f} times as fast"

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `bothways evaluate --json` writes them."""
        both = {"fp32": dict(self.fp32.metrics), "int8": dict(self.int8.metrics)}
        return {"metric": self.metric, "points_lost": self.loss, "speedup": self.speedup, **both}


def price(opened: Predictor, evaluate: Callable[[Predictor], Metrics]) -> Price:
    """What int8 costs and gains, measured now.

    Args:
        opened: the model in fp32.
        evaluate: its metrics on data; called for both, so it reads the data anew each time.

    Raises:
        ConfigError: there is no int8 for this model here.
    """
    definition, quantised = opened.task.definition, Predictor(prepare_task(opened.task, "int8"))
    fp32, int8 = (_scored(model, evaluate) for model in (opened, quantised))
    direction = definition.directions(opened.task.labels)[definition.metric]
    return Price(definition.metric, direction, fp32, int8)


def _scored(opened: Predictor, evaluate: Callable[[Predictor], Metrics]) -> Scored:
    """On few data up to three times, and the shortest counts: the first time reads modules and weights from the disk."""
    seconds: list[float] = []
    while not seconds or (len(seconds) < 3 and sum(seconds) < SHORT):
        start = time.perf_counter()
        metrics = evaluate(opened)
        seconds.append(time.perf_counter() - start)
    return Scored(metrics, min(seconds))
