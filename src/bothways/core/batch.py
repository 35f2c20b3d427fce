"""Sequences packed end to end, and targets: the values that a training module predicts of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from bothways.core.layout import LOOSE, Layout, Move, RectanglePolicy, onto
from bothways.core.sequence import Sequence

IGNORED = -100
"""The label that carries no weight."""


TargetsT = TypeVar("TargetsT", bound="Targets")


@dataclass(frozen=True)
class Targets:
    """The values an objective predicts: NumPy arrays for a sequence, tensors for a packed batch.

    `POSITIONS` names the fields that hold token positions: packing adds the start of the sequence
    to them. Other fields are concatenated unchanged.
    """

    POSITIONS: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def pack(cls: type[TargetsT], targets: Many[TargetsT], starts: Many[int]) -> TargetsT:
        """Concatenate the targets of sequences that begin at the tokens `starts` of a batch."""
        joined: dict[str, Tensor] = {}
        for field in dataclasses.fields(cls):
            columns = [getattr(target, field.name) for target in targets]
            if field.name in cls.POSITIONS:
                columns = [column + start for column, start in zip(columns, starts, strict=True)]
            joined[field.name] = torch.from_numpy(np.concatenate(columns))
        return cls(**joined)

    def apply(self: TargetsT, move: Move) -> TargetsT:
        """Return the same targets with every tensor moved."""
        return type(self)(
            **{field.name: move(getattr(self, field.name)) for field in dataclasses.fields(self)}
        )

    def without_weight(self: TargetsT) -> TargetsT:
        """Return targets that add nothing to the loss, for a rank without sequences in a step."""
        raise NotImplementedError


def target_of(targets: Mapping[str, Targets], name: str, cls: type[TargetsT]) -> TargetsT:
    """Return `targets[name]` as a `cls`; KeyError or TypeError if it is missing or another type."""
    target = targets[name]
    if not isinstance(target, cls):
        raise TypeError(f"targets {name!r} are {type(target).__name__}, not {cls.__name__}")
    return target


@dataclass(frozen=True)
class TokenTargets(Targets):
    """Tokens to predict: `index` holds their positions, `ids` their ids, both `(n)`."""

    POSITIONS = frozenset({"index"})
    index: NDArray[np.int64] | Tensor
    ids: NDArray[np.int64] | Tensor

    def without_weight(self) -> TokenTargets:
        """Return targets without tokens."""
        return type(self)(self.index[:0], self.ids[:0])


def next_tokens(ids: NDArray[np.int32]) -> TokenTargets:
    """Return the targets of a left-to-right model: at each token but the last, the next one."""
    return TokenTargets(np.arange(len(ids) - 1), ids[1:].astype(np.int64))


@dataclass(frozen=True)
class LabelTargets(Targets):
    """One label per sequence, `(1)`: a class of int64, or a score of float32.

    `IGNORED` and NaN carry no weight.
    """

    labels: NDArray[Any] | Tensor

    def without_weight(self) -> LabelTargets:
        """Return unknown labels."""
        empty = IGNORED if np.issubdtype(np.asarray(self.labels).dtype, np.integer) else np.nan
        return type(self)(np.full_like(self.labels, empty))


@dataclass(frozen=True)
class MultilabelTargets(Targets):
    """One row of labels per sequence, `(1, labels)` of float32: 1 where a label applies, else 0.

    NaN carries no weight.
    """

    labels: NDArray[np.float32] | Tensor

    def without_weight(self) -> MultilabelTargets:
        """Return unknown labels."""
        return type(self)(np.full_like(self.labels, np.nan))


@dataclass(frozen=True)
class WindowWeight(Targets):
    """The weight of a sequence's label, `(1)`: 1/n for each of the n windows of a text."""

    weight: NDArray[np.float32] | Tensor

    def without_weight(self) -> WindowWeight:
        """Return the weight 0."""
        return type(self)(np.zeros_like(self.weight))


