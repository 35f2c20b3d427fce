"""What tasks share that a pre-trained model does as it is: texts without labels, and nothing to learn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Many
from typing import Any, ClassVar

import torch
from torch import Tensor

from bothways.core.batch import Batch
from bothways.core.errors import DataError
from bothways.core.finding import Finding
from bothways.model.model import Model
from bothways.tasks.task import Direction, P, Reading, Task
from bothways.tasks.text_examples import (
    NOT_NAMED,
    TextColumns,
    TextExample,
    example_of,
    open_examples,
)

ROWS = 1024
"""Positions whose logits over the whole vocabulary are held at once."""


class ZeroShotTask(Task[TextExample, P]):
    """A task that needs no fine-tuning. Its metric, if it has one, chooses no weights; two precisions are compared by it."""

    metric: ClassVar[str] = ""

    def read(
        self, source: str, asked: TextColumns | None = None, *, labelled: bool = True
    ) -> Reading[TextExample]:
        """As `Definition.read`, one text a row; DataError for two where none of them is asked for."""
        own: TextColumns = self.columns  # type: ignore[attr-defined]
        table, chosen = open_examples(source, asked or NOT_NAMED, usual=own, labelled=False)
        if chosen.text_b is not None:
            what = f"has two texts a row, {chosen.text!r} and {chosen.text_b!r}, where one is read"
            raise DataError(what, where=table.where, fix="Name one: --text NAME.")
        return Reading(
            self.with_columns(chosen), (example_of(row, chosen) for row in table.rows), table.share
        )

    def labels(self, examples: Iterable[TextExample]) -> tuple[str, ...]:
        """None."""
        return ()

    def directions(self, labels: Many[str]) -> Mapping[str, Direction]:
        """None."""
        return {}

    def texts(self, example: TextExample) -> tuple[str, ...]:
        """One text or two."""
        return (example.text,) if example.text_b is None else (example.text, example.text_b)

    def check(self, train: Many[Any], dev: Many[Any]) -> list[Finding]:
        """Nothing: there is no training."""
        return []


def vocabulary_logits(model: Model, batch: Batch, rows: Tensor) -> Iterator[Tensor]:
    """The masked head's logits at these positions of a batch, `ROWS` at a time `(part, vocab)`; nowhere else."""
    hidden = model.encoder(batch, only=rows)
    x = model.before_masked(batch, hidden, rows)
    for part in torch.split(rows, ROWS):
        yield model.heads["masked"](x[part], hidden.table).float()


def counts_of(owners: Tensor, sequences: int) -> list[int]:
    """How many targets each sequence of a batch has, from the sequence that each target is in."""
    return torch.bincount(owners, minlength=sequences).tolist()
