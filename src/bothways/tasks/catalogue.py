"""All tasks: the one place that a new task is entered in."""

from __future__ import annotations

from typing import Any, get_args

from bothways.tasks.choice.task import ChoiceTask
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.likelihood.task import LikelihoodTask
from bothways.tasks.mask_filling.task import MaskFillingTask
from bothways.tasks.multilabel.task import MultilabelTask
from bothways.tasks.question_answering.task import QuestionAnsweringTask
from bothways.tasks.regression.task import RegressionTask
from bothways.tasks.sentence_embedding.task import SentenceEmbeddingTask
from bothways.tasks.tagging.task import TaggingTask

Trainable = (
    ClassificationTask
    | RegressionTask
    | MultilabelTask
    | ChoiceTask
    | TaggingTask
    | QuestionAnsweringTask
)
"""The definitions that a model can be fine-tuned for."""

AnyDefinition = Trainable | MaskFillingTask | LikelihoodTask | SentenceEmbeddingTask
"""Every definition. Those after the trainable ones need no fine-tuning."""


def _members(union: Any) -> tuple[type[Any], ...]:
    return get_args(union) or (union,)


TASKS: dict[str, type[Trainable]] = {cls().name: cls for cls in _members(Trainable)}
"""The trainable ones by kind. A folder that does not say what it is for is for the first one whose heads it has."""
DEFINITIONS: tuple[type[AnyDefinition], ...] = _members(AnyDefinition)
"""Every one."""
