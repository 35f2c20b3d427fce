"""The modules that heads build: what each reads of an encoder's vectors, and its own layers.

They take packed tokens and return a row for each token or each sequence.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from typing_extensions import assert_never

from bothways.core.layout import Layout
from bothways.model.activation import activate
from bothways.model.config import EncoderConfig, Own
from bothways.model.init import initialise, layer_norm
from bothways.model.kernels.dropout import Dropout
from bothways.model.kernels.linear import on_round_rows
from bothways.model.positions import Disentangled


class MaskedOutput(nn.Module):
    """Dense layer, activation, LayerNorm, then the transposed token embedding and a bias per token.

    Instead of the embedding it may have a matrix of its own (`Readout.output`). With an enhanced
    mask decoder (He et al. 2020, section 3.2) it holds the absolute positions that
    `Model.before_masked` adds.

    Source: Devlin et al. 2018, section 3.1, Task #1; Google's code shares the encoder's embedding.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        masked = config.readout.masked
        self.activation = None if masked == "direct" else masked or config.activation
        self.dense: nn.Module = nn.Identity()
        self.norm: nn.Module = nn.Identity()
        if self.activation is not None:
            self.dense = nn.Linear(config.width, config.embedding_width, bias=config.bias.head)
            self.norm = layer_norm(config, config.embedding_width)
        self.output = _own_output(config, config.embedding_width)
        self.bias = nn.Parameter(torch.zeros(config.vocab)) if config.bias.output else None
        position = config.position
        decoder = isinstance(position, Disentangled) and position.absolute == "decoder"
        self.position = nn.Embedding(config.max_positions, config.width) if decoder else None
        initialise(self, config.initial_range)

    def forward(
        self, x: Float[Tensor, "targets width"], embedding: Float[Tensor, "vocab embedded"]
    ) -> Float[Tensor, "targets vocab"]:
        """Return logits for vectors at masked positions, given the encoder's token embedding."""
        weight = embedding if self.output is None else self.output.weight
        return on_round_rows(
            lambda rows: nn.functional.linear(self._transformed(rows), weight, self.bias), x
        )

    def _transformed(self, x: Float[Tensor, "targets width"]) -> Float[Tensor, "targets embedded"]:
        if self.activation is None:
            return x
        result: Tensor = self.norm(activate(self.activation, self.dense(x)))
        return result


class Pooler(nn.Module):
    """tanh of a dense layer on one vector of each sequence: the first, or the last if causal."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.causal = config.is_causal
        self.dense = nn.Linear(config.width, config.width)
        initialise(self, config.initial_range)

    def forward(
        self, x: Float[Tensor, "tokens width"], layout: Layout
    ) -> Float[Tensor, "sequences width"]:
        """Return tanh(W x + b), with x the pooled token's vector."""
        return torch.tanh(on_round_rows(self.dense, x[pooled_tokens(layout, self.causal)]))


