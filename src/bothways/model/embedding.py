"""Token + segment + position embeddings (Devlin et al. 2018, figure 2)."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import assert_never

from bothways.core.batch import Batch, Layout
from bothways.model.attention.mask import Distances
from bothways.model.block import activate
from bothways.model.config import EncoderConfig
from bothways.model.init import layer_norm
from bothways.model.kernels.dropout import Dropout
from bothways.model.kernels.library import is_tracing
from bothways.model.kernels.linear import on_round_rows
from bothways.model.positions import (
    Convolution,
    Disentangled,
    DistanceBias,
    Learned,
    Position,
    Rotary,
    Sinusoidal,
)


class Embedding(nn.Module):
    """The sum of token, position, segment and task vectors, then LayerNorm if the order has one,
    dropout.

    Rotary and disentangled positions add nothing here, except absolute positions at the input of
    the latter. Embeddings narrower than the encoder are projected to its width by a dense layer
    after or before the LayerNorm (Lan et al. 2019, section 3.1).
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width = config.embedding_width
        self.token = nn.Embedding(config.vocab, width)
        self.position = build_positions(config.position, width)
        self.segment = nn.Embedding(config.segments, width) if config.segments else None
        self.task = nn.Embedding(config.task_types, width) if config.task_types else None
        self.late = config.norm_after_projection
        normed = config.width if self.late else width
        self.norm = layer_norm(config, normed) if config.order.embedding else nn.Identity()
        position = config.position
        scaled = isinstance(position, Learned | Sinusoidal) and position.scaled
        # The factor of tokens before positions are added.
        self.scale = math.sqrt(width) if scaled else 1.0
        self.sum_dropout = Dropout(config.dropout_at("sum"))
        self.dropout = Dropout(config.dropout_at("embedding"))
        narrow = config.embedding is not None
        self.project = (
            nn.Linear(width, config.width, bias=not self.late) if narrow else nn.Identity()
        )

    def tables(self) -> dict[str, nn.Embedding]:
        """Return the learned tables among "token", "position", "segment" and "task"."""
        names = ("token", "position", "segment", "task")
        modules = ((name, getattr(self, name)) for name in names)
        return {name: module for name, module in modules if isinstance(module, nn.Embedding)}

    def forward(
        self, batch: Batch
    ) -> tuple[Float[Tensor, "tokens width"], Float[Tensor, "vocab embedded"]]:
        """Return the first block's input, and the token embedding for heads (see `look_up`).

        Raises:
            IndexError: an id, segment or position is outside its table; callers check inputs.
        """
        x, table = look_up(self.token, batch.ids)
        if self.scale != 1.0:
            x = x * self.scale
        if self.position is not None:
            x = x + self.position(batch.layout.positions)
        if self.segment is not None:
            x = x + self.segment(batch.segments)
        # All tokens are of the first task type, as in transformers by default.
        if self.task is not None:
            x = x + self.task.weight[0]
        x = self.sum_dropout(x)
        if self.late:
            return self.dropout(self.norm(self._project(x))), table
        return self._project(self.dropout(self.norm(x))), table

    def _project(self, x: Float[Tensor, "tokens embedded"]) -> Float[Tensor, "tokens width"]:
        return x if isinstance(self.project, nn.Identity) else on_round_rows(self.project, x)


