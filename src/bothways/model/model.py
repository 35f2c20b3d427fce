"""Heads: what reads the encoder. Each computes only where it has a target.

A model is an encoder and a set of heads; which heads is data (`Head`), so that every combination is one class.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal

from jaxtyping import Float, Int
from torch import Tensor, nn
from typing_extensions import assert_never

from bothways.attention.patterns import Causal
from bothways.core.batch import Batch
from bothways.core.errors import ConfigError
from bothways.model.config import EncoderConfig
from bothways.model.encoder import Encoder, Hidden
from bothways.model.head_config import (
    BiLMHead,
    ChoiceHead,
    FromPooler,
    Head,
    LabelHead,
    MaskedHead,
    NextTokenHead,
    Own,
    PairHead,
    PoolerHead,
    ReplacedHead,
    SpanHead,
    TagHead,
)
from bothways.model.heads import (
    BiLMOutput,
    DeepOutput,
    LinearOutput,
    MaskedOutput,
    NextTokenOutput,
    OwnOutput,
    Pooler,
    ReplacedOutput,
)
from bothways.model.lstm_config import LSTMConfig, ModelConfig
from bothways.model.lstm_encoder import AnyEncoder, LSTMEncoder
from bothways.runtime.allocator import tune_allocator


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

    def __init__(
        self, config: ModelConfig, heads: Iterable[Head], encoder: AnyEncoder | None = None
    ) -> None:
        super().__init__()
        tune_allocator()  # for its weights, too
        self.config = config
        self.specification = with_pooler(config, heads)
        self.encoder = build_encoder(config) if encoder is None else encoder
        self.heads = nn.ModuleDict(
            {head.kind: build_head(config, head) for head in self.specification}
        )

    def before_masked(
        self, batch: Batch, hidden: Hidden, only: Int[Tensor, " asked"] | None = None
    ) -> Float[Tensor, "tokens width"]:
        """What the masked LM head reads of an encoded batch: its vectors, or what the enhanced mask decoder makes of them.

        The decoder's queries are, at first, what the last block read plus absolute positions. It gives the vectors of the
        tokens `only`, where those are named; the encoder must have been asked for these, too.
        """
        head = self.heads["masked"]
        if not isinstance(head, MaskedOutput) or head.position is None or hidden.before is None:
            return hidden.last
        assert isinstance(self.encoder, Encoder)
        return self.encoder.decode(
            batch, hidden.before, hidden.before + head.position(batch.layout.positions), only
        )

    def read(
        self, kind: Literal["labels", "choice"], batch: Batch
    ) -> Float[Tensor, "sequences labels"]:
        """What a head of whole sequences makes of a batch: of the pooled vector, or of what it reads itself."""
        head = self.heads[kind]
        own = head if isinstance(head, OwnOutput) else None
        x = self.encoder(
            batch, only=None if own and own.reads == "mean" else batch.layout.first_tokens
        ).last
        result: Tensor = head(
            own.pool(x, batch.layout) if own else self.heads["pooler"](x, batch.layout)
        )
        return result


def build_encoder(config: ModelConfig) -> AnyEncoder:
    """An encoder of this shape with new weights."""
    return LSTMEncoder(config) if isinstance(config, LSTMConfig) else Encoder(config)


def token_head(config: ModelConfig) -> MaskedHead | NextTokenHead | BiLMHead:
    """What predicts tokens from this encoder without having read them: what it can be pre-trained with."""
    if isinstance(config, LSTMConfig):
        return BiLMHead()
    return (
        NextTokenHead()
        if all(isinstance(pattern, Causal) for pattern in config.patterns)
        else MaskedHead()
    )


def with_pooler(config: ModelConfig, heads: Iterable[Head]) -> tuple[Head, ...]:
    """These heads, and the pooler if one of them reads it."""
    wanted = tuple(heads)
    readers = {
        "pair": FromPooler(),
        "labels": config.readout.labels,
        "choice": config.readout.choice,
    }
    needs = any(isinstance(readers.get(head.kind), FromPooler) for head in wanted)
    return (PoolerHead(), *wanted) if needs and PoolerHead() not in wanted else wanted


def build_head(config: ModelConfig, head: Head) -> nn.Module:
    """The module of a head, with weights as Google starts them.

    Raises:
        ConfigError: an encoder of this shape has nothing that the head could read.
    """
    match head:
        case LabelHead(count, dropout):
            return _sequence_head(config, config.readout.labels, count, dropout)
        case TagHead(count, dropout):
            return _token_head(config, count, config.head_dropout if dropout is None else dropout)
        case SpanHead():
            if isinstance(config, EncoderConfig) and config.readout.span is not None:
                return DeepOutput(config, 2)
            return _token_head(config, 2, config.readout.span_dropout)
        case ChoiceHead(dropout):
            return _sequence_head(config, config.readout.choice, 1, dropout)
        case MaskedHead() | PoolerHead() | PairHead() | ReplacedHead() | NextTokenHead():
            if isinstance(config, LSTMConfig):
                what = f"the head {head.kind!r} reads one vector that knows both sides, and here two directions never meet"
                raise ConfigError(what, where="heads", fix="Predict tokens with the head 'bilm'.")
            return _joint_head(config, head)
        case BiLMHead():
            if not isinstance(config, LSTMConfig):
                what = "the head 'bilm' reads two directions that never meet, and here each token sees others"
                raise ConfigError(
                    what,
                    where="heads",
                    fix=f"Predict tokens with the head {token_head(config).kind!r}.",
                )
            return BiLMOutput(config)
        case _:
            assert_never(head)


def _joint_head(
    config: EncoderConfig, head: MaskedHead | PoolerHead | PairHead | ReplacedHead | NextTokenHead
) -> nn.Module:
    """A head that a Transformer alone has."""
    match head:
        case MaskedHead():
            return MaskedOutput(config)
        case PoolerHead():
            return Pooler(config)
        case PairHead():
            return LinearOutput(config, 2, config.readout.pair_dropout)
        case ReplacedHead():
            return ReplacedOutput(config)
        case NextTokenHead():
            if config.embedding is not None and config.readout.output == "embedding":
                what = f"the head predicts with the embedding, {config.embedding} features, from vectors of {config.width}"
                fix = 'Leave it out, or give the head a matrix of its own: readout.output = "own".'
                raise ConfigError(what, where="encoder.embedding", fix=fix)
            return NextTokenOutput(config)
        case _:
            assert_never(head)


def _token_head(config: ModelConfig, outputs: int, rate: float) -> nn.Module:
    own = config.readout.tokens
    return (
        LinearOutput(config, outputs, rate)
        if own is None
        else OwnOutput(config, own, outputs, rate)
    )


def _sequence_head(
    config: ModelConfig, reads: FromPooler | Own, outputs: int, dropout: float | None
) -> nn.Module:
    rate = config.head_dropout if dropout is None else dropout
    match reads:
        case FromPooler():
            return LinearOutput(config, outputs, rate)
        case Own():
            return OwnOutput(config, reads, outputs, rate)
        case _:
            assert_never(reads)
