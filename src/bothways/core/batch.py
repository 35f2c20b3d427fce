"""The geometry of a packed batch, and its targets: the values that a training module predicts.

Packed tokens `(tokens, …)` are the model's only shape: sequences end to end, with offsets where
they begin. Padded rectangles exist only inside some attention kernels.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence as Many
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from bothways.core.source import Sequence, target_of

Move = Callable[[Tensor], Tensor]
"""Returns the same tensor elsewhere: on a device, in pinned memory."""


def onto(device: torch.device) -> Move:
    """Return a move to a device that does not wait where it need not."""
    return lambda x: x.to(device, non_blocking=True)


@dataclass(frozen=True)
class RectanglePolicy:
    """When a new rectangle begins: at a sequence that would make a large rectangle too loose.

    Attributes:
        tightness: the least share of the longest sequence's length that others must have.
        small: slots up to which a rectangle may be looser, because another one costs more than
            the padding.
    """

    tightness: float = 0.8
    small: int = 1024


LOOSE = RectanglePolicy()
"""For training, and wherever starting an operation takes long."""
EQUAL = RectanglePolicy(1.0, 0)
"""Sequences of one length per rectangle: no padding, and no mask for it."""


def cut_to_predict(device: torch.device) -> RectanglePolicy:
    """Return the policy for predictions.

    A CPU starts operations in microseconds: padding and masks cost more than further rectangles.
    """
    return EQUAL if device.type == "cpu" else LOOSE


@dataclass(frozen=True)
class Rectangle:
    """Neighbouring sequences of near-equal length, as a padded `(rows, longest)` rectangle.

    Example: the lengths 2 and 3 give rows = 2, longest = 3, slots = [0, 1, 3, 4, 5] and
    keep = [[1, 1, 0], [1, 1, 1]].

    Attributes:
        start, stop: the tokens `[start, stop)` of the batch.
        slots: the place of each token in the flattened rectangle; None without padding.
        keep: True where a slot holds a token; None without padding.
    """

    start: int
    stop: int
    rows: int
    longest: int
    slots: Int[Tensor, " part"] | None
    keep: Bool[Tensor, "rows longest"] | None

    def pad(self, x: Tensor) -> Tensor:
        """`(tokens, …)` → `(rows, longest, …)`: a view without padding, else with zeros in it."""
        rows = x[self.start : self.stop]
        if self.slots is not None:
            # [a b | c d e] → [a b 0 | c d e]
            full = rows.new_zeros((self.rows * self.longest, *rows.shape[1:]))
            rows = full.index_copy(0, self.slots, rows)
        return rows.view(self.rows, self.longest, *rows.shape[1:])

    def unpad(self, x: Tensor) -> Tensor:
        """`(rows, longest, …)` → `(stop − start, …)`."""
        flat = x.reshape(self.rows * self.longest, *x.shape[2:])
        return flat if self.slots is None else flat[self.slots]


@dataclass(frozen=True)
class Layout:
    """Packed geometry of B sequences with T tokens.

    Example: the lengths 2 and 3 give cu_seqlens = [0, 2, 5], positions = [0, 1, 0, 1, 2],
    sequence_ids = [0, 0, 1, 1, 1] and max_seqlen = 3.

    Attributes:
        cu_seqlens: sequence i is the tokens `[cu_seqlens[i], cu_seqlens[i+1])`; the last is T.
        positions: the position of each token in its own sequence, from 0.
        sequence_ids: the sequence of each token.
        max_seqlen: the longest sequence, in tokens.
        cut: how the batch is cut into rectangles.

    Raises:
        ValueError: the fields contradict each other. Values are checked on the CPU alone, where
            that waits for nothing.
    """

    cu_seqlens: Int[Tensor, " starts"]
    positions: Int[Tensor, " tokens"]
    sequence_ids: Int[Tensor, " tokens"]
    max_seqlen: int
    cut: RectanglePolicy = LOOSE

    def __post_init__(self) -> None:
        starts, tokens = self.cu_seqlens, self.sequence_ids.shape[0]
        if starts.dtype != torch.int64 or starts.dim() != 1 or not len(starts):
            raise ValueError("cu_seqlens must be a vector of int64 with at least one element")
        if self.positions.shape != (tokens,) or self.sequence_ids.dim() != 1:
            raise ValueError("positions and sequence_ids must be vectors of one length")
        if type(starts) is Tensor and starts.device.type == "cpu":  # not a fake tensor
            bounds, max_length = starts.tolist(), max(self.lengths, default=0)
            if (bounds[0], bounds[-1]) != (0, tokens) or min(self.lengths, default=0) < 0:
                raise ValueError(f"cu_seqlens must rise from 0 to the number of tokens, {tokens}")
            if max_length != self.max_seqlen:
                raise ValueError(f"max_seqlen must be {max_length}")

    @classmethod
    def of(cls, lengths: list[int], cut: RectanglePolicy = LOOSE) -> Layout:
        """Return the layout of sequences of these lengths, on the CPU."""
        # By NumPy, whose operations on a few numbers take a third of the time of torch's.
        cu_seqlens = np.array([0, *itertools.accumulate(lengths)], dtype=np.int64)
        sizes = cu_seqlens[1:] - cu_seqlens[:-1]
        sequence_ids = np.repeat(np.arange(len(lengths), dtype=np.int64), sizes)
        positions = np.arange(len(sequence_ids), dtype=np.int64) - cu_seqlens[sequence_ids]
        return cls(
            torch.from_numpy(cu_seqlens),
            torch.from_numpy(positions),
            torch.from_numpy(sequence_ids),
            max(lengths, default=0),
            cut,
        )

    @property
    def first_tokens(self) -> Int[Tensor, " sequences"]:
        """The first token of each sequence, [CLS]."""
        return self.cu_seqlens[:-1]

    @property
    def last_tokens(self) -> Int[Tensor, " sequences"]:
        """The last token of each sequence."""
        return self.cu_seqlens[1:] - 1

    @functools.cached_property
    def cu_seqlens_int32(self) -> Int[Tensor, " starts"]:
        """`cu_seqlens` as kernels for packed sequences read it."""
        return self.cu_seqlens.to(torch.int32)

    @property
    def sequences(self) -> int:
        """The number of sequences."""
        return len(self.cu_seqlens) - 1

    @property
    def tokens(self) -> int:
        """The number of tokens in all sequences together."""
        return len(self.sequence_ids)

    @functools.cached_property
    def lengths(self) -> list[int]:
        """The length of each sequence, in tokens."""
        return [end - start for start, end in itertools.pairwise(self.cu_seqlens.tolist())]

    @functools.cached_property
    def rectangles(self) -> list[Rectangle]:
        """The batch as padded rectangles of neighbours, each tight or small."""
        result, lengths, row = list[Rectangle](), self.lengths, 0
        tightness, small = self.cut.tightness, self.cut.small
        # Batches keep the order of their sequences: a rectangle takes neighbours while it stays
        # tight or small.
        # With tightness 0.8 and small 0, lengths [10, 9, 8, 3, 3] give rectangles of 3 and 2 rows.
        while row < len(lengths):
            end, low, high = row, lengths[row], lengths[row]
            while end + 1 < len(lengths):
                new_low, new_high = min(low, lengths[end + 1]), max(high, lengths[end + 1])
                # One more row: `last + 2 - first` rows of `new_high` slots.
                if new_low < tightness * new_high and (end + 2 - row) * new_high > small:
                    break
                end, low, high = end + 1, new_low, new_high
            start = result[-1].stop if result else 0
            result.append(self._rectangle(start, row, lengths[row : end + 1]))
            row = end + 1
        return result

    def even(self, beyond: int) -> list[Rectangle]:
        """Return the rectangles without padding in those with a sequence longer than `beyond`.

        These are cut wherever the length changes.
        """
        result, row = list[Rectangle](), 0
        for rectangle in self.rectangles:
            if rectangle.longest <= beyond:
                result.append(rectangle)
                row += rectangle.rows
                continue
            start = rectangle.start
            # Rows of one length need no padding: each run of them becomes a rectangle.
            for _, run in itertools.groupby(self.lengths[row : row + rectangle.rows]):
                equal = list(run)
                result.append(self._rectangle(start, row, equal))
                start, row = result[-1].stop, row + len(equal)
        return result

    def _rectangle(self, start: int, row: int, lengths: list[int]) -> Rectangle:
        """Return the rectangle of the sequences from `row` on, without waiting for a GPU."""
        stop, rows, max_length = start + sum(lengths), len(lengths), max(lengths)
        if min(lengths) == max_length:
            return Rectangle(start, stop, rows, max_length, None, None)
        # Row r, column c is slot r · longest + c.
        slots = (self.sequence_ids[start:stop] - row) * max_length + self.positions[start:stop]
        # From the tensors of the batch: copying `lengths` to a GPU would wait for it.
        row_lengths = self.cu_seqlens[row : row + rows + 1].diff()[:, None]
        keep = torch.arange(max_length, device=slots.device) < row_lengths
        return Rectangle(start, stop, rows, max_length, slots, keep)

    def to(self, device: torch.device) -> Layout:
        """Return the same layout on a device."""
        return self.apply(onto(device))

    def apply(self, move: Move) -> Layout:
        """Return the same layout with its tensors moved.

        The lengths go along: reading them from a GPU would wait for it.
        """
        moved = Layout(
            move(self.cu_seqlens), move(self.positions), move(self.sequence_ids),
            self.max_seqlen, self.cut,
        )  # fmt: skip
        vars(moved)["lengths"] = self.lengths
        return moved


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
        """Return targets that add nothing to the loss, for a rank without sequences in a step.

        Here `labels` become unknown, and `weight` becomes 0. Of other targets with positions none
        is left.
        """
        nothing = dict[str, Any]()
        for name, values in vars(self).items():
            if name == "labels":
                is_class = np.issubdtype(np.asarray(values).dtype, np.integer)
                nothing[name] = np.full_like(values, IGNORED if is_class else np.nan)
            elif name == "weight":
                nothing[name] = np.zeros_like(values)
        if nothing:
            return dataclasses.replace(self, **nothing)
        if not self.POSITIONS:
            raise NotImplementedError
        return self.apply(lambda values: values[:0])


@dataclass(frozen=True)
class TokenTargets(Targets):
    """Tokens to predict: `index` holds their positions, `ids` their ids, both `(n)`."""

    POSITIONS = frozenset({"index"})
    index: NDArray[np.int64] | Tensor
    ids: NDArray[np.int64] | Tensor


@dataclass(frozen=True)
class LabelTargets(Targets):
    """One label per sequence, `(1)`: a class of int64, or a score of float32.

    Of several labels a row, `(1, labels)` of float32: 1 where a label applies, else 0. `IGNORED`
    and NaN carry no weight.
    """

    labels: NDArray[Any] | Tensor


@dataclass(frozen=True)
class WindowWeight(Targets):
    """The weight of a sequence's label, `(1)`: 1/n for each of the n windows of a text."""

    weight: NDArray[np.float32] | Tensor


