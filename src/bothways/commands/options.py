"""What commands let one choose from, spelled out so that the command line starts without the library behind it."""

from __future__ import annotations

from typing import Literal

FineTask = Literal["classify", "regress", "multilabel", "choice", "tag", "answer"]
"""Tasks that a model can be fine-tuned for: the keys of `tasks.catalogue.TASKS`."""
AnyTask = Literal["classify", "regress", "multilabel", "choice", "tag", "answer", "fill", "likelihood", "embed"]
"""Every task: the kinds of `tasks.catalogue.AnyDefinition`."""
