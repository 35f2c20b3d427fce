"""A Transformer block: self-attention, then a feed-forward layer, each with a residual path."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import assert_never

from bothways.model.config import Activation, EncoderConfig, Gated, Plain, PostNorm, PreNorm
from bothways.model.dropout import Dropout
from bothways.model.kernels import attend
from bothways.model.norm import layer_norm
from bothways.model.view import View


def activate(name: Activation | Literal["tanh"], x: Tensor) -> Tensor:
    """The named activation; "gelu" is x·Φ(x) exactly, "gelu_tanh" Hendrycks and Gimpel's approximation."""
    match name:
        case "tanh":
            return torch.tanh(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu":
            return F.relu(x)
        case "silu":
            return F.silu(x)
        case _:
            assert_never(name)


class Attention(nn.Module):
    """Multi-head self-attention; query, key and value are one matrix."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.shape = (3, config.heads, config.width // config.heads)
        self.rate = config.attention_dropout
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=config.bias.attention)
        self.out = nn.Linear(config.width, config.width, bias=config.bias.attention)

    def forward(self, x: Float[Tensor, "tokens width"], view: View) -> Float[Tensor, "tokens width"]:
        qkv = self.qkv(x).unflatten(-1, self.shape)
        result: Tensor = self.out(attend(qkv, view, self.rate if self.training else 0.0).flatten(1))
        return result


class FeedForward(nn.Module):
    """Two dense layers with an activation between them, on each token alone; a gate is part of the first."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.kind = config.mlp
        parts = 2 if isinstance(config.mlp, Gated) else 1
        self.up = nn.Linear(config.width, parts * config.inner, bias=config.bias.mlp)
        self.down = nn.Linear(config.inner, config.width, bias=config.bias.mlp)
        self.dropout = Dropout(config.mlp.dropout if isinstance(config.mlp, Gated) else 0.0)

    def forward(self, x: Float[Tensor, "tokens width"]) -> Float[Tensor, "tokens width"]:
        x = self.up(x)
        match self.kind:
            case Plain():
                return self.down(activate(self.activation, x))  # type: ignore[no-any-return]
            case Gated():
                inner, gate = x.chunk(2, -1)
                return self.down(self.dropout(activate(self.activation, inner) * gate))  # type: ignore[no-any-return]
            case _:
                assert_never(self.kind)


class Block(nn.Module):
    """Attention and feed-forward with dropout on their output, in post-norm or pre-norm order.

    Args:
        config: the encoder's shape.
        normed: whether there is a LayerNorm for the attention.
    """

    def __init__(self, config: EncoderConfig, normed: bool = True) -> None:
        super().__init__()
        self.order = config.order
        self.attention = Attention(config)
        self.attention_norm = layer_norm(config) if normed else nn.Identity()
        self.mlp = FeedForward(config)
        self.mlp_norm = layer_norm(config)
        self.attention_dropout = Dropout(config.dropout_at("attention"))
        self.mlp_dropout = Dropout(config.dropout_at("mlp"))

    def forward(self, x: Float[Tensor, "tokens width"], view: View) -> Float[Tensor, "tokens width"]:
        first, second = self.attention_norm, self.mlp_norm
        match self.order:
            case PostNorm():
                x = first(x + self.attention_dropout(self.attention(x, view)))
                return second(x + self.mlp_dropout(self.mlp(x)))  # type: ignore[no-any-return]
            case PreNorm():
                x = x + self.attention_dropout(self.attention(first(x), view))
                return x + self.mlp_dropout(self.mlp(second(x)))  # type: ignore[no-any-return]
            case _:
                assert_never(self.order)
