"""The attention module of a block: projections around `bothways.model.attention`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bothways.model.attention.dispatch import attend
from bothways.model.attention.mask import AttentionView
from bothways.model.attention.probabilities import attention_probabilities
from bothways.model.attention.relative import PositionTerms, attend_relative
from bothways.model.config import EncoderConfig
from bothways.model.kernels.dropout import Dropout
from bothways.model.kernels.linear import on_round_rows
from bothways.model.positions import Disentangled


class GroupedProjection(nn.Module):
    """Queries for all heads, keys and values for groups of them (Ainslie et al. 2023).

    Keys and values are repeated for the heads of a group, so that attention is that of any encoder.

    Attributes:
        hidden_matrices: as in `Attention`.
    """

    hidden_matrices: ClassVar[Mapping[str, int]] = MappingProxyType(
        {"query.weight": 1, "key_value.weight": 2}
    )

    def __init__(self, config: EncoderConfig, groups: int, bias: bool) -> None:
        super().__init__()
        self.groups, self.size = groups, config.width // config.heads
        self.repeats = config.heads // groups
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

    hidden_matrices: Mapping[str, int] = MappingProxyType(
        {
            "qkv.weight": 3,
            "global_qkv.weight": 3,
            "out.weight": 1,
            "position_key.weight": 1,
            "position_query.weight": 1,
        }
    )

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.shape = (3, config.heads, config.width // config.heads)
        self.rate = config.dropout.attention
        bias = config.bias.attention and config.bias.projections
        self.qkv: nn.Linear | GroupedProjection
        if config.key_value_heads is None:
            self.qkv = nn.Linear(config.width, 3 * config.width, bias=bias and config.bias.key)
        else:
            self.qkv = GroupedProjection(config, config.key_value_heads, bias)
            stacked = dict(self.hidden_matrices)
            del stacked["qkv.weight"]  # the projection has its own
            self.hidden_matrices = stacked
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
        self.position_key = (
            _dense(config, config.bias.key) if separate and "c2p" in self.terms else None
        )
        self.position_query = _dense(config) if separate and "p2c" in self.terms else None
        self.position_dropout = Dropout(config.dropout_at("attention"))

    def forward(
        self,
        x: Float[Tensor, "tokens width"],
        view: AttentionView,
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

    def _project_global(
        self, x: Float[Tensor, "tokens width"], view: AttentionView
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


def _dense(config: EncoderConfig, bias: bool = True) -> nn.Linear:
    return nn.Linear(config.width, config.width, bias=config.bias.attention and bias)


def selected_rows(
    x: Float[Tensor, "tokens width"], only: Int[Tensor, " asked"] | None
) -> Float[Tensor, "asked width"]:
    """Return the rows of the tokens that are needed."""
    return x if only is None else x.index_select(0, only)
