"""Heads: what reads the encoder. Each computes only where it has a target.

A model is an encoder and a set of heads; which heads is data (`Head`), so that every combination is one class.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from jaxtyping import Float, Int
from torch import Tensor, nn
from typing_extensions import assert_never

from bothways.core.allocator import tune_allocator
from bothways.core.batch import Batch
from bothways.core.errors import ConfigError
from bothways.core.ranges import check_least, check_rates
from bothways.model.config import Causal, EncoderConfig, FromPooler, Own
from bothways.model.encoder import Encoder, Hidden
from bothways.model.headlayers import BiLMHead, DeepHead, LabelHead, MaskedHead, NextTokenHead, OwnHead, Pooler, ReplacedHead
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
    check_least(1, f"heads.{kind}", count=count)
    check_rates(f"heads.{kind}", dropout=dropout)


class Model(nn.Module):
    """An encoder with heads by name: "masked", "pooler", "pair", "labels", "tags", "span", "choice", "replaced" …

    Args:
        config: the encoder's shape.
        heads: which heads it has; the pooler comes with those that read it.
        encoder: one of this shape, taken as it is; none for new weights.

    Attributes:
        kept: settings of the folder that it was read from, by file, that only other programs use.
    """

    kept: Mapping[str, Mapping[str, Any]] = MappingProxyType({})

    def __init__(self, config: ModelConfig, heads: Iterable[Head], encoder: AnyEncoder | None = None) -> None:
        super().__init__()
        tune_allocator()  # for its weights, too
        self.config = config
        self.specification = completed(config, heads)
        self.encoder = build_encoder(config) if encoder is None else encoder
        self.heads = nn.ModuleDict({head.kind: build_head(config, head) for head in self.specification})

    def before_masked(
        self, batch: Batch, hidden: Hidden, only: Int[Tensor, " asked"] | None = None
    ) -> Float[Tensor, "tokens width"]:
        """What the masked LM head reads of an encoded batch: its vectors, or what the enhanced mask decoder makes of them.

        The decoder's queries are, at first, what the last block read plus absolute positions. It gives the vectors of the
        tokens `only`, where those are named; the encoder must have been asked for these, too.
        """
        head = self.heads["masked"]
        if not isinstance(head, MaskedHead) or head.position is None or hidden.before is None:
            return hidden.last
        assert isinstance(self.encoder, Encoder)
        return self.encoder.decode(batch, hidden.before, hidden.before + head.position(batch.layout.positions), only)

    def read(self, kind: Literal["labels", "choice"], batch: Batch) -> Float[Tensor, "sequences labels"]:
        """What a head of whole sequences makes of a batch: of the pooled vector, or of what it reads itself."""
        head = self.heads[kind]
        own = head if isinstance(head, OwnHead) else None
        x = self.encoder(batch, only=None if own and own.reads == "mean" else batch.layout.firsts).last
        result: Tensor = head(own.pool(x, batch.layout) if own else self.heads["pooler"](x, batch.layout))
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
            if config.embedding is not None and config.readout.output == "embedding":
                what = f"the head predicts with the embedding, {config.embedding} features, from vectors of {config.width}"
                fix = 'Leave it out, or give the head a matrix of its own: readout.output = "own".'
                raise ConfigError(what, where="encoder.embedding", fix=fix)
            return NextTokenHead(config)
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
