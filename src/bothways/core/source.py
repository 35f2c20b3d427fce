"""Sequences, streams of them that start anywhere, and keyed randomness.

A draw depends on its purpose and place, not on earlier draws.

Philox is a block cipher used as a generator: (key, counter) → numbers, without state between
calls. Therefore the data depend neither on the number of workers and ranks nor on resuming.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence as Many
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from bothways.core.batch import Batch, Targets, TargetsT


Ids = NDArray[np.int32]


@dataclass(frozen=True)
class Sequence:
    """An example that must not be split between batches: a text, a pair, or several choices.

    Attributes:
        ids: token ids `(n)`, [CLS] and [SEP] included.
        segments: 0 for A, 1 for B `(n)`.
        targets: by objective.
        parts: the lengths of its texts, which do not attend to each other, such as the choices
            of a question; empty for a single text.
        global_attention_mask: True for global tokens `(n)`; None if there are none.
        word_starts: True where a word begins `(n)`, any value at special tokens; None where the
            vocabulary alone says so.
        causal: whether each token attends to itself and to those before it alone, in an encoder
            that is bidirectional otherwise.
    """

    ids: Ids
    segments: NDArray[np.int8]
    targets: Mapping[str, Targets] = field(default_factory=dict)
    parts: tuple[int, ...] = ()
    global_attention_mask: NDArray[np.bool_] | None = None
    word_starts: NDArray[np.bool_] | None = None
    causal: bool = False

    def __len__(self) -> int:
        return len(self.ids)

    def target(self, name: str, cls: type[TargetsT]) -> TargetsT:
        """Return the targets called `name`, which must be of type `cls`; its arrays are NumPy's."""
        return target_of(self.targets, name, cls)


def target_of(targets: Mapping[str, Targets], name: str, cls: type[TargetsT]) -> TargetsT:
    """Return `targets[name]` as a `cls`; KeyError or TypeError if it is missing or another type."""
    target = targets[name]
    if not isinstance(target, cls):
        raise TypeError(f"targets {name!r} are {type(target).__name__}, not {cls.__name__}")
    return target


def rng(seed: int, purpose: str, *, epoch: int = 0, index: int = 0) -> np.random.Generator:
    """Return the generator for a purpose ("mask", "segments", …) at a place (epoch, index).

    Equal arguments give equal draws.
    """
    digest = hashlib.blake2b(purpose.encode(), digest_size=8).digest()
    key = np.array([seed % 2**64, int.from_bytes(digest, "little")], dtype=np.uint64)
    counter = np.array([0, 0, index, epoch], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


class Cursor(NamedTuple):
    """A place in an endless stream of epochs; a resumed run needs nothing else of its data.

    In a mixture of streams `item` counts all sequences read, and `parts` has the place in each.
    """

    epoch: int = 0
    block: int = 0
    item: int = 0
    parts: tuple[Cursor, ...] = ()

    @property
    def number(self) -> int:
        """A number for the place in the epoch, different for each."""
        return self.block << 32 | self.item

    def at_next_phase(self) -> Cursor:
        """Return the first cursor of a phase that continues the epoch of this one."""
        if not self.parts:
            return Cursor(self.epoch)
        return Cursor(0, 0, self.item, tuple(cursor.at_next_phase() for cursor in self.parts))

    def to_json(self) -> list[Any]:
        """Return plain values, which `from_json` reads."""
        values = [self.epoch, self.block, self.item]
        return [*values, [cursor.to_json() for cursor in self.parts]] if self.parts else values

    @classmethod
    def from_json(cls, values: Many[Any]) -> Cursor:
        """Read the values of `to_json`."""
        epoch, block, item, *nested = values
        return cls(epoch, block, item, tuple(map(cls.from_json, nested[0] if nested else ())))


@runtime_checkable
class Source(Protocol):
    """A stream of sequences that can start anywhere.

    A plan, of any type, describes a sequence that is not built yet. Its `length` is the number of
    tokens, special tokens included.
    """

    def read(self, cursor: Cursor) -> Iterator[tuple[Any, Cursor]]:
        """Yield plans from `cursor` on, epoch after epoch, each with the cursor of the next."""

    def build(self, plan: Any) -> Sequence:
        """Build the sequence of a plan, without the targets that an objective adds."""

    def key(self, cursor: Cursor) -> tuple[int, int]:
        """Return the epoch and the index that key the draws for the sequence at a cursor.

        They repeat where the stream repeats, draws included (static masking).
        """

    def epochs(self, cursor: Cursor) -> float:
        """Return the number of epochs before a cursor, with a fraction."""


@dataclass(frozen=True)
class TrainingStep:
    """The data of one update: this rank's share, and the cursor after it.

    Attributes:
        microbatches: batches of this rank, on the CPU, at least one and the same number on every
            rank; a batch without weight where nothing is left for this rank.
        cursor: the start of the next step; equal on all ranks, as are the counts below.
        tokens, sequences: of this step over all ranks, special tokens included.
        epochs: epochs before `cursor`, with a fraction.
    """

    microbatches: tuple[Batch, ...]
    cursor: Cursor
    tokens: int
    sequences: int
    epochs: float
