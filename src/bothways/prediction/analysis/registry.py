"""The analysis of each task: the one place where a new kind of prediction is registered."""

from __future__ import annotations

from typing import Any, cast

from typing_extensions import assert_never

from bothways.core.errors import ConfigError
from bothways.prediction.analysis.answers import AnswerAnalysis
from bothways.prediction.analysis.base import TaskAnalysis
from bothways.prediction.analysis.choices import ChoiceAnalysis
from bothways.prediction.analysis.classes import ClassAnalysis
from bothways.prediction.analysis.label_sets import LabelSetAnalysis
from bothways.prediction.analysis.rankings import RankingAnalysis
from bothways.prediction.analysis.scores import ScoreAnalysis
from bothways.prediction.analysis.tags import TagAnalysis
from bothways.tasks.base import TaskLearner
from bothways.tasks.catalogue import AnyTask
from bothways.tasks.choice.task import ChoiceTask
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.likelihood.minimal_pairs import MinimalPairTask
from bothways.tasks.likelihood.task import LikelihoodTask
from bothways.tasks.mask_filling.task import MaskFillingTask
from bothways.tasks.multilabel.task import MultilabelTask
from bothways.tasks.question_answering.task import QuestionAnsweringTask
from bothways.tasks.regression.task import RegressionTask
from bothways.tasks.reranking.task import RerankingTask
from bothways.tasks.sentence_embedding.task import SentenceEmbeddingTask
from bothways.tasks.tagging.task import TaggingTask


def analysis_of(learner: TaskLearner[Any, Any]) -> TaskAnalysis[Any, Any]:
    """Return an empty analysis for a task.

    Raises:
        ConfigError: the task has no right and wrong answers.
    """
    task, labels = cast(AnyTask, learner.task), learner.labels
    match task:
        case ClassificationTask():
            return ClassAnalysis(labels)
        case RegressionTask():
            return ScoreAnalysis()
        case MultilabelTask():
            return LabelSetAnalysis(labels)
        case ChoiceTask():
            return ChoiceAnalysis()
        case TaggingTask():
            return TagAnalysis(task, labels)
        case QuestionAnsweringTask():
            return AnswerAnalysis()
        case RerankingTask():
            return RankingAnalysis()
        case MaskFillingTask() | LikelihoodTask() | MinimalPairTask() | SentenceEmbeddingTask():
            what = f"there is no report on the task {task.name}"
            fix = "Leave it out; evaluate prints the metrics."
            raise ConfigError(what, where="report", fix=fix)
        case _:
            assert_never(task)