@dataclass(frozen=True)
class SpanTargets(Targets):
    """The first and last token of an answer, `(1)` each, and its `weight`: 1, or 0 without one."""

    POSITIONS = frozenset({"start", "end"})
    start: NDArray[np.int64] | Tensor
    end: NDArray[np.int64] | Tensor
    weight: NDArray[np.float32] | Tensor


@dataclass(frozen=True)
class ChoiceTargets(Targets):
    """The number of choices `counts` and the index of the right one, `labels`: `(1)` each.

    `IGNORED` carries no weight.
    """

    counts: NDArray[np.int64] | Tensor
    labels: NDArray[np.int64] | Tensor


@dataclass(frozen=True)
class Batch:
    """Packed model input: ids `(tokens)`, segments `(tokens)`, layout, targets by objective.

    `global_attention_mask` is True for global tokens `(tokens)`, `causal` for those of sequences
    that are read from left to right; None if there are none.
    """

    ids: Int[Tensor, " tokens"]
    segments: Int[Tensor, " tokens"]
    layout: Layout
    targets: Mapping[str, Targets] = dataclasses.field(default_factory=dict)
    global_attention_mask: Bool[Tensor, " tokens"] | None = None
    causal: Bool[Tensor, " tokens"] | None = None

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

    def tensors(self) -> list[Tensor]:
        """Return all tensors, in one order for batches with the same fields."""
        layout = self.layout
        fields = (self.ids, self.segments, layout.cu_seqlens, layout.positions, layout.sequence_ids)
        masks = (self.global_attention_mask, self.causal)
        targets = [vars(target)[name] for target in self.targets.values() for name in vars(target)]
        return [*fields, *(mask for mask in masks if mask is not None), *targets]

    def _apply(self, move: Move) -> Batch:
        targets = {name: target.apply(move) for name, target in self.targets.items()}
        masks = (self.global_attention_mask, self.causal)
        moved = (None if mask is None else move(mask) for mask in masks)
        layout = self.layout.apply(move)
        return Batch(move(self.ids), move(self.segments), layout, targets, *moved)


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
    global_attention_mask: Tensor | None = None
    if any(s.global_attention_mask is not None for s in sequences):
        masks = [
            np.zeros(len(s), dtype=np.bool_)
            if s.global_attention_mask is None
            else s.global_attention_mask
            for s in sequences
        ]
        global_attention_mask = torch.from_numpy(np.concatenate(masks))
    causal: Tensor | None = None
    if any(s.causal for s in sequences):
        flags = [s.causal for s in sequences]
        causal = torch.from_numpy(np.repeat(flags, [len(s) for s in sequences]))
    return Batch(
        torch.from_numpy(np.concatenate([s.ids for s in sequences]).astype(np.int64)),
        torch.from_numpy(np.concatenate([s.segments for s in sequences]).astype(np.int64)),
        layout,
        targets,
        global_attention_mask,
        causal,
    )


