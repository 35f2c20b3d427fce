"""Heads: what reads the encoder. Each computes only where it has a target.

A model is an encoder and a set of heads; which heads is data (`Head`), so that every combination is one class.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import assert_never

from bothways.core.batch import Batch
from bothways.core.errors import ConfigError
from bothways.core.layout import Layout
from bothways.model.block import activate
from bothways.model.config import Causal, Disentangled, EncoderConfig, FromPooler, Own
from bothways.model.dropout import Dropout
from bothways.model.encoder import Encoder, Hidden
from bothways.model.init import initialise
from bothways.model.norm import layer_norm
from bothways.model.recurrentconfig import ModelConfig, RecurrentConfig
from bothways.model.recurrentencoder import AnyEncoder, RecurrentEncoder


@dataclass(frozen=True)
class Masked:
    """Predicts the token at a masked position."""

    kind: Literal["masked"] = "masked"


@dataclass(frozen=True)
class Pooled:
    """Gives one vector per sequence, from [CLS]."""

    kind: Literal["pooler"] = "pooler"


@dataclass(frozen=True)
class Pair:
    """Tells from the pooled vector whether B follows A (0) or is a random segment (1)."""

    kind: Literal["pair"] = "pair"


@dataclass(frozen=True)
class Labels:
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
class Tags:
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
class Span:
    """Gives two scores for each token: that an answer begins there, and that it ends there."""

    kind: Literal["span"] = "span"


@dataclass(frozen=True)
class Choice:
    """Gives one score per sequence from the pooled vector; those of the choices of one question are weighed against each other.

    Attributes:
        dropout: on the pooled vector; none means the encoder's.
    """

    dropout: float | None = None
    kind: Literal["choice"] = "choice"

    def __post_init__(self) -> None:
        _check_outputs("choice", 1, self.dropout)


@dataclass(frozen=True)
class Replaced:
    """Gives one score per token: that it is not the one that stood there (Clark et al. 2020, section 2)."""

    kind: Literal["replaced"] = "replaced"


@dataclass(frozen=True)
class NextToken:
    """Predicts at each position the token that follows; of use where attention is causal, as in GPT (Radford et al. 2018)."""

    kind: Literal["causal"] = "causal"


@dataclass(frozen=True)
class BiLM:
    """Predicts at each position the token that follows, from what reads forward, and the one before, from what reads back.

    Of use where the two directions never meet, as in ELMo (Peters et al. 2018, section 3.1).
    """

    kind: Literal["bilm"] = "bilm"


Head = Masked | Pooled | Pair | Labels | Tags | Span | Choice | Replaced | NextToken | BiLM


def _check_outputs(kind: str, count: int, dropout: float | None) -> None:
    if count < 1:
        raise ConfigError(f"must be at least 1, not {count}", where=f"heads.{kind}.count")
    if dropout is not None and not 0 <= dropout < 1:
        raise ConfigError(f"must lie in [0, 1), not {dropout}", where=f"heads.{kind}.dropout")


class MaskedHead(nn.Module):
    """Predicts a token: dense, activation, LayerNorm, then the token embedding transposed plus a bias per token, if it has one.

    With an enhanced mask decoder (He et al. 2020, section 3.2) it holds the absolute positions: see `Model.before_masked`.

    Source: Devlin et al. 2018, section 3.1, Task #1; the decoder shares the encoder's embedding.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.activation = config.readout.masked or config.activation
        self.dense = nn.Linear(config.width, config.embedding_width, bias=config.bias.head)
        self.norm = layer_norm(config, config.embedding_width)
        self.bias = nn.Parameter(torch.zeros(config.vocab)) if config.bias.output else None
        place = config.position
        rows = place.most if isinstance(place, Disentangled) and place.absolute == "decoder" else 0
        self.position = nn.Embedding(rows, config.width) if rows else None
        initialise(self, config.initial_range)

    def forward(
        self, x: Float[Tensor, "targets width"], embedding: Float[Tensor, "vocab embedded"]
    ) -> Float[Tensor, "targets vocab"]:
        """Vectors at the masked positions, and the encoder's token embedding → logits."""
        x = self.norm(activate(self.activation, self.dense(x)))
        return nn.functional.linear(x, embedding, self.bias)


