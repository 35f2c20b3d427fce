"""How heads read an encoder: the values of `EncoderConfig.readout`, where families differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bothways.core.config.checks import require_at_least, require_probability
from bothways.model.activation import Activation


@dataclass(frozen=True)
class MaskedHead:
    """Predicts the token at a masked position."""

    kind: Literal["masked"] = "masked"


@dataclass(frozen=True)
class PoolerHead:
    """Gives one vector per sequence, from [CLS]."""

    kind: Literal["pooler"] = "pooler"


@dataclass(frozen=True)
class PairHead:
    """Tells from the pooled vector whether B follows A (0) or is a random segment (1)."""

    kind: Literal["pair"] = "pair"


@dataclass(frozen=True)
class LabelHead:
    """Gives `count` outputs per sequence from the pooled vector: logits of classes, or a score.

    Attributes:
        dropout: on the pooled vector; none means the encoder's.
    """

    count: int
    dropout: float | None = None
    kind: Literal["labels"] = "labels"

    def __post_init__(self) -> None:
        _check_outputs("labels", self.count, self.dropout)


@dataclass(frozen=True)
class TagHead:
    """Gives `count` logits for each token.

    Attributes:
        dropout: on the token's vector; none means the encoder's.
    """

    count: int
    dropout: float | None = None
    kind: Literal["tags"] = "tags"

    def __post_init__(self) -> None:
        _check_outputs("tags", self.count, self.dropout)


@dataclass(frozen=True)
class SpanHead:
    """Gives two scores for each token: that an answer begins there, and that it ends there."""

    kind: Literal["span"] = "span"


@dataclass(frozen=True)
class ChoiceHead:
    """Gives one score per sequence from the pooled vector; those of the choices of one question are weighed against each other.

    Attributes:
        dropout: on the pooled vector; none means the encoder's.
    """

    dropout: float | None = None
    kind: Literal["choice"] = "choice"

    def __post_init__(self) -> None:
        _check_outputs("choice", 1, self.dropout)


@dataclass(frozen=True)
class ReplacedHead:
    """Gives one score per token: that it is not the one that stood there (Clark et al. 2020, section 2)."""

    kind: Literal["replaced"] = "replaced"


@dataclass(frozen=True)
class NextTokenHead:
    """Predicts at each position the token that follows; of use where attention is causal, as in GPT (Radford et al. 2018)."""

    kind: Literal["causal"] = "causal"


@dataclass(frozen=True)
class BiLMHead:
    """Predicts at each position the token that follows, from what reads forward, and the one before, from what reads back.

    Of use where the two directions never meet, as in ELMo (Peters et al. 2018, section 3.1).
    """

    kind: Literal["bilm"] = "bilm"


Head = (
    MaskedHead
    | PoolerHead
    | PairHead
    | LabelHead
    | TagHead
    | SpanHead
    | ChoiceHead
    | ReplacedHead
    | NextTokenHead
    | BiLMHead
)


def _check_outputs(kind: str, count: int, dropout: float | None) -> None:
    require_at_least(1, f"heads.{kind}", count=count)
    require_probability(f"heads.{kind}", dropout=dropout)


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
        require_probability("encoder.readout", input_dropout=self.input_dropout)


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
