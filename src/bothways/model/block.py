"""A Transformer block: self-attention, then a feed-forward layer, each with a residual path."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bothways.core.runtime.tuning import TUNING
from bothways.model.activation import activate
from bothways.model.attention.mask import AttentionView
from bothways.model.config import EncoderConfig, Gated, PostNorm
from bothways.model.init import layer_norm
from bothways.model.kernels.add_norm import add_norm
from bothways.model.kernels.dropout import Dropout
from bothways.model.kernels.linear import on_round_rows
from bothways.model.self_attention import Attention, selected_rows


class FeedForward(nn.Module):
    """Two dense layers with an activation between them, on each token; a gate is in the first."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.gated = isinstance(config.mlp, Gated)
        branches = 2 if self.gated else 1
        bias = config.bias.mlp and config.bias.up
        self.up = nn.Linear(config.width, branches * config.intermediate_size, bias=bias)
        self.down = nn.Linear(config.intermediate_size, config.width, bias=config.bias.mlp)
        self.hidden_matrices = {"up.weight": branches, "down.weight": 1}  # stacked in each weight
        self.dropout = Dropout(config.mlp.dropout if isinstance(config.mlp, Gated) else 0.0)

    def forward(self, x: Float[Tensor, "tokens width"]) -> Float[Tensor, "tokens width"]:
        """Return down(f(up(x))), or with a gate down(f(hidden) · gate).

        On a CPU the backward pass computes a large activation again instead of keeping it.
        """
        x = self.up(x)
        large = x.device.type == "cpu" and x.numel() > TUNING.activation_elements
        if not (large and x.requires_grad and torch.is_grad_enabled()):
            return self._down(x)
        result: Tensor = checkpoint(self._down, x, use_reentrant=False)
        return result

    def _down(self, x: Float[Tensor, "tokens inner"]) -> Float[Tensor, "tokens width"]:
        if not self.gated:
            return self.down(activate(self.activation, x))  # type: ignore[no-any-return]
        hidden, gate = x.chunk(2, -1)
        result: Tensor = self.down(self.dropout(activate(self.activation, hidden) * gate))
        return result


class Block(nn.Module):
    """Attention and feed-forward layer with dropout on their outputs, post-norm or pre-norm.

    Args:
        config: the encoder's shape.
        normed: whether the attention has a LayerNorm.

    Attributes:
        compiled: whether the part after attention is compiled by torch.
    """

    def __init__(self, config: EncoderConfig, normed: bool = True) -> None:
        super().__init__()
        self.normed_after = isinstance(config.order, PostNorm)
        self.compiled = False
        self.attention = Attention(config)
        self.attention_norm = layer_norm(config) if normed else nn.Identity()
        self.mlp = FeedForward(config)
        self.mlp_norm = layer_norm(config)
        self.attention_dropout = Dropout(config.dropout_at("attention"))
        self.mlp_dropout = Dropout(config.dropout_at("mlp"))

    def forward(
        self,
        x: Float[Tensor, "tokens width"],
        view: AttentionView,
        relative: Float[Tensor, "rows features"] | None = None,
        queries: Float[Tensor, "tokens width"] | None = None,
        only: Int[Tensor, " asked"] | None = None,
    ) -> Float[Tensor, "asked width"]:
        """Return the block's output; arguments as in `Attention`.

        With `queries`, the residual path is theirs.
        """
        start = selected_rows(x if queries is None else queries, only)
        if self.normed_after:
            heads = self.attention(x, view, relative, queries, only)
        else:
            normed = None if queries is None else self.attention_norm(queries)
            heads = self.attention(self.attention_norm(x), view, relative, normed, only)
        if self.compiled:
            return compiled_rest()(self, start, heads)
        return on_round_rows(self.rest, start, heads)

    def rest(
        self, start: Float[Tensor, "asked width"], heads: Float[Tensor, "asked width"]
    ) -> Float[Tensor, "asked width"]:
        """Compute the part of the block after attention, each token by itself.

        Args:
            start: the beginning of the residual path.
            heads: the outputs of attention's heads.
        """
        if not self.normed_after:
            x = start + self.attention_dropout(self.attention.out(heads))
            return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)))  # type: ignore[no-any-return]
        rates = (self.attention_dropout.rate, self.mlp_dropout.rate)
        attention_rate, second = rates if self.training else (0.0, 0.0)
        x = add_norm(start, self.attention.out(heads), attention_rate, self.attention_norm)
        return add_norm(x, self.mlp(x), second, self.mlp_norm)


@functools.cache
def compiled_rest() -> Callable[[Block, Tensor, Tensor], Tensor]:
    """Return `Block.rest` as one program for all blocks and any number of tokens.

    It is compiled at the first call, and again for training and evaluation, each precision and each
    shape of a block; beyond torch's limit of programs it runs uncompiled.
    """
    return torch.compile(Block.rest, dynamic=True)
