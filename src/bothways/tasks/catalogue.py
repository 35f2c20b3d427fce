"""All tasks: the one place where a new task is registered.

Commands, configurations, reports, files of predictions and routes derive from it.
"""

from __future__ import annotations

from typing import get_args

from bothways.core.errors import ConfigError, call
from bothways.tasks.base import did_you_mean
from bothways.tasks.choice.task import ChoiceTask
from bothways.tasks.classification.task import ClassificationTask, ZeroShotTask
from bothways.tasks.masked_lm.task import LikelihoodTask, MaskFillingTask, MinimalPairTask
from bothways.tasks.multilabel.task import MultilabelTask
from bothways.tasks.question_answering.task import QuestionAnsweringTask
from bothways.tasks.regression.task import RegressionTask
from bothways.tasks.reranking.task import RerankingTask
from bothways.tasks.sentence_embedding.task import SentenceEmbeddingTask
from bothways.tasks.tagging.task import TaggingTask

Trainable = (
    ClassificationTask
    | RegressionTask
    | MultilabelTask
    | ChoiceTask
    | TaggingTask
    | QuestionAnsweringTask
    | RerankingTask
    | SentenceEmbeddingTask
)
"""The tasks that a model can be fine-tuned for."""

AnyTask = Trainable | MaskFillingTask | LikelihoodTask | MinimalPairTask | ZeroShotTask
"""Every task; those after the trainable ones need no fine-tuning."""

TASKS: dict[str, type[Trainable]] = {cls().name: cls for cls in get_args(Trainable)}
"""The trainable tasks by kind. A folder without a record is for the first with its heads."""
ALL_TASKS: dict[str, type[AnyTask]] = {cls().name: cls for cls in get_args(AnyTask)}
"""Every task by kind."""

ALIASES = {alias: kind for kind, task in ALL_TASKS.items() for alias in task.aliases.split()}
"""Common names of tasks, among them the pipelines of transformers, and their kinds here."""


def task_kind(name: str) -> str:
    """Return the kind of the task with this name or alias: "tag" for "tag", "ner" and "NER".

    Raises:
        ConfigError: no task has this name.
    """
    plain = _plain(name)
    kind = ALIASES.get(plain, plain)
    if kind not in ALL_TASKS:
        near = did_you_mean(plain, [*ALL_TASKS, *ALIASES])
        fix = f"The tasks are {', '.join(ALL_TASKS)}."
        raise ConfigError(f"{name!r} is not a task{near}", where="task", fix=fix)
    return kind


def is_task(name: str) -> bool:
    """Return True if a task has this name or alias."""
    return _plain(name) in {*ALL_TASKS, *ALIASES}


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def trainable_task(name: str) -> Trainable:
    """Return the task with this name or alias, with its defaults.

    Raises:
        ConfigError: no task has this name, or models are not fine-tuned for it.
    """
    kind = task_kind(name)
    if kind not in TASKS:
        message = f"{name!r} needs no fine-tuning; models are fine-tuned for {', '.join(TASKS)}"
        fix = f"Name one of these, or predict at once: {call('predict', 'MODEL', task=kind)}"
        raise ConfigError(message, where="task", fix=fix)
    return TASKS[kind]()
