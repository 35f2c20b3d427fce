"""Sequences packed end to end, with their targets."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bothways.core.layout import LOOSE, Layout, Move, RectanglePolicy, onto
from bothways.core.sequence import Sequence
from bothways.core.targets import Targets, TargetsT, target_of


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
    layout = Layout.of([length for s in sequences for length in s.parts or (len(s),)], cut)
    starts = [0, *itertools.accumulate(len(s) for s in sequences)][:-1]
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
