"""An evaluation that looks at each example as it goes by, and the report of what was seen.

One pass: metrics, what the task's analyst counts, and the examples that are worth a look. Of every example 21 bytes are kept
(`slices.Traits`); of texts, only those that are shown.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import torch

import bothways
from bothways.analysis.registry import analyst_of
from bothways.analysis.slices import Traits
from bothways.core.config import reader as configs
from bothways.core.config.tree import flatten
from bothways.prediction.engine import (
    DEFAULT_PREDICT,
    PredictConfig,
    PredictionCounts,
    predict_encoded,
    windows,
)
from bothways.report import sections as s
from bothways.report.html import write_html
from bothways.runtime.devices import Precision, describe_device, has_bf16
from bothways.tasks.base import EncodedExample, Metrics, TaskLearner

KEPT = 12
"""Examples that are shown of a kind."""


@dataclass(frozen=True)
class Analysis:
    """What an evaluation found.

    Attributes:
        metrics: as `engine.evaluate_task` gives them.
        examples: how many.
        sections: of the report, without settings.
    """

    metrics: Metrics
    examples: int
    sections: tuple[s.Section, ...]


class Worst:
    """The examples with the greatest values, at most `most` of them."""

    def __init__(self, most: int = KEPT) -> None:
        self._most, self._number = most, itertools.count()
        self._heap: list[tuple[float, int, Any]] = []

    def add(self, value: float, item: Any) -> None:
        """Keep it if it is among the greatest; of equals, the first."""
        entry = (value, -next(self._number), item)
        if len(self._heap) < self._most:
            heapq.heappush(self._heap, entry)
        else:
            heapq.heappushpop(self._heap, entry)

    @property
    def items(self) -> list[Any]:
        """The greatest first."""
        return [item for _, _, item in sorted(self._heap, reverse=True)]


def analyse(
    task: TaskLearner[Any, Any],
    examples: Iterable[Any],
    pace: PredictConfig = DEFAULT_PREDICT,
    tally: PredictionCounts | None = None,
) -> Analysis:
    """Evaluate, and look at every prediction; arguments and errors as `engine.evaluate_task`."""
    return analyse_encoded(task, windows(task, examples, pace), pace, tally)


def analyse_encoded(
    task: TaskLearner[Any, Any],
    encoded: Iterable[tuple[list[Any], list[EncodedExample]]],
    pace: PredictConfig = DEFAULT_PREDICT,
    tally: PredictionCounts | None = None,
) -> Analysis:
    """As `analyse`, for windows of examples with what they became."""
    survey = _Survey(task)
    metrics = task.score(survey.watch(encoded, pace, tally or PredictionCounts()))
    return Analysis(metrics, len(survey.traits), tuple(survey.sections()))


class _Survey:
    def __init__(self, task: TaskLearner[Any, Any]) -> None:
        self._task, self._analyst = task, analyst_of(task)
        self.traits, self._hardest, self._doubtful = Traits(), Worst(), Worst()

    def watch(
        self,
        encoded: Iterable[tuple[list[Any], list[EncodedExample]]],
        pace: PredictConfig,
        tally: PredictionCounts,
    ) -> Iterator[tuple[Any, Any]]:
        """Examples with predictions; each is looked at after the one who reads them has accepted it."""
        for window, inputs in encoded:
            tally.add(map(self._task.task.texts, window), inputs)
            for item, pair in zip(
                inputs, predict_encoded(self._task, window, inputs, pace, tally.note), strict=True
            ):
                yield pair
                self._see(item, *pair)

    def _see(self, item: EncodedExample, example: Any, prediction: Any) -> None:
        task, analyst = self._task, self._analyst
        cost, grade = analyst.cost(example, prediction), task.grade(example, prediction)
        self.traits.add(
            item, task.task.texts(example), task.tokenizer.specials.unknown, cost, grade
        )
        analyst.see(example, prediction)
        self._hardest.add(cost, (example, prediction))
        doubt = analyst.doubt(example, prediction)
        if doubt is not None:
            self._doubtful.add(doubt, (example, prediction))

    def sections(self) -> Iterator[s.Section]:
        """What was seen."""
        analyst = self._analyst
        yield from analyst.sections()
        yield self.traits.table(analyst.grade, analyst.loss)
        hardest = [analyst.shown(*pair) for pair in self._hardest.items]
        yield s.ExampleSection(
            "The hardest examples", hardest, f"Those with the greatest {analyst.loss}."
        )
        if doubtful := [analyst.shown(*pair) for pair in self._doubtful.items]:
            note = "The model is sure of another answer than the given one: look whether the label is right."
            yield s.ExampleSection("Examples that may be mislabelled", doubtful, note)


def write_report(
    task: TaskLearner[Any, Any],
    analysis: Analysis,
    file: Path,
    *,
    model: str,
    data: str,
    training: Any = None,
    precision: Precision | Literal["int8"] = "fp32",
) -> None:
    """Write an analysis as one HTML page that needs nothing else.

    Args:
        model, data: their names.
        training: the configuration of the run that made the model, if that is known.
        precision: in which it was evaluated.

    Raises:
        ResourceError: the file cannot be written.
    """
    write_html(analysis_report(task, analysis, model, data, training, precision), file)


def analysis_report(
    task: TaskLearner[Any, Any],
    analysis: Analysis,
    model: str,
    data: str,
    training: Any = None,
    precision: Precision | Literal["int8"] = "fp32",
) -> s.Report:
    """The report of an analysis; see `write_report`."""
    if precision == "auto":
        precision = "bf16" if has_bf16(_device(task)) else "fp32"
    metric = task.task.metric
    whole = {
        name: value for name, value in analysis.metrics.items() if "/" not in name
    }  # "f1/PER" is of a part
    figures = [
        s.KeyFigure(name.replace("_", " "), s.readable_number(value))
        for name, value in whole.items()
    ]
    metrics = s.TableSection("Metrics", ["metric", "value"], list(analysis.metrics.items()))
    return s.Report(
        f"{model} on {data}",
        f"{metric.replace('_', ' ')} {s.readable_number(analysis.metrics[metric])} on {analysis.examples:,} examples",
        f"What a model for the task {task.task.name} does well and badly, example by example"
        + (f", computed in {precision}." if precision != "fp32" else "."),
        (
            s.KeyFigures(figures),
            *analysis.sections,
            s.Details(
                "All metrics and settings",
                (metrics, _settings(task, model, data, training, precision)),
            ),
        ),
        f"bothways {bothways.__version__}, {datetime.now(timezone.utc):%Y-%m-%d}, {describe_device(_device(task))}",
    )


def _device(task: TaskLearner[Any, Any]) -> torch.device:
    return next(task.parameters()).device


def _settings(
    task: TaskLearner[Any, Any], model: str, data: str, training: Any, precision: str
) -> s.TableSection:
    tables = {
        "task": configs.to_dict(task.task),
        "encoder": configs.to_dict(task.model.config),
    }
    tables |= {} if training is None else {"run": configs.to_dict(training)}
    rows: list[list[s.Cell]] = [
        ["model", model],
        ["data", data],
        ["precision", precision],
        ["length", task.length],
        ["labels", ", ".join(task.labels)],
    ]
    rows += [[name, str(value)] for name, value in flatten(tables).items()]
    return s.TableSection("Settings", ["setting", "value"], rows)
