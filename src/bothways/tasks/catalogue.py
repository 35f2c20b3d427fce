"""All tasks: the one place that a new task is entered in."""

from __future__ import annotations

from typing import Any, get_args

from bothways.tasks.answer import Answering
from bothways.tasks.choice import MultipleChoice
from bothways.tasks.classify import Classification
from bothways.tasks.embed import Embedding
from bothways.tasks.fill import Filling
from bothways.tasks.likelihood import Likelihood
from bothways.tasks.multilabel import MultiLabel
from bothways.tasks.regress import Regression
from bothways.tasks.tag import Tagging

Trainable = Classification | Regression | MultiLabel | MultipleChoice | Tagging | Answering
"""The definitions that a model can be fine-tuned for."""

AnyDefinition = Trainable | Filling | Likelihood | Embedding
"""Every definition. Those after the trainable ones need no fine-tuning."""


def _members(union: Any) -> tuple[type[Any], ...]:
    return get_args(union) or (union,)


TASKS: dict[str, type[Trainable]] = {cls().name: cls for cls in _members(Trainable)}
"""The trainable ones by kind. A folder that does not say what it is for is for the first one whose heads it has."""
DEFINITIONS: tuple[type[AnyDefinition], ...] = _members(AnyDefinition)
"""Every one."""
