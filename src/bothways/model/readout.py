"""How heads read an encoder: the values of `EncoderConfig.readout`, where families differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bothways.core.ranges import check_rates
from bothways.model.activation import Activation


@dataclass(frozen=True)
class Own:
    """The head has a dense layer of its own, and does not read the pooler.

    Attributes:
        activation: after that layer.
        dropout_first: whether dropout comes before it, too.
        input_dropout: the rate there, if it is one of its own.
        norm: whether a LayerNorm comes after the activation.
        reads: of a sequence, its first token, [CLS], or the mean of all; of a token, itself.
    """

    activation: Activation | Literal["tanh"] = "tanh"
    dropout_first: bool = False
    norm: bool = False
    reads: Literal["first", "mean"] = "first"
    input_dropout: float = 0.0
    kind: Literal["own"] = "own"

    def __post_init__(self) -> None:
        check_rates("encoder.readout", input_dropout=self.input_dropout)


@dataclass(frozen=True)
class FromPooler:
    """The head reads the pooled vector."""

    kind: Literal["pooler"] = "pooler"


@dataclass(frozen=True)
class Deep:
    """The head has a feed-forward layer as the encoder's, with residual path and LayerNorm, and dropout before and after it."""

    kind: Literal["deep"] = "deep"


@dataclass(frozen=True)
class Readout:
    """How heads read the encoder, where families differ.

    Attributes:
        labels, choice: what these heads read.
        tokens: the layer that the tag and span heads have of their own; none if they read the encoder.
        span: what the span head has instead; none means as `tokens`.
        masked: the activation in the masked LM head; none means the encoder's.
        pair_dropout: on the vector that the pair head reads.
        span_dropout: on the vectors that the span head reads.
        replaced: what the replaced-token head reads of a token: its vector, or that plus the first token's, normed.
        output: the matrix by which the masked LM head and the next-token head predict: the token embedding, or one of the
            head's own ("untied").
    """

    labels: FromPooler | Own = FromPooler()
    choice: FromPooler | Own = FromPooler()
    tokens: Own | None = None
    span: Deep | None = None
    masked: Activation | None = None
    pair_dropout: float = 0.0
    span_dropout: float = 0.0
    replaced: Literal["token", "with_first"] = "token"
    output: Literal["embedding", "own"] = "embedding"
