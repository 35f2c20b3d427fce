"""A finite list of sequences as a stream: data for fine-tuning and evaluation."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_never

from bothways.core.errors import DataError
from bothways.core.keyed_rng import rng
from bothways.core.sequence import Sequence

if TYPE_CHECKING:
    from bothways.core.source import Cursor


@dataclass(frozen=True)
class Shuffled:
    """A different order in each epoch, keyed by the seed."""

    seed: int


@dataclass(frozen=True)
class InOrder:
    """The order of the list in each epoch."""


class ListPlan(NamedTuple):
    """The position of a sequence in the list."""

    row: int
    length: int


class ListSource:
    """Sequences in memory as an endless stream (a `core.source.Source`); an epoch is one block."""

    def __init__(self, sequences: Many[Sequence], order: Shuffled | InOrder) -> None:
        """Raise DataError if there are no sequences."""
        if not sequences:
            raise DataError("there are no sequences to read", fix="Give at least one example.")
        self.sequences = sequences
        self._places = functools.lru_cache(maxsize=2)(
            functools.partial(_places, order, len(sequences))
        )

    def read(self, cursor: Cursor) -> Iterator[tuple[ListPlan, Cursor]]:
        """Yield plans from `cursor` on, each with the cursor of the next.

        Raises:
            DataError: the cursor belongs to a longer list.
        """
        from bothways.core.source import Cursor

        epoch, block, item, _ = cursor
        if block > 0 or item >= len(self.sequences):
            message = f"no data at block {block}, item {item} of {len(self.sequences)} sequences"
            raise DataError(message, fix="Continue with the data that the run began with.")
        while True:
            indices = self._places(epoch)
            for at in range(item, len(indices)):
                next_cursor = (
                    Cursor(epoch, 0, at + 1) if at + 1 < len(indices) else Cursor(epoch + 1)
                )
                yield ListPlan(int(indices[at]), len(self.sequences[indices[at]])), next_cursor
            epoch, item = epoch + 1, 0

    def build(self, plan: ListPlan) -> Sequence:
        """Return the sequence."""
        return self.sequences[plan.row]

    def key(self, cursor: Cursor) -> tuple[int, int]:
        """Return the key of the draws for the sequence at a cursor."""
        return cursor.epoch, cursor.number

    def epochs(self, cursor: Cursor) -> float:
        """Return the epochs before this cursor, counted in sequences."""
        return cursor.epoch + cursor.item / len(self.sequences)


def _places(order: Shuffled | InOrder, count: int, epoch: int) -> NDArray[np.int64]:
    match order:
        case Shuffled(seed):
            return rng(seed, "order", epoch=epoch).permutation(count)
        case InOrder():
            return np.arange(count)
        case _:
            assert_never(order)