class Pooler(nn.Module):
    """tanh of a dense layer on the first token of each sequence, [CLS]."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.width, config.width)
        initialise(self, config.initial_range)

    def forward(self, x: Float[Tensor, "tokens width"], layout: Layout) -> Float[Tensor, "sequences width"]:
        return torch.tanh(self.dense(x[layout.offsets[:-1]]))


class LabelHead(nn.Module):
    """Dropout and a dense layer: on pooled vectors (next sentence, with rate 0; classes; choices) or on those of tokens.

    Source: Devlin et al. 2018, section 3.1, Task #2, sections 4.1 to 4.4 and 5.3.
    """

    def __init__(self, config: ModelConfig, labels: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)
        self.dense = nn.Linear(config.width, labels)
        initialise(self, config.initial_range)

    def forward(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows labels"]:
        result: Tensor = self.dense(self.dropout(x))
        return result


class OwnHead(nn.Module):
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
        result: Tensor = self.dense(self.dropout(self.norm(activate(self.activation, self.inner(self.first(x))))))
        return result

    def pool(self, x: Float[Tensor, "tokens width"], layout: Layout) -> Float[Tensor, "sequences width"]:
        """What it reads of each sequence."""
        match self.reads:
            case "first":
                return x[layout.offsets[:-1]]
            case "mean":
                sums = x.new_zeros(layout.sequences, x.shape[1]).index_add(0, layout.owner, x)
                return sums / layout.offsets.diff()[:, None].to(x.dtype)
            case _:
                assert_never(self.reads)


class DeepHead(nn.Module):
    """A feed-forward layer as the encoder's, with residual path and LayerNorm, then a dense layer to the outputs.

    Source: transformers' BigBirdForQuestionAnswering.
    """

    def __init__(self, config: EncoderConfig, outputs: int) -> None:
        super().__init__()
        self.activation = config.activation
        self.first, self.dropout = Dropout(config.head_dropout), Dropout(config.head_dropout)
        self.up = nn.Linear(config.width, config.inner)
        self.down = nn.Linear(config.inner, config.width)
        self.norm = layer_norm(config)
        self.dense = nn.Linear(config.width, outputs)
        initialise(self, config.initial_range)

    def forward(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows labels"]:
        inner = activate(self.activation, self.up(self.first(x)))
        result: Tensor = self.dense(self.norm(x + self.dropout(self.down(inner))))
        return result


class ReplacedHead(nn.Module):
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
        if self.norm is not None:
            x = self.norm(x + x[layout.offsets[:-1]][layout.owner])
        result: Tensor = self.dense(activate(self.activation, self.inner(x)))
        return result.squeeze(-1)


class NextTokenHead(nn.Module):
    """The token embedding transposed, on each token: no parameters of its own (Radford et al. 2018, equation 2)."""

    def forward(
        self, x: Float[Tensor, "tokens width"], embedding: Float[Tensor, "vocab embedded"]
    ) -> Float[Tensor, "tokens vocab"]:
        """Vectors and the encoder's token embedding → logits of the token after each."""
        return nn.functional.linear(x, embedding)


class BiLMHead(nn.Module):
    """The token embedding transposed, plus a bias per token: one softmax for both directions (Peters et al. 2018, 3.1)."""

    def __init__(self, config: RecurrentConfig) -> None:
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
        return nn.functional.linear(self.dropout(ahead if direction == "next" else back), embedding, self.bias)


class Model(nn.Module):
    """An encoder with heads by name: "masked", "pooler", "pair", "labels", "tags", "span", "choice", "replaced" …

    Args:
        config: the encoder's shape.
        heads: which heads it has; the pooler comes with those that read it.
        encoder: one of this shape, taken as it is; none for new weights.
    """

    def __init__(self, config: ModelConfig, heads: Iterable[Head], encoder: AnyEncoder | None = None) -> None:
        super().__init__()
        self.config = config
        self.specification = completed(config, heads)
        self.encoder = encoder or build_encoder(config)
        self.heads = nn.ModuleDict({head.kind: build_head(config, head) for head in self.specification})

    def before_masked(self, batch: Batch, hidden: Hidden) -> Float[Tensor, "tokens width"]:
        """What the masked LM head reads of an encoded batch: its vectors, or what the enhanced mask decoder makes of them.

        The decoder's queries are, at first, what the last block read plus absolute positions.
        """
        head = self.heads["masked"]
        if not isinstance(head, MaskedHead) or head.position is None or hidden.before is None:
            return hidden.last
        assert isinstance(self.encoder, Encoder)
        return self.encoder.decode(batch, hidden.before, hidden.before + head.position(batch.layout.positions))

    def read(
        self, kind: Literal["pair", "labels", "choice"], x: Float[Tensor, "tokens width"], layout: Layout
    ) -> Float[Tensor, "sequences labels"]:
        """What a head of whole sequences makes of them: of the pooled vector, or of what it reads itself."""
        head = self.heads[kind]
        result: Tensor = head(head.pool(x, layout) if isinstance(head, OwnHead) else self.heads["pooler"](x, layout))
        return result