def look_up(
    table: nn.Embedding, ids: Int[Tensor, " tokens"]
) -> tuple[Float[Tensor, "tokens embedded"], Float[Tensor, "vocab embedded"]]:
    """Return the rows of the tokens, and the whole table for matrix products.

    torch's gradient of a table with two uses is the sum of two full tables, one of them nearly all
    zeros. For a plain `nn.Embedding` with dense gradients on a CPU, the gradients of the rows are
    added to that of the matrix product instead; hooks of the module are not called, and the table
    is returned in autocast's type. In all other cases both come from torch.
    """
    weight = table.weight
    plain = type(table) is nn.Embedding and (table.padding_idx, table.max_norm) == (None, None)
    plain = plain and not table.sparse and not table.scale_grad_by_freq
    learns = torch.is_grad_enabled() and weight.requires_grad
    if weight.device.type != "cpu" or not (plain and learns) or is_tracing():
        return table(ids), weight
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else weight.dtype
    rows, full = _LookUp.apply(weight, ids, dtype)  # type: ignore[no-untyped-call]
    return rows, full


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the rows of the ids, and the table in `dtype`."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(ids)
        ctx.shape, ctx.dtype = weight.shape, weight.dtype
        table = weight.view_as(weight) if dtype is weight.dtype else weight.to(dtype)
        return nn.functional.embedding(ids, weight), table

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_rows: Tensor | None, of_whole: Tensor | None
    ) -> tuple[Tensor | None, None, None]:
        """Return the gradient for the table, both parts added in one tensor."""
        (ids,) = ctx.saved_tensors
        if of_rows is None:
            return None if of_whole is None else of_whole.to(ctx.dtype), None, None
        # A copy: autograd may pass the same gradient to others.
        result = (
            of_rows.new_zeros(ctx.shape) if of_whole is None else of_whole.to(ctx.dtype, copy=True)
        )
        return result.index_add_(0, ids, of_rows), None, None


class LearnedPositions(nn.Embedding):
    """A row for each position, after `offset` unused rows."""

    def __init__(self, config: Learned, width: int) -> None:
        super().__init__(config.max_positions + config.offset, width)
        self.offset = config.offset

    def forward(self, positions: Int[Tensor, " tokens"]) -> Float[Tensor, "tokens width"]:
        """Look up the positions."""
        return super().forward(positions + self.offset if self.offset else positions)


class SinusoidalPositions(nn.Module):
    """sin(p / 10000^(2i/width)) and cos of the same; too cheap to keep in a table."""

    def __init__(self, config: Sinusoidal, width: int) -> None:
        super().__init__()
        self.width, self.interleaved = width, config.interleaved

    def forward(self, positions: Int[Tensor, " tokens"]) -> Float[Tensor, "tokens width"]:
        """Return the sines and cosines of each position, in fp32."""
        return sinusoids(positions, self.width, self.interleaved)


def build_positions(config: Position, width: int) -> nn.Module | None:
    """Return the module of position vectors; None if none are added to the input."""
    match config:
        case Learned():
            return LearnedPositions(config, width)
        case Sinusoidal():
            return SinusoidalPositions(config, width)
        case Disentangled(positions, absolute="input"):
            return LearnedPositions(Learned(positions), width)
        case Disentangled() | Rotary():
            return None
        case _:
            assert_never(config)


def sinusoids(
    positions: Int[Tensor, " tokens"], width: int, interleaved: bool
) -> Float[Tensor, "tokens width"]:
    """Return sinusoidal position vectors (Vaswani et al. 2017, section 3.5); odd widths end in a
    sine.
    """
    pairs = math.ceil(width / 2)
    steps = torch.arange(pairs, dtype=torch.float64, device=positions.device)
    angles = positions[:, None] * torch.exp(steps * (-2 * math.log(10_000) / width))
    joined = torch.stack if interleaved else torch.cat
    features = joined([angles.sin(), angles.cos()], -1).flatten(1)
    return features[:, :width].float()


def distances_of(position: Position, layout: Layout) -> Distances | None:
    """Return the rows of the table that the sequences of a layout need; None without a table."""
    device = layout.positions.device
    distances = [
        torch.arange(rectangle.longest - 1, -rectangle.longest, -1)
        for rectangle in layout.rectangles
    ]
    match position:
        case Disentangled():
            # Rows of shorter sequences are in the middle of those of longer ones.
            rows = [row_of(position, values) for values in distances]
            start, stop = min(int(row[-1]) for row in rows), max(int(row[0]) for row in rows) + 1
            return Distances(start, stop, tuple((row - start).to(device) for row in rows))
        case Learned(bias=DistanceBias() as bias):
            rows = [bucket_of(bias, values) for values in distances]
            return Distances(0, bias.buckets, tuple(row.to(device) for row in rows))
        case _:
            return None


