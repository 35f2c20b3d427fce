"""Which analyst looks at which task: the one place that a new kind of prediction is entered in."""

from __future__ import annotations

from typing import Any, cast

from typing_extensions import assert_never

from bothways.recipes.analysis.analyst import Analyst
from bothways.recipes.analysis.classes import Classes
from bothways.tasks.catalogue import Trainable
from bothways.tasks.classify import Classification
from bothways.tasks.task import Task


def analyst_of(task: Task[Any, Any]) -> Analyst[Any, Any]:
    """The analyst of a task's definition."""
    definition = cast(Trainable, task.definition)
    match definition:
        case Classification():
            return Classes(task.labels)
        case _:
            assert_never(definition)
