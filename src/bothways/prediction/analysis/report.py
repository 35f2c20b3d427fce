"""An evaluation that analyses each prediction, and its report.

One pass gives the metrics, the counts of the task's analysis and the examples worth a look. 24
bytes are kept of every example (`base.Traits`); texts only of those that are shown.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from bothways.core.config import reader as configs
from bothways.core.config.values import flatten
from bothways.core.errors import ConfigError
from bothways.core.report import sections as s
from bothways.core.runtime.devices import device_of
from bothways.core.terminal import quantity
from bothways.prediction.analysis import analyses
from bothways.prediction.analysis.base import TaskAnalysis, Traits
from bothways.prediction.engine import PredictionCounts, encoded_windows, predict_encoded
from bothways.tasks import predictions as p
from bothways.tasks.base import EncodedExample, Metrics, Task, TaskModel
from bothways.tasks.predictions import prediction_type

SHOWN = 12
"""Number of examples of a kind that are shown."""
_Shown = tuple[float, int, tuple[Any, Any]]
"""An example with its prediction, after what it is sorted by."""


_ANALYSES: dict[type, Callable[[Any], TaskAnalysis[Any, Any]]] = {
    p.ClassPrediction: lambda task_model: analyses.ClassAnalysis(task_model.classes),
    p.ScorePrediction: lambda task_model: analyses.ScoreAnalysis(),
    p.MultilabelPrediction: lambda task_model: analyses.LabelSetAnalysis(task_model.labels),
    p.ChoicePrediction: lambda task_model: analyses.ChoiceAnalysis(),
    p.TagPrediction: lambda task_model: analyses.TagAnalysis(task_model.task, task_model.labels),
    p.AnswerPrediction: lambda task_model: analyses.AnswerAnalysis(),
    p.RankPrediction: lambda task_model: analyses.RankingAnalysis(),
}
"""The analysis for each kind of prediction."""


def is_analysed(task: Task[Any, Any]) -> bool:
    """Return True for a task whose answers are right or wrong, unlike vectors."""
    return prediction_type(task) in _ANALYSES


def analysis_of(task_model: TaskModel[Any, Any]) -> TaskAnalysis[Any, Any]:
    """Return an empty analysis for a task; ConfigError if it has no right and wrong answers."""
    analysis = _ANALYSES.get(prediction_type(task_model.task))
    if analysis is None:
        message = f"there is no report on the task {task_model.task.name}"
        raise ConfigError(message, where="report", fix="Leave it out: the metrics need none.")
    return analysis(task_model)


@dataclass(frozen=True)
class AnalysisResult:
    """The result of an evaluation.

    Attributes:
        metrics: metrics, as of `engine.evaluate_task`.
        sections: sections of the report, without settings.
        baseline: metrics of the majority baseline on the examples.
    """

    metrics: Metrics
    examples: int
    sections: tuple[s.Section, ...]
    baseline: Metrics = field(default_factory=dict)


def analyse(
    task_model: TaskModel[Any, Any], examples: Iterable[Any], counts: PredictionCounts | None = None
) -> AnalysisResult:
    """Evaluate a task and analyse its predictions; arguments and errors as `evaluate_task`."""
    return analyse_encoded(task_model, encoded_windows(task_model, examples), counts)


def analyse_encoded(
    task_model: TaskModel[Any, Any],
    encoded: Iterable[tuple[list[Any], list[EncodedExample]]],
    counts: PredictionCounts | None = None,
) -> AnalysisResult:
    """Evaluate a task on windows of encoded examples and analyse its predictions."""
    analysis, counts = analysis_of(task_model), counts or PredictionCounts()
    traits, hardest, doubtful = Traits(), list[_Shown](), list[_Shown]()
    task, unknown = task_model.task, task_model.tokenizer.specials.unknown

    def watch() -> Iterator[tuple[Any, Any]]:
        """Yield examples with predictions, and analyse each after its consumer has accepted it."""
        for window, inputs in encoded:
            counts.add(map(task.texts, window), inputs)
            # Analysed in the pass that scores: each example is predicted once.
            pairs = predict_encoded(task_model, window, inputs, on_share=counts.note)
            for item, pair in zip(inputs, pairs, strict=True):
                yield pair
                cost, doubt = analysis.add(*pair)
                traits.add(item, task.texts(pair[0]), unknown, cost, task_model.grade(*pair))
                for heap, value in ((hardest, cost), (doubtful, doubt)):
                    if value is not None:  # of equal ones the first stays
                        keep = heapq.heappush if len(heap) < SHOWN else heapq.heappushpop
                        keep(heap, (value, -len(traits), pair))

    metrics = task_model.score(watch())
    sections = [*analysis.sections(), traits.table(analysis.grade_name, analysis.cost_name)]
    hard = f"The examples with the greatest {analysis.cost_name}."
    doubt = "The model is sure of another answer than the label: check the label."
    for title, kept, note in (
        ("The hardest examples", hardest, hard),
        ("Examples that may be mislabelled", doubtful, doubt),
    ):
        if shown := [analysis.show(*pair) for *_, pair in sorted(kept, reverse=True)]:
            sections.append(s.ExampleSection(title, shown, note))
    return AnalysisResult(metrics, len(traits), tuple(sections), analysis.baseline())


def analysis_report(
    task_model: TaskModel[Any, Any],
    analysis: AnalysisResult,
    model: str,
    data: str,
    facts: Mapping[str, str] = MappingProxyType({}),
    training: Any = None,
    precision: str = "fp32",
) -> s.Report:
    """Return the report of an analysis.

    Args:
        facts: what the model is (`hub.provenance.model_facts`).
        training: the configuration of the run that trained the model, if known.
    """
    metric, name, metrics = task_model.task.metric, task_model.task.name, analysis.metrics
    baseline = analysis.baseline.items()
    notes = {key: f"majority baseline: {s.readable_number(value)}" for key, value in baseline}
    figures = [
        s.KeyFigure(key.replace("_", " "), s.readable_number(value), notes.get(key, ""))
        for key, value in metrics.items()
        if "/" not in key  # "f1/PER" is of a part: it is in the table of all metrics
    ]
    headline = f"{metric.replace('_', ' ')} {s.readable_number(metrics[metric])}"
    note = f" ({notes[metric]})" if metric in notes else ""
    computed = f", computed in {precision}" if precision != "fp32" else ""
    parts = {"task": task_model.task, "encoder": task_model.model.config, "run": training}
    configurations = {key: configs.to_dict(part) for key, part in parts.items() if part is not None}
    settings: list[Sequence[s.Cell]] = [
        ["data", data],
        ["precision", precision],
        ["length", task_model.length],
        ["labels", ", ".join(task_model.labels)],
        *((path, str(value)) for path, value in flatten(configurations).items()),
    ]
    details = (
        s.TableSection("Metrics", ["metric", "value"], list(metrics.items())),
        s.TableSection("Settings", ["setting", "value"], settings),
    )
    return s.Report(
        f"{model} on {data}",
        f"{headline} on {quantity(analysis.examples, 'example(s)')}{note}",
        f"Error analysis of a model for the task {name}, example by example{computed}.",
        (
            s.KeyFigures(figures),
            *analysis.sections,
            s.TableSection("The model", ["", ""], [["model", model], *facts.items()]),
            s.Details("All metrics and settings", details),
        ),
        s.colophon(device_of(task_model)),
    )
