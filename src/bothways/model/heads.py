"""The modules of heads: what each reads of an encoder's vectors, and the layers of its own.

They take packed tokens, and give a row for each token or each sequence.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import assert_never

from bothways.core.layout import Layout
from bothways.kernels.dropout import Dropout
from bothways.kernels.row_buckets import on_round_rows
from bothways.model.block import activate
from bothways.model.config import EncoderConfig
from bothways.model.head_config import Own
from bothways.model.init import initialise
from bothways.model.lstm_config import LSTMConfig, ModelConfig
from bothways.model.norm import layer_norm
from bothways.model.positions import Disentangled


class MaskedOutput(nn.Module):
    """Predicts a token: dense, activation, LayerNorm, then the token embedding transposed plus a bias per token, if it has one.

    Or, in place of the embedding, a matrix of its own (`Readout.output`).
    With an enhanced mask decoder (He et al. 2020, section 3.2) it holds the absolute positions: see `Model.before_masked`.

    Source: Devlin et al. 2018, section 3.1, Task #1; the decoder shares the encoder's embedding.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.activation = config.readout.masked or config.activation
        self.dense = nn.Linear(config.width, config.embedding_width, bias=config.bias.head)
        self.norm = layer_norm(config, config.embedding_width)
        self.output = own_output(config, config.embedding_width)
        self.bias = nn.Parameter(torch.zeros(config.vocab)) if config.bias.output else None
        place = config.position
        rows = (
            place.max_positions
            if isinstance(place, Disentangled) and place.absolute == "decoder"
            else 0
        )
        self.position = nn.Embedding(rows, config.width) if rows else None
        initialise(self, config.initial_range)

    def forward(
        self, x: Float[Tensor, "targets width"], embedding: Float[Tensor, "vocab embedded"]
    ) -> Float[Tensor, "targets vocab"]:
        """Vectors at the masked positions, and the encoder's token embedding → logits."""
        weight = embedding if self.output is None else self.output.weight
        return on_round_rows(
            lambda rows: nn.functional.linear(self._read(rows), weight, self.bias), x
        )

    def _read(self, x: Float[Tensor, "targets width"]) -> Float[Tensor, "targets embedded"]:
        result: Tensor = self.norm(activate(self.activation, self.dense(x)))
        return result


def own_output(config: EncoderConfig, width: int) -> nn.Linear | None:
    """The matrix from vectors of this width to the vocabulary, where a head has one of its own; else none."""
    return nn.Linear(width, config.vocab, bias=False) if config.readout.output == "own" else None


