"""Choices of the commands, spelled out so that the command line starts without heavy imports."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from cyclopts import Parameter

FineTask = Literal["classify", "regress", "multilabel", "choice", "tag", "answer"]
"""Tasks for fine-tuning: the keys of `tasks.catalogue.TASKS`."""
AnyTask = Literal[
    "classify", "regress", "multilabel", "choice", "tag", "answer", "fill", "likelihood", "embed"
]
"""Every task: the kinds of `tasks.catalogue.AnyTask`."""


def _check_names(kind: object, names: str | Iterable[str] | None) -> None:
    """Raise ValueError for an unknown option."""
    for name in [names] if isinstance(names, str) else names or ():
        if name.startswith("-") and name != "-":
            raise ValueError(f"Unknown option: {name}")


INPUTS = Parameter(negative_iterable="", allow_leading_hyphen=True, validator=_check_names)
"""File names as arguments of a command, including "-"."""
