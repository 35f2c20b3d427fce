"""An evaluation that analyses each prediction, and its report.

One pass gives the metrics, the counts of the task's analysis and the examples worth a look. 21
bytes are kept of every example (`slices.Traits`); texts only of those that are shown.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bothways.core.config import reader as configs
from bothways.core.config.tree import flatten
from bothways.core.report import sections as s
from bothways.core.report.html import write_html
from bothways.core.runtime.devices import Precision, device_of, has_bf16
from bothways.core.terminal import quantity
from bothways.prediction.analysis.registry import analysis_of
from bothways.prediction.analysis.slices import Traits
from bothways.prediction.engine import PredictionCounts, encoded_windows, predict_encoded
from bothways.tasks.base import EncodedExample, Metrics, TaskModel

SHOWN = 12
"""Number of examples of a kind that are shown."""


@dataclass(frozen=True)
class AnalysisResult:
    """The result of an evaluation.

    Attributes:
        metrics: metrics, as of `engine.evaluate_task`.
        examples: number of examples.
        sections: sections of the report, without settings.
        baseline: metrics of the majority baseline on the examples.
    """

    metrics: Metrics
    examples: int
    sections: tuple[s.Section, ...]
    baseline: Metrics = field(default_factory=dict)


class Worst:
    """The examples with the greatest values, at most `size` of them."""

    def __init__(self, size: int = SHOWN) -> None:
        self._size, self._number = size, itertools.count()
        self._heap: list[tuple[float, int, Any]] = []

    def add(self, value: float, item: Any) -> None:
        """Keep an item if its value is among the greatest; of equal ones, the first."""
        entry = (value, -next(self._number), item)
        if len(self._heap) < self._size:
            heapq.heappush(self._heap, entry)
        else:
            heapq.heappushpop(self._heap, entry)

    @property
    def items(self) -> list[Any]:
        """The items in descending order of their values."""
        return [item for _, _, item in sorted(self._heap, reverse=True)]


def analyse(
    task_model: TaskModel[Any, Any],
    examples: Iterable[Any],
    counts: PredictionCounts | None = None,
) -> AnalysisResult:
    """Evaluate a task and analyse its predictions; arguments and errors as `evaluate_task`."""
    return analyse_encoded(task_model, encoded_windows(task_model, examples), counts)


def analyse_encoded(
    task_model: TaskModel[Any, Any],
    encoded: Iterable[tuple[list[Any], list[EncodedExample]]],
    counts: PredictionCounts | None = None,
) -> AnalysisResult:
    """Evaluate a task on windows of encoded examples and analyse its predictions."""
    watcher = _Watcher(task_model)
    metrics = task_model.score(watcher.watch(encoded, counts or PredictionCounts()))
    baseline = watcher.analysis.baseline()
    return AnalysisResult(metrics, len(watcher.traits), tuple(watcher.sections()), baseline)


class _Watcher:
    """Analyses predictions while they are scored."""

    def __init__(self, task_model: TaskModel[Any, Any]) -> None:
        self._task_model, self.analysis = task_model, analysis_of(task_model)
        self.traits, self._hardest, self._doubtful = Traits(), Worst(), Worst()

    def watch(
        self,
        encoded: Iterable[tuple[list[Any], list[EncodedExample]]],
        counts: PredictionCounts,
    ) -> Iterator[tuple[Any, Any]]:
        """Yield examples with predictions, and analyse each after its consumer has accepted it."""
        for window, inputs in encoded:
            counts.add(map(self._task_model.task.texts, window), inputs)
            pairs = predict_encoded(self._task_model, window, inputs, on_share=counts.note)
            for item, pair in zip(inputs, pairs, strict=True):
                yield pair
                self._add(item, *pair)

    def _add(self, item: EncodedExample, example: Any, prediction: Any) -> None:
        task_model, analysis = self._task_model, self.analysis
        cost, doubt = analysis.judge(example, prediction)
        grade = task_model.grade(example, prediction)
        unknown = task_model.tokenizer.specials.unknown
        self.traits.add(item, task_model.task.texts(example), unknown, cost, grade)
        analysis.add(example, prediction)
        self._hardest.add(cost, (example, prediction))
        if doubt is not None:
            self._doubtful.add(doubt, (example, prediction))

    def sections(self) -> Iterator[s.Section]:
        """Yield the sections of the report."""
        analysis = self.analysis
        yield from analysis.sections()
        yield self.traits.table(analysis.grade_name, analysis.cost_name)
        hardest = [analysis.show(*pair) for pair in self._hardest.items]
        note = f"The examples with the greatest {analysis.cost_name}."
        yield s.ExampleSection("The hardest examples", hardest, note)
        if doubtful := [analysis.show(*pair) for pair in self._doubtful.items]:
            note = "The model is sure of another answer than the label: check the label."
            yield s.ExampleSection("Examples that may be mislabelled", doubtful, note)


def write_report(
    task_model: TaskModel[Any, Any],
    analysis: AnalysisResult,
    file: Path,
    *,
    model: str,
    data: str,
    training: Any = None,
    precision: Precision | Literal["int8"] = "fp32",
) -> None:
    """Write an analysis as one self-contained HTML page.

    Args:
        model, data: their names.
        training: the configuration of the run that trained the model, if known.
        precision: the precision of the evaluation.

    Raises:
        ResourceError: the file cannot be written.
    """
    write_html(analysis_report(task_model, analysis, model, data, training, precision), file)


def analysis_report(
    task_model: TaskModel[Any, Any],
    analysis: AnalysisResult,
    model: str,
    data: str,
    training: Any = None,
    precision: Precision | Literal["int8"] = "fp32",
) -> s.Report:
    """Return the report of an analysis; see `write_report`."""
    if precision == "auto":
        precision = "bf16" if has_bf16(device_of(task_model)) else "fp32"
    metric, name = task_model.task.metric, task_model.task.name
    # "f1/PER" is of a part: it is in the table of all metrics.
    figures = [
        s.KeyFigure(key.replace("_", " "), s.readable_number(value), _note(analysis, key))
        for key, value in analysis.metrics.items()
        if "/" not in key
    ]
    metrics = s.TableSection("Metrics", ["metric", "value"], list(analysis.metrics.items()))
    settings = _settings(task_model, model, data, training, precision)
    headline = f"{metric.replace('_', ' ')} {s.readable_number(analysis.metrics[metric])}"
    note = _note(analysis, metric)
    computed = f", computed in {precision}" if precision != "fp32" else ""
    return s.Report(
        f"{model} on {data}",
        f"{headline} on {quantity(analysis.examples, 'example(s)')}"
        + (f" ({note})" if note else ""),
        f"Error analysis of a model for the task {name}, example by example{computed}.",
        (
            s.KeyFigures(figures),
            *analysis.sections,
            s.Details("All metrics and settings", (metrics, settings)),
        ),
        s.colophon(device_of(task_model)),
    )


def _note(analysis: AnalysisResult, metric: str) -> str:
    value = analysis.baseline.get(metric)
    return "" if value is None else f"majority baseline: {s.readable_number(value)}"


def _settings(
    task_model: TaskModel[Any, Any], model: str, data: str, training: Any, precision: str
) -> s.TableSection:
    tables = {
        "task": configs.to_dict(task_model.task),
        "encoder": configs.to_dict(task_model.model.config),
    }
    tables |= {} if training is None else {"run": configs.to_dict(training)}
    rows: list[list[s.Cell]] = [
        ["model", model],
        ["data", data],
        ["precision", precision],
        ["length", task_model.length],
        ["labels", ", ".join(task_model.labels)],
    ]
    rows += [[name, str(value)] for name, value in flatten(tables).items()]
    return s.TableSection("Settings", ["setting", "value"], rows)
