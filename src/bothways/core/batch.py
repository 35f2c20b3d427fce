"""Sequences packed end to end, with their targets."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Int
from numpy.typing import NDArray
from torch import Tensor

from bothways.core.layout import LOOSE, Cut, Layout, Move, onto
from bothways.core.sequence import Sequence

IGNORED = -100
"""The label that carries no weight."""


Kind = TypeVar("Kind", bound="Targets")


@dataclass(frozen=True)
class Targets:
    """What an objective is to predict: NumPy arrays for one sequence, tensors for a packed batch.

    A field that is named in `POSITIONS` holds token positions: packing shifts it by the start of its sequence.
    All others are joined as they are.
    """

    POSITIONS: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def pack(cls: type[Kind], parts: Many[Kind], starts: Many[int]) -> Kind:
        """Targets of sequences that begin at these tokens → targets of the batch."""
        joined: dict[str, Tensor] = {}
        for field in dataclasses.fields(cls):
            columns = [getattr(part, field.name) for part in parts]
            if field.name in cls.POSITIONS:
                columns = [column + start for column, start in zip(columns, starts, strict=True)]
            joined[field.name] = torch.from_numpy(np.concatenate(columns))
        return cls(**joined)

    def apply(self: Kind, move: Move) -> Kind:
        """The same targets of a batch, moved."""
        return type(self)(**{field.name: move(getattr(self, field.name)) for field in dataclasses.fields(self)})

    def void(self: Kind) -> Kind:
        """The same targets without weight: what fills the place of a rank that has no sequence left in a step."""
        raise NotImplementedError


@dataclass(frozen=True)
class TokenTargets(Targets):
    """`index`: positions of the tokens to predict. `ids`: what stood there. Both of one length."""

    POSITIONS = frozenset({"index"})
    index: NDArray[np.int64] | Tensor
    ids: NDArray[np.int64] | Tensor

    def void(self) -> TokenTargets:
        """Nothing to predict."""
        return type(self)(self.index[:0], self.ids[:0])


@dataclass(frozen=True)
class LabelTargets(Targets):
    """`labels`: one per sequence, a class `(1)` of int64 or a score of float32; `IGNORED` and NaN carry no weight."""

    labels: NDArray[Any] | Tensor

    def void(self) -> LabelTargets:
        """Labels that nobody knows."""
        empty = IGNORED if np.issubdtype(np.asarray(self.labels).dtype, np.integer) else np.nan
        return type(self)(np.full_like(self.labels, empty))


@dataclass(frozen=True)
class MultiTargets(Targets):
    """`labels`: for each label of a sequence 1 where it holds, else 0 `(1, labels)`, of float32; NaN carries no weight."""

    labels: NDArray[np.float32] | Tensor

    def void(self) -> MultiTargets:
        """Labels that nobody knows."""
        return type(self)(np.full_like(self.labels, np.nan))


@dataclass(frozen=True)
class SpanTargets(Targets):
    """`start`, `end`: first and last token of an answer `(1)`. `weight`: 1 where there is one to learn, else 0 `(1)`."""

    POSITIONS = frozenset({"start", "end"})
    start: NDArray[np.int64] | Tensor
    end: NDArray[np.int64] | Tensor
    weight: NDArray[np.float32] | Tensor

    def void(self) -> SpanTargets:
        """The same spans, with no weight."""
        return type(self)(self.start, self.end, np.zeros_like(self.weight))


@dataclass(frozen=True)
class ChoiceTargets(Targets):
    """`counts`: how many texts are to be chosen from `(1)`. `labels`: which is right `(1)`; `IGNORED` carries no weight."""

    counts: NDArray[np.int64] | Tensor
    labels: NDArray[np.int64] | Tensor

    def void(self) -> ChoiceTargets:
        """Labels that nobody knows."""
        return type(self)(self.counts, np.full_like(self.labels, IGNORED))


@dataclass(frozen=True)
class Batch:
    """Packed model input: ids `(tokens)`, segments `(tokens)`, layout, targets by objective.

    `everywhere`: True for global tokens `(tokens)`, for encoders that have them; none if there is none.
    """

    ids: Int[Tensor, " tokens"]
    segments: Int[Tensor, " tokens"]
    layout: Layout
    targets: Mapping[str, Targets] = dataclasses.field(default_factory=dict)
    everywhere: Bool[Tensor, " tokens"] | None = None

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; itself, with what its layout has worked out, where it lies there already."""
        return self if self.ids.device == device else self._apply(onto(device))

    def pinned(self) -> Batch:
        """The same batch in memory from which a GPU reads while both go on working."""
        return self._apply(Tensor.pin_memory)

    def _apply(self, move: Move) -> Batch:
        targets = {name: target.apply(move) for name, target in self.targets.items()}
        everywhere = None if self.everywhere is None else move(self.everywhere)
        return Batch(move(self.ids), move(self.segments), self.layout.apply(move), targets, everywhere)


def pack(sequences: Many[Sequence], cut: Cut = LOOSE) -> Batch:
    """Sequences → one batch, in the order given, that falls apart as `cut` says. All must have targets of the same names."""
    layout = Layout.of([length for s in sequences for length in s.parts or (len(s),)], cut)
    starts = [0, *itertools.accumulate(len(s) for s in sequences)][:-1]
    targets = {
        name: type(first).pack([s.targets[name] for s in sequences], starts)
        for name, first in (sequences[0].targets.items() if sequences else ())
    }
    return Batch(
        torch.from_numpy(np.concatenate([s.ids for s in sequences]).astype(np.int64)),
        torch.from_numpy(np.concatenate([s.segments for s in sequences]).astype(np.int64)),
        layout,
        targets,
        _everywhere(sequences),
    )


def _everywhere(sequences: Many[Sequence]) -> Tensor | None:
    if all(s.everywhere is None for s in sequences):
        return None
    return torch.from_numpy(
        np.concatenate([np.zeros(len(s), dtype=np.bool_) if s.everywhere is None else s.everywhere for s in sequences])
    )
