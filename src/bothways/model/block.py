"""A Transformer block: self-attention, then a feed-forward layer, each with a residual path."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from typing_extensions import assert_never

from bothways.core.runtime.devices import compiled
from bothways.core.runtime.tuning import TUNING
from bothways.model.attention.dispatch import attend, packed_view
from bothways.model.attention.flash import PackedView
from bothways.model.attention.mask import AttentionView
from bothways.model.attention.probabilities import attention_probabilities
from bothways.model.attention.relative import PositionTerms, attend_relative
from bothways.model.config import Activation, EncoderConfig, Gated, PostNorm
from bothways.model.init import layer_norm
from bothways.model.kernels.dropout import Dropout, add_norm
from bothways.model.kernels.linear import on_round_rows
from bothways.model.positions import Disentangled


class GroupedProjection(nn.Module):
    """Queries for all heads, keys and values for groups of them (Ainslie et al. 2023).

    Keys and values are repeated for the heads of a group, so that attention is that of any encoder.
    """

    def __init__(self, config: EncoderConfig, groups: int, bias: bool) -> None:
        super().__init__()
        self.groups, self.size = groups, config.width // config.heads
        self.repeats = config.heads // groups
        self.hidden_matrices = {"query.weight": 1, "key_value.weight": 2}  # as in `Attention`
        self.query = nn.Linear(config.width, config.width, bias=bias)
        self.key_value = nn.Linear(config.width, 2 * groups * self.size, bias=bias)

    def forward(self, x: Float[Tensor, "tokens width"]) -> Float[Tensor, "tokens stacked"]:
        """Return queries, keys and values of all heads, one after the other."""
        pairs = self.key_value(x).view(len(x), 2, self.groups, self.size)
        keys_values = pairs.repeat_interleave(self.repeats, 2).flatten(1)
        return torch.cat([self.query(x), keys_values], 1)


class Attention(nn.Module):
    """Multi-head self-attention, with queries, keys and values from one matrix.

    Global tokens may have a matrix of their own (Beltagy et al. 2020, section 3.1). With
    disentangled positions, keys and queries are also made from positions: by the same matrix, or by
    layers of their own.

    Attributes:
        hidden_matrices: the number of matrices stacked in each weight, for optimizers.
        projections: returns queries, keys and values as they are; forward hooks read them here.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.shape = (3, config.heads, config.width // config.heads)
        self.rate = config.dropout.attention
        bias = config.bias.attention and config.bias.projections
        self.hidden_matrices = {"global_qkv.weight": 3, "out.weight": 1}
        self.hidden_matrices |= {"position_key.weight": 1, "position_query.weight": 1}
        self.qkv: nn.Linear | GroupedProjection
        if config.key_value_heads is None:
            self.qkv = nn.Linear(config.width, 3 * config.width, bias=bias and config.bias.key)
            self.hidden_matrices = {"qkv.weight": 3} | self.hidden_matrices
        else:
            self.qkv = GroupedProjection(config, config.key_value_heads, bias)
        self.bias = (
            nn.Parameter(torch.zeros(2 * config.width)) if bias and not config.bias.key else None
        )
        self.global_qkv = (
            nn.Linear(config.width, 3 * config.width, bias=bias)
            if config.has_global_attention
            else None
        )
        self.projections = nn.Identity()
        self.partial = config.has_global_attention  # a batch may have no global tokens
        self.out = nn.Linear(config.width, config.width, bias=config.bias.attention)
        position = config.position
        self.terms = position.terms if isinstance(position, Disentangled) else ()
        separate = isinstance(position, Disentangled) and not position.shared
        self.position_key = self.position_query = None
        if separate and "c2p" in self.terms:
            key_bias = config.bias.attention and config.bias.key
            self.position_key = nn.Linear(config.width, config.width, bias=key_bias)
        if separate and "p2c" in self.terms:
            self.position_query = nn.Linear(config.width, config.width, bias=config.bias.attention)
        self.position_dropout = Dropout(config.dropout_at("attention"))

    def forward(
        self,
        x: Float[Tensor, "tokens width"],
        view: AttentionView | PackedView,
        relative: Float[Tensor, "rows features"] | None = None,
        queries: Float[Tensor, "tokens width"] | None = None,
        only: Int[Tensor, " asked"] | None = None,
    ) -> Float[Tensor, "asked width"]:
        """Return the heads' outputs, concatenated; `Attention.out` projects them.

        Args:
            x: the vectors that are attended to.
            view: which tokens see which.
            relative: the vectors of relative positions, or a bias for each head; None without them.
            queries: the vectors that attend; None for `x` itself.
            only: the tokens whose output is needed; None for all.
        """
        rate = self.rate if self.training else 0.0
        qkv, terms = self._project(x, relative)
        if queries is not None:
            qkv = self._with_queries(qkv, queries)
        if terms is not None:
            assert isinstance(view, AttentionView), "its kernel adds no scores of positions"
            heads = attend_relative(qkv, terms, view, rate)
        else:
            heads = attend(qkv, view, rate, self._project_global(x, view))
        return selected_rows(heads.flatten(1), only)

    def probabilities(
        self,
        x: Float[Tensor, "tokens width"],
        view: AttentionView,
        relative: Float[Tensor, "rows features"] | None = None,
    ) -> list[Float[Tensor, "heads _ _"]]:
        """Return each sequence's attention probabilities, without dropout."""
        qkv, terms = self._project(x, relative)
        return attention_probabilities(qkv, view, terms, self._project_global(x, view))

    @property
    def is_recorded(self) -> bool:
        """True if hooks read what it computes, see `model.recorded_attentions`."""
        return bool(self._forward_pre_hooks or self.projections._forward_hooks)

    def _project_global(
        self, x: Float[Tensor, "tokens width"], view: AttentionView | PackedView
    ) -> Float[Tensor, "tokens 3 heads d"] | None:
        if self.global_qkv is None or not view.has_global_tokens:
            return None
        return on_round_rows(self.global_qkv, x).view(len(x), *self.shape)

    def _with_queries(
        self, qkv: Float[Tensor, "tokens 3 heads d"], queries: Float[Tensor, "tokens width"]
    ) -> Float[Tensor, "tokens 3 heads d"]:
        """Replace the queries by those made from other vectors."""
        # The first third of the stacked matrix makes queries; keys and values stay as they are.
        assert isinstance(self.qkv, nn.Linear), "an enhanced mask decoder has no groups"
        width = queries.shape[-1]
        bias = self.bias if self.qkv.bias is None else self.qkv.bias
        query_weights = self.qkv.weight[:width], None if bias is None else bias[:width]
        q = on_round_rows(lambda rows: nn.functional.linear(rows, *query_weights), queries)
        return torch.cat([q.view(len(q), 1, *self.shape[1:]), qkv[:, 1:]], 1)

    def _project(
        self, x: Float[Tensor, "tokens width"], relative: Float[Tensor, "rows features"] | None
    ) -> tuple[Float[Tensor, "tokens 3 heads d"], PositionTerms | None]:
        """Return queries, keys and values of tokens; keys and queries of relative positions."""
        if relative is None:
            return self._qkv(x), None
        if not self.terms:
            return self._qkv(x), PositionTerms(bias=relative)
        relative = self.position_dropout(relative).to(x.dtype)
        if self.position_key is None and self.position_query is None:
            # The same matrix for both: one product for tokens and positions together.
            projected = self._qkv(torch.cat([x, relative]))
            positions = projected[len(x) :]
            keys, queries = (
                positions[:, index] if term in self.terms else None
                for index, term in ((1, "c2p"), (0, "p2c"))
            )
            return projected[: len(x)], PositionTerms(keys, queries)
        # Matrices of their own, as in the first version of DeBERTa.
        layers, shape = (self.position_key, self.position_query), (len(relative), *self.shape[1:])
        keys, queries = (None if layer is None else layer(relative).view(shape) for layer in layers)
        return self._qkv(x), PositionTerms(keys, queries)

    def _qkv(self, x: Float[Tensor, "tokens width"]) -> Float[Tensor, "tokens 3 heads d"]:
        qkv = on_round_rows(self.qkv, x)
        if self.bias is not None:  # queries and values have one, keys have none
            query, value = self.bias.to(qkv.dtype).chunk(2)
            qkv = qkv + torch.cat([query, torch.zeros_like(query), value])
        result: Tensor = self.projections(qkv.view(len(x), *self.shape))
        return result


def selected_rows(
    x: Float[Tensor, "tokens width"], only: Int[Tensor, " asked"] | None
) -> Float[Tensor, "asked width"]:
    """Return the rows of the tokens that are needed."""
    return x if only is None else x.index_select(0, only)


def activate(name: Activation | Literal["tanh"], x: Tensor) -> Tensor:
    """Apply an activation; "gelu" is x·Φ(x), "gelu_tanh" Hendrycks and Gimpel's approximation."""
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
        compiled: whether torch compiles it: all of it around the kernel for packed sequences, else
            the part after attention.
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
        if self.compiled and relative is None and queries is None:
            packed = packed_view(view, x, self.attention.shape[-1])
            if packed is not None and not self.attention.is_recorded:
                result: Tensor = compiled(Block.compute)(self, x, packed, only=only)
                return result
        return self.compute(x, view, relative, queries, only)

    def compute(
        self,
        x: Float[Tensor, "tokens width"],
        view: AttentionView | PackedView,
        relative: Float[Tensor, "rows features"] | None = None,
        queries: Float[Tensor, "tokens width"] | None = None,
        only: Int[Tensor, " asked"] | None = None,
    ) -> Float[Tensor, "asked width"]:
        """Compute `forward`."""
        start = selected_rows(x if queries is None else queries, only)
        if self.normed_after:
            heads = self.attention(x, view, relative, queries, only)
        else:
            normed = None if queries is None else self.attention_norm(queries)
            heads = self.attention(self.attention_norm(x), view, relative, normed, only)
        if self.compiled and not torch.compiler.is_compiling():
            result: Tensor = compiled(Block.rest)(self, start, heads)
            return result
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