def build_encoder(config: ModelConfig) -> AnyEncoder:
    """An encoder of this shape with new weights."""
    return RecurrentEncoder(config) if isinstance(config, RecurrentConfig) else Encoder(config)


def token_head(config: ModelConfig) -> Masked | NextToken | BiLM:
    """What predicts tokens from this encoder without having read them: what it can be pre-trained with."""
    if isinstance(config, RecurrentConfig):
        return BiLM()
    return NextToken() if all(isinstance(pattern, Causal) for pattern in config.patterns) else Masked()


def completed(config: ModelConfig, heads: Iterable[Head]) -> tuple[Head, ...]:
    """These heads, and the pooler if one of them reads it."""
    wanted = tuple(heads)
    readers = {"pair": FromPooler(), "labels": config.readout.labels, "choice": config.readout.choice}
    needs = any(isinstance(readers.get(head.kind), FromPooler) for head in wanted)
    return (Pooled(), *wanted) if needs and Pooled() not in wanted else wanted


def build_head(config: ModelConfig, head: Head) -> nn.Module:
    """The module of a head, with weights as Google starts them.

    Raises:
        ConfigError: an encoder of this shape has nothing that the head could read.
    """
    match head:
        case Labels(count, dropout):
            return _sequence_head(config, config.readout.labels, count, dropout)
        case Tags(count, dropout):
            return _token_head(config, count, config.head_dropout if dropout is None else dropout)
        case Span():
            if isinstance(config, EncoderConfig) and config.readout.span is not None:
                return DeepHead(config, 2)
            return _token_head(config, 2, config.readout.span_dropout)
        case Choice(dropout):
            return _sequence_head(config, config.readout.choice, 1, dropout)
        case Masked() | Pooled() | Pair() | Replaced() | NextToken():
            if isinstance(config, RecurrentConfig):
                what = f"the head {head.kind!r} reads one vector that knows both sides, and here two directions never meet"
                raise ConfigError(what, where="heads", fix="Predict tokens with the head 'bilm'.")
            return _joint_head(config, head)
        case BiLM():
            if not isinstance(config, RecurrentConfig):
                what = "the head 'bilm' reads two directions that never meet, and here each token sees others"
                raise ConfigError(what, where="heads", fix=f"Predict tokens with the head {token_head(config).kind!r}.")
            return BiLMHead(config)
        case _:
            assert_never(head)


def _joint_head(config: EncoderConfig, head: Masked | Pooled | Pair | Replaced | NextToken) -> nn.Module:
    """A head that a Transformer alone has."""
    match head:
        case Masked():
            return MaskedHead(config)
        case Pooled():
            return Pooler(config)
        case Pair():
            return LabelHead(config, 2, config.readout.pair_dropout)
        case Replaced():
            return ReplacedHead(config)
        case NextToken():
            if config.embedding is not None:
                what = f"the head predicts with the embedding, {config.embedding} features, from vectors of {config.width}"
                raise ConfigError(what, where="encoder.embedding", fix="Leave it out, or use another head.")
            return NextTokenHead()
        case _:
            assert_never(head)


def _token_head(config: ModelConfig, outputs: int, rate: float) -> nn.Module:
    own = config.readout.tokens
    return LabelHead(config, outputs, rate) if own is None else OwnHead(config, own, outputs, rate)


def _sequence_head(config: ModelConfig, reads: FromPooler | Own, outputs: int, dropout: float | None) -> nn.Module:
    rate = config.head_dropout if dropout is None else dropout
    match reads:
        case FromPooler():
            return LabelHead(config, outputs, rate)
        case Own():
            return OwnHead(config, reads, outputs, rate)
        case _:
            assert_never(reads)
