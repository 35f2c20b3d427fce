"""A Transformer block: self-attention, then a feed-forward layer, each with a residual path."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import assert_never

from bothways.core.layout import Layout
from bothways.model.config import Activation, EncoderConfig, PostNorm, PreNorm
from bothways.model.dropout import Dropout
from bothways.model.kernels import attend


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
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Float[Tensor, "tokens width"], layout: Layout) -> Float[Tensor, "tokens width"]:
        qkv = self.qkv(x).unflatten(-1, self.shape)
        result: Tensor = self.out(attend(qkv, layout, self.rate if self.training else 0.0).flatten(1))
        return result


class FeedForward(nn.Module):
    """Two dense layers with an activation between them, on each token alone."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.up = nn.Linear(config.width, config.inner)
        self.down = nn.Linear(config.inner, config.width)

    def forward(self, x: Float[Tensor, "tokens width"]) -> Float[Tensor, "tokens width"]:
        result: Tensor = self.down(activate(self.activation, self.up(x)))
        return result


class Block(nn.Module):
    """Attention and feed-forward with dropout on their output, in post-norm or pre-norm order."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.order = config.order
        self.attention = Attention(config)
        self.attention_norm = nn.LayerNorm(config.width, config.norm_epsilon)
        self.mlp = FeedForward(config)
        self.mlp_norm = nn.LayerNorm(config.width, config.norm_epsilon)
        self.attention_dropout = Dropout(config.dropout_at("attention"))
        self.mlp_dropout = Dropout(config.dropout_at("mlp"))

    def forward(self, x: Float[Tensor, "tokens width"], layout: Layout) -> Float[Tensor, "tokens width"]:
        first, second = self.attention_norm, self.mlp_norm
        match self.order:
            case PostNorm():
                x = first(x + self.attention_dropout(self.attention(x, layout)))
                return second(x + self.mlp_dropout(self.mlp(x)))  # type: ignore[no-any-return]
            case PreNorm():
                x = x + self.attention_dropout(self.attention(first(x), layout))
                return x + self.mlp_dropout(self.mlp(second(x)))  # type: ignore[no-any-return]
            case _:
                assert_never(self.order)
