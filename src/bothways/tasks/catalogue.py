"""All tasks by name: the one place that a new task is entered in."""

from __future__ import annotations

from typing import get_args

from bothways.tasks.classify import Classification

Trainable = Classification
"""The definitions that a model can be fine-tuned for."""

AnyDefinition = Trainable
"""Every definition."""

TASKS: dict[str, type[Trainable]] = {"classify": Classification}
"""The trainable ones by kind."""
DEFINITIONS: tuple[type[AnyDefinition], ...] = get_args(AnyDefinition) or (Classification,)
"""Their types. A folder that does not say what it is for is for the first one whose heads it has."""