def round_up(count: int, steps: int) -> int:
    """Return a count rounded up, so that of those up to twice as high `steps` are different."""
    quantum = max(1, (1 << max(count, 1).bit_length() - 1) // steps)
    return -(-count // quantum) * quantum


def pad_batch(batch: Batch) -> Batch:
    """Pad a CPU batch by sequences and targets without weight, so that shapes recur.

    Tokens grow by 3 % at most beyond one sequence of full length, targets by 6 %. A batch with
    targets other than tokens and classes, or with masks, stays as it is.
    """
    layout, targets = batch.layout, dict[str, Targets]()
    max_length, tokens = round_up(layout.max_seqlen, 4), layout.tokens
    # Added are one sequence of full length, and some that share the other tokens.
    shared = 1 + -(-round_up(tokens + max_length, 32) // (16 * max_length))
    shared = round_up(layout.sequences + 1 + shared, 8) - layout.sequences - 1
    total = round_up(tokens + max_length + shared, 32)
    sizes = np.diff(np.linspace(0, total - tokens - max_length, shared + 1).astype(int)).tolist()
    shape = Layout.of([*layout.lengths, max_length, *sizes], layout.cut)
    for name, target in batch.targets.items():
        if type(target) is TokenTargets:
            index, ids = torch.as_tensor(target.index), torch.as_tensor(target.ids)
            padding = round_up(len(ids), 16) - len(ids)
            targets[name] = TokenTargets(
                F.pad(index, (0, padding), value=tokens), F.pad(ids, (0, padding), value=IGNORED)
            )
        elif type(target) is LabelTargets:
            labels = torch.as_tensor(target.labels)
            if labels.is_floating_point():
                return batch
            targets[name] = LabelTargets(F.pad(labels, (0, shared + 1), value=IGNORED))
        else:
            return batch
    if batch.global_attention_mask is not None or batch.causal is not None:
        return batch
    ids, segments = (F.pad(column, (0, total - tokens)) for column in (batch.ids, batch.segments))
    return Batch(ids, segments, shape, targets)
