"""Targets: the values that a learner predicts, for one sequence and for a packed batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bothways.core.layout import Move

IGNORED = -100
"""The label that carries no weight."""


TargetsT = TypeVar("TargetsT", bound="Targets")


@dataclass(frozen=True)
class Targets:
    """What an objective is to predict: NumPy arrays for one sequence, tensors for a packed batch.

    A field that is named in `POSITIONS` holds token positions: packing shifts it by the start of its sequence.
    All others are joined as they are.
    """

    POSITIONS: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def pack(cls: type[TargetsT], parts: Many[TargetsT], starts: Many[int]) -> TargetsT:
        """Targets of sequences that begin at these tokens → targets of the batch."""
        joined: dict[str, Tensor] = {}
        for field in dataclasses.fields(cls):
            columns = [getattr(part, field.name) for part in parts]
            if field.name in cls.POSITIONS:
                columns = [column + start for column, start in zip(columns, starts, strict=True)]
            joined[field.name] = torch.from_numpy(np.concatenate(columns))
        return cls(**joined)

    def apply(self: TargetsT, move: Move) -> TargetsT:
        """The same targets of a batch, moved."""
        return type(self)(
            **{field.name: move(getattr(self, field.name)) for field in dataclasses.fields(self)}
        )

    def without_weight(self: TargetsT) -> TargetsT:
        """The same targets without weight: what fills the place of a rank that has no sequence left in a step."""
        raise NotImplementedError


def target_of(targets: Mapping[str, Targets], name: str, cls: type[TargetsT]) -> TargetsT:
    """Return `targets[name]` as a `cls`; KeyError or TypeError if it is missing or another type."""
    target = targets[name]
    if not isinstance(target, cls):
        raise TypeError(f"targets {name!r} are {type(target).__name__}, not {cls.__name__}")
    return target


@dataclass(frozen=True)
class TokenTargets(Targets):
    """`index`: positions of the tokens to predict. `ids`: what stood there. Both of one length."""

    POSITIONS = frozenset({"index"})
    index: NDArray[np.int64] | Tensor
    ids: NDArray[np.int64] | Tensor

    def without_weight(self) -> TokenTargets:
        """Nothing to predict."""
        return type(self)(self.index[:0], self.ids[:0])


@dataclass(frozen=True)
class LabelTargets(Targets):
    """`labels`: one per sequence, a class `(1)` of int64 or a score of float32; `IGNORED` and NaN carry no weight."""

    labels: NDArray[Any] | Tensor

    def without_weight(self) -> LabelTargets:
        """Labels that nobody knows."""
        empty = IGNORED if np.issubdtype(np.asarray(self.labels).dtype, np.integer) else np.nan
        return type(self)(np.full_like(self.labels, empty))


@dataclass(frozen=True)
class MultilabelTargets(Targets):
    """`labels`: for each label of a sequence 1 where it holds, else 0 `(1, labels)`, of float32; NaN carries no weight."""

    labels: NDArray[np.float32] | Tensor

    def without_weight(self) -> MultilabelTargets:
        """Labels that nobody knows."""
        return type(self)(np.full_like(self.labels, np.nan))


@dataclass(frozen=True)
class SpanTargets(Targets):
    """`start`, `end`: first and last token of an answer `(1)`. `weight`: 1 where there is one to learn, else 0 `(1)`."""

    POSITIONS = frozenset({"start", "end"})
    start: NDArray[np.int64] | Tensor
    end: NDArray[np.int64] | Tensor
    weight: NDArray[np.float32] | Tensor

    def without_weight(self) -> SpanTargets:
        """The same spans, with no weight."""
        return type(self)(self.start, self.end, np.zeros_like(self.weight))


@dataclass(frozen=True)
class ChoiceTargets(Targets):
    """`counts`: how many texts are to be chosen from `(1)`. `labels`: which is right `(1)`; `IGNORED` carries no weight."""

    counts: NDArray[np.int64] | Tensor
    labels: NDArray[np.int64] | Tensor

    def without_weight(self) -> ChoiceTargets:
        """Labels that nobody knows."""
        return type(self)(self.counts, np.full_like(self.labels, IGNORED))