def bucket_of(bias: DistanceBias, distances: Int[Tensor, " *n"]) -> Int[Tensor, " *n"]:
    """Return the bucket of each distance query − key.

    Example with 8 buckets and max_distance = 8: the distances 0 1 2 3 4 5 … have the buckets
    0 1 2 2 3 3 …, and −1 −2 −3 −4 … have 5 6 6 7 ….
    """
    half = bias.buckets // 2
    single = half // 2
    size = distances.abs()
    # transformers' order of operations in fp32, which decides at the bounds of buckets.
    share = torch.log(size.float() / single) / math.log(bias.max_distance / single)
    far = single + (share * (half - single)).clamp(min=0).long()
    rows = torch.where(size < single, size, far.clamp(max=half - 1))
    return rows + half * (distances < 0)


class RelativeTable(nn.Module):
    """A row for each relative position, or each range of distances; shared by all layers.

    Args:
        rows: rows of the table.
        features: of a row: those of a vector, or a number for each head.
        norm: follows the table.
    """

    def __init__(self, rows: int, features: int, norm: nn.Module) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, features)
        self.norm = norm

    def forward(self, distances: Distances) -> Float[Tensor, "rows features"]:
        """Return the rows that the batch needs."""
        result: Tensor = self.norm(self.table.weight[distances.start : distances.stop])
        return result


def build_relative(config: EncoderConfig) -> RelativeTable | None:
    """Return the module with the table of distances; None without one."""
    match config.position:
        case Disentangled() as position:
            norm = layer_norm(config) if position.norm else nn.Identity()
            return RelativeTable(2 * position.span, config.width, norm)
        case Learned(bias=DistanceBias() as bias):
            return RelativeTable(bias.buckets, config.heads, nn.Identity())
        case _:
            return None


def row_of(position: Disentangled, distances: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Return the row of the table for each distance query − key.

    Distance 0 has the row `span`; distances beyond the table have the first or the last row. With
    buckets, and m = buckets / 2, a distance up to m is its own bucket; beyond, the bucket is

        m + ⌈(m − 1) · log(distance / m) / log((farthest − 1) / m)⌉.

    Example with m = 2 and farthest = 9: distances 1 2 3 4 5 8 have the buckets 1 2 3 3 3 3.
    """
    rows, farthest = distances, position.farthest - 1
    if position.buckets is not None and farthest > (middle := position.buckets // 2):
        size = distances.abs()
        share = torch.log(size.clamp(min=1) / middle) / torch.log(torch.tensor(farthest / middle))
        far = (torch.ceil(share * (middle - 1)) + middle).long()
        rows = torch.where(size <= middle, distances, far * distances.sign())
    return (rows + position.span).clamp(0, 2 * position.span - 1)


class NgramConvolution(nn.Module):
    """y ← LayerNorm(y + f(convolution of x)), with embeddings x and the first layer's output y.

    Sequences are padded with zeros at both ends.
    """

    def __init__(self, config: EncoderConfig, convolution: Convolution) -> None:
        super().__init__()
        self.activation = convolution.activation
        size, groups = convolution.size, convolution.groups
        self.conv = nn.Conv1d(config.width, config.width, size, padding=size // 2, groups=groups)
        self.dropout = Dropout(config.dropout_at("mlp"))
        self.norm = layer_norm(config)

    def forward(
        self, x: Float[Tensor, "tokens width"], y: Float[Tensor, "tokens width"], layout: Layout
    ) -> Float[Tensor, "tokens width"]:
        """Add the convolution of the embeddings `x` to the first layer's output `y`."""
        outputs = [
            rectangle.unpad(self.conv(rectangle.pad(x).transpose(1, 2)).transpose(1, 2))
            for rectangle in layout.rectangles
        ]
        result: Tensor = self.norm(y + activate(self.activation, self.dropout(torch.cat(outputs))))
        return result
