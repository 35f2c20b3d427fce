"""The analysis for each kind of prediction; a task whose predictions have none gets no report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bothways.core.errors import ConfigError
from bothways.prediction.analysis.answers import AnswerAnalysis
from bothways.prediction.analysis.base import TaskAnalysis
from bothways.prediction.analysis.choices import ChoiceAnalysis
from bothways.prediction.analysis.classes import ClassAnalysis
from bothways.prediction.analysis.label_sets import LabelSetAnalysis
from bothways.prediction.analysis.rankings import RankingAnalysis
from bothways.prediction.analysis.scores import ScoreAnalysis
from bothways.prediction.analysis.tags import TagAnalysis
from bothways.tasks import predictions as kinds
from bothways.tasks.base import TaskModel
from bothways.tasks.schemas import prediction_type

_ANALYSES: dict[type, Callable[[Any], TaskAnalysis[Any, Any]]] = {
    kinds.ClassPrediction: lambda learner: ClassAnalysis(learner.labels),
    kinds.ScorePrediction: lambda learner: ScoreAnalysis(),
    kinds.MultilabelPrediction: lambda learner: LabelSetAnalysis(learner.labels),
    kinds.ChoicePrediction: lambda learner: ChoiceAnalysis(),
    kinds.TagPrediction: lambda learner: TagAnalysis(learner.task, learner.labels),
    kinds.AnswerPrediction: lambda learner: AnswerAnalysis(),
    kinds.RankPrediction: lambda learner: RankingAnalysis(),
}


def analysis_of(learner: TaskModel[Any, Any]) -> TaskAnalysis[Any, Any]:
    """Return an empty analysis for a task.

    Raises:
        ConfigError: the task has no right and wrong answers.
    """
    analysis = _ANALYSES.get(prediction_type(learner.task))
    if analysis is None:
        what = f"there is no report on the task {learner.task.name}"
        fix = "Leave it out; evaluate prints the metrics."
        raise ConfigError(what, where="report", fix=fix)
    return analysis(learner)