class Pooler(nn.Module):
    """tanh of a dense layer on the first token of each sequence, [CLS]."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.width, config.width)
        initialise(self, config.initial_range)

    def forward(
        self, x: Float[Tensor, "tokens width"], layout: Layout
    ) -> Float[Tensor, "sequences width"]:
        """tanh(W x₀ + b), with x₀ the first vector of each sequence."""
        return torch.tanh(on_round_rows(self.dense, x[layout.first_tokens]))


class LinearOutput(nn.Module):
    """Dropout and a dense layer: on pooled vectors (next sentence, with rate 0; classes; choices) or on those of tokens.

    Source: Devlin et al. 2018, section 3.1, Task #2, sections 4.1 to 4.4 and 5.3.
    """

    def __init__(self, config: ModelConfig, labels: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)
        self.dense = nn.Linear(config.width, labels)
        initialise(self, config.initial_range)

    def forward(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows labels"]:
        """W dropout(x) + b."""
        return on_round_rows(self.dense, self.dropout(x))


class OwnOutput(nn.Module):
    """A dense layer with an activation, perhaps LayerNorm, then one to the outputs, dropout before both or the second.

    Source: RoBERTa's, ELECTRA's and DistilBERT's classification heads, and all of ModernBERT's.
    """

    def __init__(self, config: ModelConfig, own: Own, outputs: int, dropout: float) -> None:
        super().__init__()
        self.activation, self.reads = own.activation, own.reads
        self.first = Dropout(dropout if own.dropout_first else own.input_dropout)
        self.dropout = Dropout(dropout)
        self.inner = nn.Linear(config.width, config.width, bias=config.bias.head)
        self.norm = layer_norm(config) if own.norm else nn.Identity()
        self.dense = nn.Linear(config.width, outputs)
        initialise(self, config.initial_range)

    def forward(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows labels"]:
        """Of the vectors that `pool` gives, or of tokens."""
        return on_round_rows(self._outputs, x)

    def _outputs(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows labels"]:
        result: Tensor = self.dense(
            self.dropout(self.norm(activate(self.activation, self.inner(self.first(x)))))
        )
        return result

    def pool(
        self, x: Float[Tensor, "tokens width"], layout: Layout
    ) -> Float[Tensor, "sequences width"]:
        """What it reads of each sequence."""
        match self.reads:
            case "first":
                return x[layout.first_tokens]
            case "mean":
                sums = x.new_zeros(layout.sequences, x.shape[1]).index_add(
                    0, layout.sequence_ids, x
                )
                return sums / layout.cu_seqlens.diff()[:, None].to(x.dtype)
            case _:
                assert_never(self.reads)


class DeepOutput(nn.Module):
    """A feed-forward layer as the encoder's, with residual path and LayerNorm, then a dense layer to the outputs.

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
        """W LayerNorm(x + feed-forward(x)) + b, with dropout before and after the feed-forward layer."""
        return on_round_rows(self._outputs, x)

    def _outputs(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows labels"]:
        inner = activate(self.activation, self.up(self.first(x)))
        result: Tensor = self.dense(self.norm(x + self.dropout(self.down(inner))))
        return result


class ReplacedOutput(nn.Module):
    """A dense layer with the encoder's activation, then one to a score, on each token.

    DeBERTa's reads the sum of a token's vector and the first one's, after a LayerNorm (He et al. 2021, its code).
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.norm = layer_norm(config) if config.readout.replaced == "with_first" else None
        self.inner = nn.Linear(config.width, config.width)
        self.dense = nn.Linear(config.width, 1)
        initialise(self, config.initial_range)

    def forward(self, x: Float[Tensor, "tokens width"], layout: Layout) -> Float[Tensor, " tokens"]:
        """The score of each token: above 0, it has been replaced."""
        if self.norm is not None:
            x = self.norm(x + x[layout.first_tokens][layout.sequence_ids])
        return on_round_rows(
            lambda rows: self.dense(activate(self.activation, self.inner(rows))), x
        ).squeeze(-1)


class NextTokenOutput(nn.Module):
    """The token embedding transposed, on each token (Radford et al. 2018, equation 2), or a matrix of its own in its place."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.output = own_output(config, config.width)
        initialise(self, config.initial_range)

    def forward(
        self, x: Float[Tensor, "tokens width"], embedding: Float[Tensor, "vocab embedded"]
    ) -> Float[Tensor, "tokens vocab"]:
        """Vectors and the encoder's token embedding → logits of the token after each."""
        weight = embedding if self.output is None else self.output.weight
        return on_round_rows(lambda rows: nn.functional.linear(rows, weight), x)


class BiLMOutput(nn.Module):
    """The token embedding transposed, plus a bias per token: one softmax for both directions (Peters et al. 2018, 3.1)."""

    def __init__(self, config: LSTMConfig) -> None:
        super().__init__()
        self.dropout = Dropout(config.head_dropout)
        self.bias = nn.Parameter(torch.zeros(config.vocab))

    def forward(
        self,
        x: Float[Tensor, "tokens width"],
        embedding: Float[Tensor, "vocab half"],
        direction: Literal["next", "previous"] = "next",
    ) -> Float[Tensor, "tokens vocab"]:
        """Vectors and the encoder's token embedding → logits of the token after each, or of the one before."""
        ahead, back = x.chunk(2, dim=-1)
        read = self.dropout(ahead if direction == "next" else back)
        return on_round_rows(lambda rows: nn.functional.linear(rows, embedding, self.bias), read)
