"""What commands let one choose from, spelled out so that the command line starts without the library behind it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from cyclopts import Parameter

FineTask = Literal["classify", "regress", "multilabel", "choice", "tag", "answer"]
"""Tasks that a model can be fine-tuned for: the keys of `tasks.catalogue.TASKS`."""
AnyTask = Literal[
    "classify", "regress", "multilabel", "choice", "tag", "answer", "fill", "likelihood", "embed"
]
"""Every task: the kinds of `tasks.catalogue.AnyDefinition`."""


def _check_names(kind: object, names: str | Iterable[str] | None) -> None:
    """ValueError: an option that there is not."""
    for name in [names] if isinstance(names, str) else names or ():
        if name.startswith("-") and name != "-":
            raise ValueError(f"Unknown option: {name}")


INPUTS = Parameter(negative_iterable="", allow_leading_hyphen=True, validator=_check_names)
"""How a command takes names of files, "-" among them."""
