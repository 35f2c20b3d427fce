"""All tasks: the one place that a new task is entered in."""

from __future__ import annotations

from typing import Any, get_args

from bothways.tasks.classify import Classification

Trainable = Classification
"""The definitions that a model can be fine-tuned for."""

AnyDefinition = Trainable
"""Every definition."""


def _members(union: Any) -> tuple[type[Any], ...]:
    return get_args(union) or (union,)


TASKS: dict[str, type[Trainable]] = {cls().name: cls for cls in _members(Trainable)}
"""The trainable ones by kind."""
DEFINITIONS: tuple[type[AnyDefinition], ...] = _members(AnyDefinition)
"""Every one. A folder that does not say what it is for is for the first one whose heads it has."""