@dataclass(frozen=True)
class SpanTargets(Targets):
    """The first and last token of an answer, `(1)` each, and its `weight`: 1, or 0 without one."""

    POSITIONS = frozenset({"start", "end"})
    start: NDArray[np.int64] | Tensor
    end: NDArray[np.int64] | Tensor
    weight: NDArray[np.float32] | Tensor

    def without_weight(self) -> SpanTargets:
        """Return the same spans with weight 0."""
        return type(self)(self.start, self.end, np.zeros_like(self.weight))


@dataclass(frozen=True)
class ChoiceTargets(Targets):
    """The number of choices `counts` and the index of the right one, `labels`: `(1)` each.

    `IGNORED` carries no weight.
    """

    counts: NDArray[np.int64] | Tensor
    labels: NDArray[np.int64] | Tensor

    def without_weight(self) -> ChoiceTargets:
        """Return unknown labels."""
        return type(self)(self.counts, np.full_like(self.labels, IGNORED))


@dataclass(frozen=True)
class Batch:
    """Packed model input: ids `(tokens)`, segments `(tokens)`, layout, targets by objective.

    `global_attention_mask` is True for global tokens `(tokens)`; None if there are none.
    """

    ids: Int[Tensor, " tokens"]
    segments: Int[Tensor, " tokens"]
    layout: Layout
    targets: Mapping[str, Targets] = dataclasses.field(default_factory=dict)
    global_attention_mask: Bool[Tensor, " tokens"] | None = None

    def target(self, name: str, cls: type[TargetsT]) -> TargetsT:
        """Return the targets called `name`, which must be of type `cls`; its arrays are tensors.

        Raises:
            KeyError: the batch has no such targets.
            TypeError: they are of another type.
        """
        return target_of(self.targets, name, cls)

    def split(self, x: Float[Tensor, "tokens ..."]) -> tuple[Tensor, ...]:
        """Return the rows of each sequence, of a tensor with a row for each token.

        `torch.nn.utils.rnn.pad_sequence(batch.split(x), batch_first=True)` pads them.
        """
        return torch.split(x, self.layout.lengths)

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on a device: itself, with its layout's caches, if already there."""
        target = torch.device(device)
        return self if self.ids.device == target else self._apply(onto(target))

    def pinned(self) -> Batch:
        """Return the batch in pinned memory, from which a GPU copies asynchronously."""
        return self._apply(Tensor.pin_memory)

    def _apply(self, move: Move) -> Batch:
        targets = {name: target.apply(move) for name, target in self.targets.items()}
        mask = self.global_attention_mask
        mask = None if mask is None else move(mask)
        layout = self.layout.apply(move)
        return Batch(move(self.ids), move(self.segments), layout, targets, mask)


def pack(sequences: Many[Sequence], cut: RectanglePolicy = LOOSE) -> Batch:
    """Pack sequences into one batch, in this order; all must have targets of the same names.

    Args:
        cut: the policy by which attention kernels cut the batch into rectangles.
    """
    layout = Layout.of([length for s in sequences for length in s.parts or (len(s.ids),)], cut)
    starts = [0, *itertools.accumulate(len(s.ids) for s in sequences)][:-1]
    targets = {
        name: type(example).pack([s.targets[name] for s in sequences], starts)
        for name, example in (sequences[0].targets.items() if sequences else ())
    }
    return Batch(
        torch.from_numpy(np.concatenate([s.ids for s in sequences]).astype(np.int64)),
        torch.from_numpy(np.concatenate([s.segments for s in sequences]).astype(np.int64)),
        layout,
        targets,
        _global_attention_mask(sequences),
    )


def _global_attention_mask(sequences: Many[Sequence]) -> Tensor | None:
    if all(s.global_attention_mask is None for s in sequences):
        return None
    masks = [
        np.zeros(len(s), dtype=np.bool_)
        if s.global_attention_mask is None
        else s.global_attention_mask
        for s in sequences
    ]
    return torch.from_numpy(np.concatenate(masks))
