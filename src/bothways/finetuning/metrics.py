"""Metrics of a user's own: functions of the predictions and examples of the dev data."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bothways.core.errors import ConfigError
from bothways.tasks.base import Direction, Metrics

MetricFunction = Callable[[list[Any], list[Any]], float | Mapping[str, float]]
"""Takes predictions and their examples, in the same order; returns a number, or numbers by name."""


@dataclass(frozen=True)
class Metric:
    """A metric of the dev data, for `bothways.finetune(metrics=…)`.

    Attributes:
        function: takes the list of predictions and the list of examples, in the same order, and
            returns a number, or a dict of numbers by name.
        better: the direction in which it improves, "highest" or "lowest".

    Examples:
        >>> def mistakes(predictions, examples):
        ...     pairs = zip(predictions, examples)
        ...     return sum(prediction.label != example.label for prediction, example in pairs)
        >>> bothways.Metric(mistakes, better="lowest").better
        'lowest'
    """

    function: MetricFunction
    better: Direction = "highest"


OwnMetrics = Mapping[str, Metric | MetricFunction]
"""Metrics by name; a function stands for a metric that is better when it is higher."""


def named_metrics(metrics: Any) -> dict[str, Metric]:
    """Return the metrics by name.

    Raises:
        ConfigError: they are not functions by name, or a direction is unknown.
    """
    if not isinstance(metrics or {}, Mapping):
        fix = 'Give a dict of functions by name, such as metrics={"mistakes": mistakes}.'
        raise ConfigError(f"is of type {type(metrics).__name__}", where="metrics", fix=fix)
    result = {}
    for name, value in (metrics or {}).items():
        location = f"metrics.{name}"
        function = value.function if isinstance(value, Metric) else value
        if not callable(function):
            fix = "Give a function of predictions and examples."
            raise ConfigError(f"{function!r} is not a function", where=location, fix=fix)
        # A function that would fail at the first evaluation is refused now.
        with contextlib.suppress(ValueError):  # some functions of C have no signature
            signature = inspect.signature(function)
            try:
                signature.bind([], [])
            except TypeError as error:
                message = f"its function cannot be called with predictions and examples: {error}"
                fix = "Write it as def metric(predictions, examples), which returns a number."
                raise ConfigError(message, where=location, fix=fix) from error
        metric = result[str(name)] = value if isinstance(value, Metric) else Metric(value)
        if metric.better not in {"highest", "lowest"}:
            message = f'better must be "highest" or "lowest", not {metric.better!r}'
            raise ConfigError(message, where=location)
    return result


def scored(
    results: Iterable[tuple[Any, Any]],
    score: Callable[[Iterable[tuple[Any, Any]]], Metrics],
    metrics: Mapping[str, Metric],
) -> Metrics:
    """Return the metrics of a task, and a user's own, which need all predictions at once.

    The numbers of a metric that returns several are named "metric/name".

    Args:
        results: the examples with their predictions.
        score: returns the metrics of the task.

    Raises:
        ConfigError: a function returns something else than numbers.
    """
    if not metrics:
        return score(results)
    pairs = list(results)
    values = dict(score(pairs))
    examples, predictions = [example for example, _ in pairs], [result for _, result in pairs]
    for name, metric in metrics.items():
        result = metric.function(predictions, examples)
        if isinstance(result, Mapping):
            values |= {f"{name}/{key}": _number(value, name) for key, value in result.items()}
        else:
            values[name] = _number(result, name)
    return values


def _number(value: Any, name: str) -> float:
    try:
        if not isinstance(value, str):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    fix = "Return a number, or a dict of numbers by name."
    raise ConfigError(f"its function returned {value!r}", where=f"metrics.{name}", fix=fix)
