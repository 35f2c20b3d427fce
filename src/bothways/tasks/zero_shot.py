"""The common part of tasks that a pre-trained model does with its masked head, without training."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from bothways.core.advice import argument
from bothways.core.batch import Batch
from bothways.core.errors import DataError
from bothways.model.heads import Head, MaskedHead
from bothways.model.model import Model
from bothways.tasks.base import P, Reading
from bothways.tasks.text_task import TextColumns, TextExample, TextTask

ROWS = 1024
"""Number of positions whose logits over the vocabulary are in memory at once."""


@dataclass(frozen=True)
class MaskedTask(TextTask[P]):
    """A task on single texts for the masked head. Its metric, if any, does not select weights."""

    def read(
        self, source: str, columns: TextColumns | None = None, *, labelled: bool = True
    ) -> Reading[TextExample]:
        """Open a source and stream its texts; labels are not read."""
        return super().read(source, columns, labelled=False)

    def check_columns(self, columns: TextColumns, where: str) -> None:
        """Raise a DataError for a second text."""
        if columns.text_b is not None:
            message = f"has two texts a row, {columns.text!r} and {columns.text_b!r}; one is read"
            raise DataError(message, where=where, fix=f"Name one: {argument(text='NAME')}.")

    def heads(self, labels: Many[str], dropout: float | None) -> tuple[Head, ...]:
        """Return the masked head."""
        return (MaskedHead(),)


def vocabulary_logits(model: Model, batch: Batch, rows: Tensor) -> Iterator[Tensor]:
    """Yield the masked head's logits at these positions, `ROWS` at a time `(part, vocab)`."""
    hidden = model.encoder(batch, only=rows)
    x = model.before_masked(batch, hidden, rows)
    for chunk in torch.split(rows, ROWS):
        yield model.heads["masked"](x[chunk], hidden.table).float()
