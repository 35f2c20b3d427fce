"""A Transformer block: self-attention, then a feed-forward layer, each with a residual path."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from typing_extensions import assert_never

from bothways.attention.dispatch import attend
from bothways.attention.mask import AttentionView
from bothways.attention.relative import PositionTerms, attend_disentangled
from bothways.kernels.add_norm import add_norm
from bothways.kernels.dropout import Dropout
from bothways.kernels.row_buckets import on_round_rows
from bothways.model.activation import Activation
from bothways.model.config import EncoderConfig, Gated, PostNorm
from bothways.model.norm import layer_norm
from bothways.model.positions import Disentangled

KEPT = 2**22
"""On a CPU, up to so many numbers what an activation gives is kept for the backward pass; beyond, it is computed again there,
which stops before the product that follows. On one core of Cascade Lake in fp32, 1,024 tokens × 1,024 features took 4 % longer
so, for 4 MiB a block; 2,048 × 3,072, as of a BERT-base with 16 × 128 tokens, no longer, for 24 MiB."""


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
    """Multi-head self-attention; query, key and value are one matrix.

    Global tokens have one of their own (Beltagy et al. 2020, section 3.1).

    With disentangled positions, keys and queries are made of those, too: by the same matrix, or by layers of their own.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.shape = (3, config.heads, config.width // config.heads)
        self.rate = config.dropout.attention
        bias = config.bias.attention and config.bias.projections
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=bias and config.bias.key)
        self.bias = (
            nn.Parameter(torch.zeros(2 * config.width)) if bias and not config.bias.key else None
        )
        self.global_qkv = (
            nn.Linear(config.width, 3 * config.width, bias=bias)
            if config.has_global_attention
            else None
        )
        self.partial = config.has_global_attention  # a batch may have no global tokens
        self.out = nn.Linear(config.width, config.width, bias=config.bias.attention)
        position = config.position
        self.terms = position.terms if isinstance(position, Disentangled) else ()
        own = isinstance(position, Disentangled) and not position.shared
        self.position_key = _dense(config, config.bias.key) if own and "c2p" in self.terms else None
        self.position_query = _dense(config) if own and "p2c" in self.terms else None
        self.position_dropout = Dropout(config.dropout_at("attention"))

    def forward(
        self,
        x: Float[Tensor, "tokens width"],
        view: AttentionView,
        relative: Float[Tensor, "rows width"] | None = None,
        queries: Float[Tensor, "tokens width"] | None = None,
        only: Int[Tensor, " asked"] | None = None,
    ) -> Float[Tensor, "asked width"]:
        """What the heads found, side by side: `out` makes one vector of it.

        Args:
            x: what is attended to.
            view: which of it each token sees.
            relative: the vectors of relative positions; none without them.
            queries: what attends, token by token; none for `x` itself.
            only: the tokens whose output is asked for; none for all.
        """
        rate = self.rate if self.training else 0.0
        qkv, terms = self._project(x, relative)
        if queries is not None:
            width = x.shape[-1]
            bias = self.bias if self.qkv.bias is None else self.qkv.bias
            first = self.qkv.weight[:width], None if bias is None else bias[:width]
            q = on_round_rows(lambda rows: F.linear(rows, *first), queries)
            qkv = torch.cat([q.view(len(q), 1, *self.shape[1:]), qkv[:, 1:]], 1)
        global_qkv = (
            on_round_rows(self.global_qkv, x).view(len(x), *self.shape)
            if self.global_qkv is not None and view.has_global_tokens
            else None
        )
        heads = (
            attend(qkv, view, rate, global_qkv)
            if terms is None
            else attend_disentangled(qkv, terms, view, rate)
        )
        return _rows(heads.flatten(1), only)

    def _project(
        self, x: Float[Tensor, "tokens width"], relative: Float[Tensor, "rows width"] | None
    ) -> tuple[Float[Tensor, "tokens 3 heads d"], PositionTerms | None]:
        """Queries, keys and values of tokens; keys and queries of relative positions."""
        if relative is None:
            return self._qkv(x), None
        relative = self.position_dropout(relative).to(x.dtype)
        if self.position_key is None and self.position_query is None:
            both = self._qkv(torch.cat([x, relative]))
            positions = both[len(x) :]
            keys, queries = (
                positions[:, part] if term in self.terms else None
                for part, term in ((1, "c2p"), (0, "p2c"))
            )
            return both[: len(x)], PositionTerms(keys, queries)
        layers, shape = (self.position_key, self.position_query), (len(relative), *self.shape[1:])
        keys, queries = (None if layer is None else layer(relative).view(shape) for layer in layers)
        return self._qkv(x), PositionTerms(keys, queries)

    def _qkv(self, x: Float[Tensor, "tokens width"]) -> Float[Tensor, "tokens 3 heads d"]:
        qkv = on_round_rows(self.qkv, x)
        if self.bias is not None:  # of queries and values alone
            query, value = self.bias.to(qkv.dtype).chunk(2)
            qkv = qkv + torch.cat([query, torch.zeros_like(query), value])
        return qkv.view(len(x), *self.shape)


