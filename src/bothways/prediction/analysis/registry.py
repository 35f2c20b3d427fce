"""The analysis for each kind of prediction; a task whose predictions have none gets no report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bothways.core.errors import ConfigError
from bothways.prediction.analysis import texts
from bothways.prediction.analysis.answers import AnswerAnalysis
from bothways.prediction.analysis.base import TaskAnalysis
from bothways.prediction.analysis.rankings import RankingAnalysis
from bothways.prediction.analysis.tags import TagAnalysis
from bothways.tasks import predictions as kinds
from bothways.tasks.base import TaskModel
from bothways.tasks.schemas import prediction_type

_ANALYSES: dict[type, Callable[[Any], TaskAnalysis[Any, Any]]] = {
    kinds.ClassPrediction: lambda task_model: texts.ClassAnalysis(task_model.labels),
    kinds.ScorePrediction: lambda task_model: texts.ScoreAnalysis(),
    kinds.MultilabelPrediction: lambda task_model: texts.LabelSetAnalysis(task_model.labels),
    kinds.ChoicePrediction: lambda task_model: texts.ChoiceAnalysis(),
    kinds.TagPrediction: lambda task_model: TagAnalysis(task_model.task, task_model.labels),
    kinds.AnswerPrediction: lambda task_model: AnswerAnalysis(),
    kinds.RankPrediction: lambda task_model: RankingAnalysis(),
}


def analysis_of(task_model: TaskModel[Any, Any]) -> TaskAnalysis[Any, Any]:
    """Return an empty analysis for a task.

    Raises:
        ConfigError: the task has no right and wrong answers.
    """
    analysis = _ANALYSES.get(prediction_type(task_model.task))
    if analysis is None:
        message = f"there is no report on the task {task_model.task.name}"
        fix = "Leave it out; evaluate prints the metrics."
        raise ConfigError(message, where="report", fix=fix)
    return analysis(task_model)
