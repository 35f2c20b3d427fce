"""Which analyst looks at which task: the one place that a new kind of prediction is entered in."""

from __future__ import annotations

from typing import Any, cast

from typing_extensions import assert_never

from bothways.core.errors import ConfigError
from bothways.recipes.analysis.analyst import Analyst
from bothways.recipes.analysis.answers import Answers
from bothways.recipes.analysis.choices import Choices
from bothways.recipes.analysis.classes import Classes
from bothways.recipes.analysis.labels import LabelSets
from bothways.recipes.analysis.scores import Scores
from bothways.recipes.analysis.tags import Tags
from bothways.tasks.answer import Answering
from bothways.tasks.catalogue import AnyDefinition
from bothways.tasks.choice import MultipleChoice
from bothways.tasks.classify import Classification
from bothways.tasks.embed import Embedding
from bothways.tasks.fill import Filling
from bothways.tasks.likelihood import Likelihood
from bothways.tasks.multilabel import MultiLabel
from bothways.tasks.regress import Regression
from bothways.tasks.tag import Tagging
from bothways.tasks.task import Task


def analyst_of(task: Task[Any, Any]) -> Analyst[Any, Any]:
    """The analyst of a task's definition. ConfigError for a task whose answers are neither right nor wrong."""
    definition = cast(AnyDefinition, task.definition)
    match definition:
        case Classification():
            return Classes(task.labels)
        case Regression():
            return Scores()
        case MultiLabel():
            return LabelSets(task.labels)
        case MultipleChoice():
            return Choices()
        case Tagging():
            return Tags(definition, task.labels)
        case Answering():
            return Answers()
        case Filling() | Likelihood() | Embedding():
            what = f"there is no report on the task {definition.name}"
            raise ConfigError(what, where="report", fix="Leave it out; evaluate prints the metrics.")
        case _:
            assert_never(definition)
