"""Token + segment + position embeddings (Devlin et al. 2018, figure 2)."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import assert_never

from bothways.core.batch import Batch
from bothways.kernels.dropout import Dropout
from bothways.kernels.library import traced
from bothways.kernels.row_buckets import on_round_rows
from bothways.model.config import EncoderConfig
from bothways.model.norm import layer_norm
from bothways.model.positions import Disentangled, Learned, Rotary, Sinusoidal


class Embedding(nn.Module):
    """The sum of the vectors of a token, its position and its segment, then LayerNorm where the order has one, then dropout.

    Rotary and disentangled positions add nothing here, but for absolute ones that the latter may have at the input.

    Where they are narrower than the encoder, a dense layer takes them to its width (Lan et al. 2019, section 3.1), after
    the LayerNorm or before it.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width = config.embedding_width
        self.token = nn.Embedding(config.vocab, width)
        self.position = positions(config.position, width)
        self.segment = nn.Embedding(config.segments, width) if config.segments else None
        self.late = config.norm_after_projection
        normed = config.width if self.late else width
        self.norm = layer_norm(config, normed) if config.order.embedding else nn.Identity()
        self.scale = _scale(config.position, width)
        self.sum_dropout = Dropout(config.dropout_at("sum"))
        self.dropout = Dropout(config.dropout_at("embedding"))
        narrow = config.embedding is not None
        self.project = (
            nn.Linear(width, config.width, bias=not self.late) if narrow else nn.Identity()
        )

    def forward(
        self, batch: Batch
    ) -> tuple[Float[Tensor, "tokens width"], Float[Tensor, "vocab embedded"]]:
        """What enters the first block, and the matrix of tokens as heads shall read it, see `look_up`.

        Raises IndexError for an id, segment or position outside its table; the caller checks inputs before.
        """
        x, table = look_up(self.token, batch.ids)
        if self.scale != 1.0:
            x = x * self.scale
        if self.position is not None:
            x = x + self.position(batch.layout.positions)
        if self.segment is not None:
            x = x + self.segment(batch.segments)
        x = self.sum_dropout(x)
        x = (
            self.dropout(self.norm(self._wide(x)))
            if self.late
            else self._wide(self.dropout(self.norm(x)))
        )
        return x, table

    def _wide(self, x: Float[Tensor, "tokens embedded"]) -> Float[Tensor, "tokens width"]:
        return x if isinstance(self.project, nn.Identity) else on_round_rows(self.project, x)


def look_up(
    table: nn.Embedding, ids: Int[Tensor, " tokens"]
) -> tuple[Float[Tensor, "tokens embedded"], Float[Tensor, "vocab embedded"]]:
    """The rows of these tokens, and the whole table for matrix products; on a CPU without regard to hooks, and the table in the
    type that autocast multiplies in.

    | device | gradients | gradient of the table |
    |---|---|---|
    | CPU | dense | what the product gives, to which those of the rows are added |
    | the same | sparse, none, or traced; or a module that is more than a plain `nn.Embedding` | torch's |
    | any other | | torch's: the sum of two tables, of which one is full of zeros |
    """
    weight = table.weight
    plain = type(table) is nn.Embedding and (table.padding_idx, table.max_norm) == (None, None)
    plain = plain and not table.sparse and not table.scale_grad_by_freq
    learns = torch.is_grad_enabled() and weight.requires_grad
    if weight.device.type != "cpu" or not (plain and learns) or traced():
        return table(ids), weight
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else weight.dtype
    rows, whole = _LookUp.apply(weight, ids, dtype)  # type: ignore[no-untyped-call]
    return rows, whole


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(ids)
        ctx.shape, ctx.dtype = weight.shape, weight.dtype
        whole = weight.view_as(weight) if dtype is weight.dtype else weight.to(dtype)
        return nn.functional.embedding(ids, weight), whole

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_rows: Tensor | None, of_whole: Tensor | None
    ) -> tuple[Tensor | None, None, None]:
        (ids,) = ctx.saved_tensors
        if of_rows is None:
            return None if of_whole is None else of_whole.to(ctx.dtype), None, None
        # A sum of its own: others may have been given the same gradient.
        result = (
            of_rows.new_zeros(ctx.shape) if of_whole is None else of_whole.to(ctx.dtype, copy=True)
        )
        return result.index_add_(0, ids, of_rows), None, None


class LearnedPositions(nn.Embedding):
    """A row for each position, after `offset` others."""

    def __init__(self, config: Learned, width: int) -> None:
        super().__init__(config.max_positions + config.offset, width)
        self.offset = config.offset

    def forward(self, positions: Int[Tensor, " tokens"]) -> Float[Tensor, "tokens width"]:
        """The row of each position, after the offset."""
        return super().forward(positions + self.offset if self.offset else positions)


class SinusoidalPositions(nn.Module):
    """sin(p / 10000^(2i/width)) and cos of the same; they cost so little that no table is kept."""

    def __init__(self, config: Sinusoidal, width: int) -> None:
        super().__init__()
        self.width, self.interleaved = width, config.interleaved

    def forward(self, positions: Int[Tensor, " tokens"]) -> Float[Tensor, "tokens width"]:
        """The sines and cosines of each position, in fp32."""
        return sinusoids(positions, self.width, self.interleaved)


def positions(config: Learned | Sinusoidal | Rotary | Disentangled, width: int) -> nn.Module | None:
    """The module that makes a vector of each position; none where the input has none."""
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


def _scale(position: Learned | Sinusoidal | Rotary | Disentangled, width: int) -> float:
    """What tokens are multiplied by before positions are added."""
    return (
        math.sqrt(width) if isinstance(position, Learned | Sinusoidal) and position.scaled else 1.0
    )


def sinusoids(
    positions: Int[Tensor, " tokens"], width: int, interleaved: bool
) -> Float[Tensor, "tokens width"]:
    """The vectors of fixed positions (Vaswani et al. 2017, section 3.5); an odd width ends with a sine."""
    pairs = math.ceil(width / 2)
    steps = torch.arange(pairs, dtype=torch.float64, device=positions.device)
    angles = positions[:, None] * torch.exp(steps * (-2 * math.log(10_000) / width))
    joined = torch.stack if interleaved else torch.cat
    both = joined([angles.sin(), angles.cos()], -1).flatten(1)
    return both[:, :width].float()
