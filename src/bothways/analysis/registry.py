"""Which analyst looks at which task: the one place that a new kind of prediction is entered in."""

from __future__ import annotations

from typing import Any, cast

from typing_extensions import assert_never

from bothways.analysis.answers import AnswerAnalysis
from bothways.analysis.base import Analyst
from bothways.analysis.choices import ChoiceAnalysis
from bothways.analysis.classes import ClassAnalysis
from bothways.analysis.label_sets import LabelSetAnalysis
from bothways.analysis.scores import ScoreAnalysis
from bothways.analysis.tags import TagAnalysis
from bothways.core.errors import ConfigError
from bothways.tasks.base import TaskLearner
from bothways.tasks.catalogue import AnyTask
from bothways.tasks.choice.task import ChoiceTask
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.likelihood.task import LikelihoodTask
from bothways.tasks.mask_filling.task import MaskFillingTask
from bothways.tasks.multilabel.task import MultilabelTask
from bothways.tasks.question_answering.task import QuestionAnsweringTask
from bothways.tasks.regression.task import RegressionTask
from bothways.tasks.sentence_embedding.task import SentenceEmbeddingTask
from bothways.tasks.tagging.task import TaggingTask


def analyst_of(task: TaskLearner[Any, Any]) -> Analyst[Any, Any]:
    """The analyst of a task's definition. ConfigError for a task whose answers are neither right nor wrong."""
    definition = cast(AnyTask, task.task)
    match definition:
        case ClassificationTask():
            return ClassAnalysis(task.labels)
        case RegressionTask():
            return ScoreAnalysis()
        case MultilabelTask():
            return LabelSetAnalysis(task.labels)
        case ChoiceTask():
            return ChoiceAnalysis()
        case TaggingTask():
            return TagAnalysis(definition, task.labels)
        case QuestionAnsweringTask():
            return AnswerAnalysis()
        case MaskFillingTask() | LikelihoodTask() | SentenceEmbeddingTask():
            what = f"there is no report on the task {definition.name}"
            raise ConfigError(
                what, where="report", fix="Leave it out; evaluate prints the metrics."
            )
        case _:
            assert_never(definition)