def _dense(config: EncoderConfig, bias: bool = True) -> nn.Linear:
    return nn.Linear(config.width, config.width, bias=config.bias.attention and bias)


def _rows(
    x: Float[Tensor, "tokens width"], only: Int[Tensor, " asked"] | None
) -> Float[Tensor, "asked width"]:
    return x if only is None else x.index_select(0, only)


class FeedForward(nn.Module):
    """Two dense layers with an activation between them, on each token alone; a gate is part of the first."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.gated = isinstance(config.mlp, Gated)
        parts = 2 if isinstance(config.mlp, Gated) else 1
        self.up = nn.Linear(config.width, parts * config.intermediate_size, bias=config.bias.mlp)
        self.down = nn.Linear(config.intermediate_size, config.width, bias=config.bias.mlp)
        self.dropout = Dropout(config.mlp.dropout if isinstance(config.mlp, Gated) else 0.0)

    def forward(self, x: Float[Tensor, "tokens width"]) -> Float[Tensor, "tokens width"]:
        """down(activation(up(x))), or with a gate down(activation(inner) · gate)."""
        x = self.up(x)
        if (
            x.device.type != "cpu"
            or x.numel() <= KEPT
            or not (x.requires_grad and torch.is_grad_enabled())
        ):
            return self._down(x)
        result: Tensor = checkpoint(self._down, x, use_reentrant=False)
        return result

    def _down(self, x: Float[Tensor, "tokens inner"]) -> Float[Tensor, "tokens width"]:
        if not self.gated:
            return self.down(activate(self.activation, x))  # type: ignore[no-any-return]
        inner, gate = x.chunk(2, -1)
        return self.down(self.dropout(activate(self.activation, inner) * gate))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and feed-forward with dropout on their output, in post-norm or pre-norm order.

    Args:
        config: the encoder's shape.
        normed: whether there is a LayerNorm for the attention.

    Attributes:
        compiled: whether what follows the attention is compiled.
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
        relative: Float[Tensor, "rows width"] | None = None,
        queries: Float[Tensor, "tokens width"] | None = None,
        only: Int[Tensor, " asked"] | None = None,
    ) -> Float[Tensor, "asked width"]:
        """Arguments as in `Attention`; with `queries`, the residual path is theirs."""
        start = _rows(x if queries is None else queries, only)
        if self.normed_after:
            heads = self.attention(x, view, relative, queries, only)
        else:
            normed = None if queries is None else self.attention_norm(queries)
            heads = self.attention(self.attention_norm(x), view, relative, normed, only)
        return (
            compiled_rest()(self, start, heads)
            if self.compiled
            else on_round_rows(self.rest, start, heads)
        )

    def rest(
        self, start: Float[Tensor, "asked width"], heads: Float[Tensor, "asked width"]
    ) -> Float[Tensor, "asked width"]:
        """What follows the attention, each token by itself.

        Args:
            start: of the residual path.
            heads: what the attention's heads found.
        """
        if not self.normed_after:
            x = start + self.attention_dropout(self.attention.out(heads))
            return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)))  # type: ignore[no-any-return]
        first, second = (
            (self.attention_dropout.rate, self.mlp_dropout.rate) if self.training else (0.0, 0.0)
        )
        x = add_norm(start, self.attention.out(heads), first, self.attention_norm)
        return add_norm(x, self.mlp(x), second, self.mlp_norm)


@functools.cache
def compiled_rest() -> Callable[[Block, Tensor, Tensor], Tensor]:
    """`Block.rest` as one program for all blocks and any number of tokens; compiled when it is first called.

    Another one is compiled for training and evaluation, each precision and each shape of a block; beyond torch's limit of those
    it is run as it is.
    """
    return torch.compile(Block.rest, dynamic=True)
