"""A finite list of sequences as a stream: data for fine-tuning and evaluation."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence as Many
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bothways.core.errors import DataError
from bothways.core.sequence import Sequence
from bothways.core.source import rng

if TYPE_CHECKING:
    from bothways.core.source import Cursor


class ListPlan(NamedTuple):
    """The position of a sequence in the list."""

    row: int
    length: int


class ListSource:
    """Sequences in memory as an endless stream (a `core.source.Source`); an epoch is one block."""

    def __init__(self, sequences: Many[Sequence], seed: int | None) -> None:
        """Read sequences in a different order in each epoch, or as they are listed without a seed.

        Raises:
            DataError: there are no sequences.
        """
        if not sequences:
            raise DataError("there are no sequences to read", fix="Give at least one example.")
        self.sequences = sequences
        self._places = functools.lru_cache(maxsize=2)(functools.partial(_places, seed))

    def read(self, cursor: Cursor) -> Iterator[tuple[ListPlan, Cursor]]:
        """Yield plans from `cursor` on, each with the cursor of the next.

        Raises:
            DataError: the cursor belongs to a longer list.
        """
        from bothways.core.source import Cursor

        epoch, block, item, _ = cursor
        # A list has one block; another cursor is of other data.
        if block > 0 or item >= len(self.sequences):
            message = f"no data at block {block}, item {item} of {len(self.sequences)} sequences"
            raise DataError(message, fix="Continue with the data that the run began with.")
        while True:
            indices = self._places(len(self.sequences), epoch)
            for at, row in enumerate(indices[item:].tolist(), item + 1):
                next_cursor = Cursor(epoch, 0, at) if at < len(indices) else Cursor(epoch + 1)
                yield ListPlan(row, len(self.sequences[row])), next_cursor
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


def _places(seed: int | None, count: int, epoch: int) -> NDArray[np.int64]:
    if seed is None:
        return np.arange(count)
    return rng(seed, "order", epoch=epoch).permutation(count)
