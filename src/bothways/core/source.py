"""Streams of training data: a cursor in an endless stream, a source of sequences, the data of one update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable

from typing_extensions import TypeVar

from bothways.core.batch import Batch
from bothways.core.sequence import Sequence


class Cursor(NamedTuple):
    """A place in an endless stream of epochs: all that a resumed run has to know of its data."""

    epoch: int = 0
    block: int = 0
    item: int = 0


@runtime_checkable
class SequencePlan(Protocol):
    """What a source knows of a sequence before it is built."""

    @property
    def length(self) -> int:
        """Its tokens, specials included."""
        ...


P = TypeVar("P", bound=SequencePlan, default=SequencePlan)
"""The kind of plan that a source makes and builds."""


@runtime_checkable
class Source(Protocol[P]):
    """A stream of sequences that can start anywhere."""

    @property
    def data_copies(self) -> int | None:
        """After how many epochs the stream repeats itself, draws included (static masking); none if it never does."""
        ...

    def read(self, cursor: Cursor) -> Iterator[tuple[P, Cursor]]:
        """Without end, from `cursor` on: a plan and the cursor of the plan after it. Epoch follows epoch."""
        ...

    def build(self, plan: P) -> Sequence:
        """The sequence of a plan, without what an objective adds."""
        ...

    def epochs(self, cursor: Cursor) -> float:
        """How many epochs lie before this cursor, with a fraction."""
        ...


@runtime_checkable
class TrainingStep(Protocol):
    """What one update reads: this rank's share of the data, and where the data stands after it."""

    @property
    def microbatches(self) -> tuple[Batch, ...]:
        """This rank's batches, on the CPU; at least one, void (without weight) where nothing is left for this rank."""
        ...

    @property
    def cursor(self) -> Cursor:
        """The place from which the next step reads; the same on all ranks, as are the counts below."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens of this step over all ranks, specials included."""
        ...

    @property
    def sequences(self) -> int:
        """Sequences of this step over all ranks."""
        ...

    @property
    def epochs(self) -> float:
        """Epochs that lie before `cursor`, with a fraction."""
        ...
