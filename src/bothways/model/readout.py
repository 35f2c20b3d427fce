"""How heads read an encoder: the values of `EncoderConfig.readout`, in which families differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bothways.core.config.checks import require_probability
from bothways.model.activation import Activation


@dataclass(frozen=True)
class FromPooler:
    """The head reads the pooled vector."""

    kind: Literal["pooler"] = "pooler"


@dataclass(frozen=True)
class Own:
    """The head has a dense layer of its own and does not read the pooler.

    Attributes:
        activation: after that layer.
        dropout_first: whether the head's dropout is applied before that layer, too.
        norm: whether a LayerNorm follows the activation.
        reads: of a sequence, its first token, the mean of all tokens, or "late" the mean of what
            the dense layer makes of each; of a token, itself. A causal encoder's first token has
            seen nothing: its last token is read instead.
        input_dropout: the rate before the dense layer, unless `dropout_first` is set.
    """

    activation: Activation | Literal["tanh"] = "tanh"
    dropout_first: bool = False
    norm: bool = False
    reads: Literal["first", "mean", "late"] = "first"
    input_dropout: float = 0.0
    kind: Literal["own"] = "own"

    def __post_init__(self) -> None:
        require_probability("encoder.readout", input_dropout=self.input_dropout)


@dataclass(frozen=True)
class Deep:
    """The head has a feed-forward layer like the encoder's, with residual path and LayerNorm.

    Dropout is applied before and after that layer.
    """

    kind: Literal["deep"] = "deep"


@dataclass(frozen=True)
class Readout:
    """How heads read the encoder.

    Attributes:
        labels, choice: what these heads read.
        tokens: the dense layer of the tag and span heads; None if they read the encoder directly.
        span: what the span head has instead; None for the same as `tokens`.
        masked: the activation of the masked LM head; None for the encoder's, "direct" for a head
            that has nothing but its output.
        pair_dropout: the rate on the vector that the pair head reads.
        span_dropout: the rate on the vectors that the span head reads.
        replaced: what the replaced-token head reads of a token: its vector, or the normed sum of
            its vector and that of the first token.
        output: the output matrix of the masked LM and next-token heads: the token embedding, or
            one of the head's own ("untied").
    """

    labels: FromPooler | Own = FromPooler()
    choice: FromPooler | Own = FromPooler()
    tokens: Own | None = None
    span: Deep | None = None
    masked: Activation | Literal["direct"] | None = None
    pair_dropout: float = 0.0
    span_dropout: float = 0.0
    replaced: Literal["token", "with_first"] = "token"
    output: Literal["embedding", "own"] = "embedding"