class LinearOutput(nn.Module):
    """Dropout and a dense layer on pooled vectors or on those of tokens.

    Source: Devlin et al. 2018, section 3.1, Task #2, sections 4.1 to 4.4 and 5.3.
    """

    def __init__(self, config: EncoderConfig, labels: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)
        self.dense = nn.Linear(config.width, labels)
        initialise(self, config.initial_range)

    def forward(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows labels"]:
        """Return W dropout(x) + b."""
        return on_round_rows(self.dense, self.dropout(x))


class OwnOutput(nn.Module):
    """A dense layer with activation, maybe LayerNorm, then one to the outputs.

    Source: RoBERTa's, ELECTRA's and DistilBERT's classification heads, and all of ModernBERT's.
    """

    def __init__(self, config: EncoderConfig, inner: Own, outputs: int, dropout: float) -> None:
        super().__init__()
        self.activation, self.reads = inner.activation, inner.reads
        self.causal = config.is_causal
        self.first = Dropout(dropout if inner.dropout_first else inner.input_dropout)
        self.dropout = Dropout(dropout)
        self.inner = nn.Linear(config.width, config.width, bias=config.bias.head)
        self.norm = layer_norm(config) if inner.norm else nn.Identity()
        self.dense = nn.Linear(config.width, outputs)
        initialise(self, config.initial_range)

    def forward(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows labels"]:
        """Return the outputs of pooled vectors (`pool`) or of tokens."""
        return on_round_rows(self._outputs, x)

    def _outputs(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows labels"]:
        if self.reads != "late":
            x = self._hidden(x)
        result: Tensor = self.dense(self.dropout(self.norm(x)))
        return result

    def _hidden(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        return activate(self.activation, self.inner(self.first(x)))

    def pool(
        self, x: Float[Tensor, "tokens width"], layout: Layout
    ) -> Float[Tensor, "sequences width"]:
        """Return the vector that the head reads of each sequence."""
        match self.reads:
            case "first":
                return x[pooled_tokens(layout, self.causal)]
            case "mean" | "late":
                x = on_round_rows(self._hidden, x) if self.reads == "late" else x
                sums = x.new_zeros(layout.sequences, x.shape[1])
                sums = sums.index_add(0, layout.sequence_ids, x)
                return sums / layout.cu_seqlens.diff()[:, None].to(x.dtype)
            case _:
                assert_never(self.reads)


class DeepOutput(nn.Module):
    """A feed-forward layer with residual path and LayerNorm, then a dense layer to the outputs.

    Source: transformers' BigBirdForQuestionAnswering.
    """

    def __init__(self, config: EncoderConfig, outputs: int) -> None:
        super().__init__()
        self.activation = config.activation
        self.first, self.dropout = Dropout(config.head_dropout), Dropout(config.head_dropout)
        self.up = nn.Linear(config.width, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.width)
        self.norm = layer_norm(config)
        self.dense = nn.Linear(config.width, outputs)
        initialise(self, config.initial_range)

    def forward(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows labels"]:
        """Return W LayerNorm(x + feed-forward(x)) + b."""
        return on_round_rows(self._outputs, x)

    def _outputs(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows labels"]:
        hidden = activate(self.activation, self.up(self.first(x)))
        result: Tensor = self.dense(self.norm(x + self.dropout(self.down(hidden))))
        return result


class ReplacedOutput(nn.Module):
    """A dense layer with the encoder's activation, then one to a score, on each token.

    DeBERTa's reads the normed sum of a token's vector and the first token's (He et al. 2021, code).
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.norm = layer_norm(config) if config.readout.replaced == "with_first" else None
        self.inner = nn.Linear(config.width, config.width)
        self.dense = nn.Linear(config.width, 1)
        initialise(self, config.initial_range)

    def forward(self, x: Float[Tensor, "tokens width"], layout: Layout) -> Float[Tensor, " tokens"]:
        """Return a score for each token: above 0, it was replaced."""
        if self.norm is not None:
            x = self.norm(x + x[layout.first_tokens][layout.sequence_ids])
        return on_round_rows(
            lambda rows: self.dense(activate(self.activation, self.inner(rows))), x
        ).squeeze(-1)


class NextTokenOutput(nn.Module):
    """The transposed token embedding (Radford et al. 2018, equation 2), or a matrix of its own."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.output = _own_output(config, config.width)
        initialise(self, config.initial_range)

    def forward(
        self, x: Float[Tensor, "tokens width"], embedding: Float[Tensor, "vocab embedded"]
    ) -> Float[Tensor, "tokens vocab"]:
        """Return logits of the token after each, given the encoder's token embedding."""
        weight = embedding if self.output is None else self.output.weight
        return on_round_rows(lambda rows: nn.functional.linear(rows, weight), x)


def pooled_tokens(layout: Layout, causal: bool) -> Int[Tensor, " sequences"]:
    """Return the token that represents each sequence: the first, [CLS], or the last if causal.

    In a causal encoder the first token attends to itself alone.
    """
    return layout.last_tokens if causal else layout.first_tokens


def _own_output(config: EncoderConfig, width: int) -> nn.Linear | None:
    """Return the head's own output matrix; None if it shares the token embedding."""
    return nn.Linear(width, config.vocab, bias=False) if config.readout.output == "own" else None
