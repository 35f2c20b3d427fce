"""The protocols between the parts: what a model is to a trainer, and what data is to a loader."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from torch import nn
from typing_extensions import TypeVar

from bothways.core.batch import Batch
from bothways.core.loss import Loss
from bothways.core.sequence import Sequence


class Learner(nn.Module):
    """A model that knows its losses. Subclasses define `prepare`, `weights` and `forward`."""

    @property
    def partial(self) -> bool:
        """Whether a batch may leave some parameters without a gradient: a module with such parameters has a true `partial`."""
        return any(getattr(part, "partial", False) for part in [*self.modules()][1:])

    def prepare(self, sequence: Sequence, rng: np.random.Generator) -> Sequence:
        """The sequence as this learner wants it (masked, say), with targets. CPU only, pure: equal draws give equal results."""
        raise NotImplementedError

    def weights(self, batch: Batch) -> dict[str, float]:
        """How much each loss sums up on this batch, on the CPU: its targets or their weights, known before any computation."""
        raise NotImplementedError

    def forward(self, batch: Batch) -> Mapping[str, Loss]:
        """The losses by name; the same names as `weights`."""
        raise NotImplementedError


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """While it is open the module is in evaluation mode, without dropout; then in the mode that it had."""
    mode = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(mode)


class Cursor(NamedTuple):
    """A place in an endless stream of epochs: all that a resumed run has to know of its data."""

    epoch: int = 0
    block: int = 0
    item: int = 0


@runtime_checkable
class Plan(Protocol):
    """What a source knows of a sequence before it is built."""

    @property
    def length(self) -> int:
        """Its tokens, specials included."""
        ...


P = TypeVar("P", bound=Plan, default=Plan)
"""The kind of plan that a source makes and builds."""


@runtime_checkable
class Source(Protocol[P]):
    """A stream of sequences that can start anywhere."""

    @property
    def views(self) -> int | None:
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
class Step(Protocol):
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
