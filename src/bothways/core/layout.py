"""The geometry of a packed batch: where each sequence begins, and how to lay it out as padded rectangles.

Packed tokens `(tokens, …)` are the only shape that the model knows. A padded rectangle exists inside one attention kernel and
at the edge of an export, nowhere else.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

Move = Callable[[Tensor], Tensor]
"""Gives the same tensor elsewhere: on a device, in pinned memory."""


def onto(device: torch.device) -> Move:
    """To a device, without waiting where that need not be."""
    return lambda x: x.to(device, non_blocking=True)


@dataclass(frozen=True)
class RectanglePolicy:
    """Where a new rectangle begins: with a sequence by which it would have both too much padding and a certain size.

    Attributes:
        tightness: of the longest sequence, the share that a shorter one must have.
        small: slots up to which a rectangle may be less tight, since starting another one costs more than the padding.
    """

    tightness: float = 0.8
    small: int = 1024


LOOSE = RectanglePolicy()
"""For training, and wherever starting an operation takes long."""
EQUAL = RectanglePolicy(1.0, 0)
"""Sequences of one length alone: nothing is padded, and nothing masked for it."""


def cut_to_predict(device: torch.device) -> RectanglePolicy:
    """On a CPU, where operations start in microseconds, padding and masks cost more than further rectangles."""
    return EQUAL if device.type == "cpu" else LOOSE


@dataclass(frozen=True)
class Rectangle:
    """Neighbouring sequences of near-equal length, as a `(rows, longest)` rectangle.

    Attributes:
        start, stop: the tokens `[start, stop)` of the batch that lie in it.
        rows, longest: its sides.
        slots: for each of its tokens, the place in the flattened rectangle; none when it has no padding.
        keep: True where a slot holds a token; none when it has no padding.
    """

    start: int
    stop: int
    rows: int
    longest: int
    slots: Int[Tensor, " part"] | None
    keep: Bool[Tensor, "rows longest"] | None

    def apply(self, move: Move) -> Rectangle:
        """The same with its tensors moved."""
        slots, keep = (None if x is None else move(x) for x in (self.slots, self.keep))
        return dataclasses.replace(self, slots=slots, keep=keep)

    def pad(self, x: Tensor) -> Tensor:
        """`(tokens, …)` → `(rows, longest, …)`; a view when there is no padding, else zeros where no token is."""
        part = x[self.start : self.stop]
        if self.slots is not None:
            full = part.new_zeros((self.rows * self.longest, *part.shape[1:]))
            part = full.index_copy(0, self.slots, part)
        return part.view(self.rows, self.longest, *part.shape[1:])

    def unpad(self, x: Tensor) -> Tensor:
        """`(rows, longest, …)` → `(stop − start, …)`."""
        flat = x.reshape(self.rows * self.longest, *x.shape[2:])
        return flat if self.slots is None else flat[self.slots]


@dataclass(frozen=True)
class Layout:
    """Packed geometry of B sequences with T tokens.

    Attributes:
        cu_seqlens: sequence i is the tokens `[offsets[i], offsets[i+1])`; ascending, last = T.
        positions: place of each token in its own sequence, from 0.
        sequence_ids: the sequence of each token.
        max_seqlen: the longest sequence, in tokens.
        cut: how it falls apart into rectangles.
    """

    cu_seqlens: Int[Tensor, " bounds"]
    positions: Int[Tensor, " tokens"]
    sequence_ids: Int[Tensor, " tokens"]
    max_seqlen: int
    cut: RectanglePolicy = LOOSE

    @classmethod
    def of(cls, lengths: list[int], cut: RectanglePolicy = LOOSE) -> Layout:
        """The layout of sequences of these lengths, on the CPU."""
        sizes = torch.tensor(lengths, dtype=torch.int64)
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
        torch.cumsum(sizes, 0, out=offsets[1:])
        owner = torch.repeat_interleave(torch.arange(len(lengths)), sizes)
        positions = torch.arange(len(owner)) - offsets[owner]
        return cls(offsets, positions, owner, max(lengths, default=0), cut)

    @property
    def first_tokens(self) -> Int[Tensor, " sequences"]:
        """The first token of each sequence, [CLS]."""
        return self.cu_seqlens[:-1]

    @functools.cached_property
    def cu_seqlens_int32(self) -> Int[Tensor, " bounds"]:
        """The offsets as kernels for packed sequences read them, in 32 bits."""
        return self.cu_seqlens.to(torch.int32)

    @property
    def sequences(self) -> int:
        """How many there are."""
        return len(self.cu_seqlens) - 1

    @property
    def tokens(self) -> int:
        """Of all sequences together."""
        return len(self.sequence_ids)

    @functools.cached_property
    def lengths(self) -> list[int]:
        """Length of every sequence, in tokens."""
        return self.cu_seqlens.diff().tolist()

    @functools.cached_property
    def rectangles(self) -> list[Rectangle]:
        """The batch as padded rectangles of neighbours, each tight or small; made once a batch, for all layers."""
        result, lengths, start, first = [], self.lengths, 0, 0
        tightness, small = self.cut.tightness, self.cut.small
        while first < len(lengths):
            last, low, high = first, lengths[first], lengths[first]
            while last + 1 < len(lengths):
                new_low, new_high = min(low, lengths[last + 1]), max(high, lengths[last + 1])
                if new_low < tightness * new_high and (last + 2 - first) * new_high > small:
                    break
                last, low, high = last + 1, new_low, new_high
            result.append(self._rectangle(start, lengths[first : last + 1]))
            start, first = result[-1].stop, last + 1
        return result

    @property
    def slots(self) -> int:
        """Tokens and padding of the rectangles, where somebody needed them; else, tokens."""
        made: list[Rectangle] | None = vars(self).get("rectangles")
        return self.tokens if made is None else sum(part.rows * part.longest for part in made)

    def even(self, beyond: int) -> list[Rectangle]:
        """The rectangles; one with a sequence longer than `beyond` is cut where lengths change, so that it has no padding."""
        result, lengths = list[Rectangle](), iter(self.lengths)
        for part in self.rectangles:
            held, start = list(itertools.islice(lengths, part.rows)), part.start
            if part.longest <= beyond:
                result.append(part)
                continue
            for run in (list(run) for _, run in itertools.groupby(held)):
                result.append(self._rectangle(start, run))
                start += sum(run)
        return result

    def _rectangle(self, start: int, lengths: list[int]) -> Rectangle:
        stop, rows, longest = start + sum(lengths), len(lengths), max(lengths)
        if min(lengths) == longest:
            return Rectangle(start, stop, rows, longest, None, None)
        owner = self.sequence_ids[start:stop]
        slots = (owner - owner[0]) * longest + self.positions[start:stop]
        keep = (
            torch.arange(longest, device=slots.device)
            < torch.tensor(lengths, device=slots.device)[:, None]
        )
        return Rectangle(start, stop, rows, longest, slots, keep)

    def to(self, device: torch.device) -> Layout:
        """The same on a device."""
        return self.apply(onto(device))

    def apply(self, move: Move) -> Layout:
        """The same with its tensors moved, and with what was worked out on the way here: a GPU would have to be waited for."""
        moved = Layout(
            move(self.cu_seqlens),
            move(self.positions),
            move(self.sequence_ids),
            self.max_seqlen,
            self.cut,
        )
        moved.__dict__.update(
            lengths=self.lengths, rectangles=[part.apply(move) for part in self.rectangles]
        )
        return moved
