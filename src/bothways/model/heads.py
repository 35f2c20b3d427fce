"""Heads as frozen values: which heads a model has.

A value knows its module (`build`), its cost (`flops`), which vectors it reads, how many outputs it
has and the suffix of its class in transformers. To add a head, write such a value and its module,
and add the value to `Head`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from torch import nn

from bothways.core.config.checks import require_at_least, require_probability
from bothways.core.errors import ConfigError
from bothways.model import head_modules
from bothways.model.config import EncoderConfig, FromPooler, Own


class HeadValue:
    """Base class of head specifications; its defaults are for a head that reads every token."""

    kind: str
    title: ClassVar[str]
    suffix: ClassVar[str | None] = None
    """The end of its class in transformers; None without one of its own."""

    fixed_outputs: ClassVar[int | None] = None
    """Outputs per row, where all heads of the kind have as many."""

    of_sequences: ClassVar[bool] = False
    """Whether it returns a row for each sequence, not for each token."""

    @property
    def outputs(self) -> int | None:
        """Outputs per row; None for one per token of the vocabulary, and for vectors."""
        return self.fixed_outputs

    def build(self, config: EncoderConfig) -> nn.Module:
        """Return a new module; ConfigError if the encoder has nothing that the head could read."""
        raise NotImplementedError

    def _source(self, config: EncoderConfig) -> FromPooler | Own | None:
        """Return the source of its input in a sequence; None for every token."""
        return None

    def reads_one_token(self, config: EncoderConfig) -> bool:
        """Return True if it reads one token of each sequence, the pooler's, and no other."""
        source = self._source(config)
        return source.reads == "first" if isinstance(source, Own) else source is not None

    def reads_pooler(self, config: EncoderConfig) -> bool:
        """Return True if it reads the pooled vector."""
        return isinstance(self._source(config), FromPooler)


@dataclass(frozen=True)
class MaskedHead(HeadValue):
    """Predicts the token at a masked position."""

    kind: Literal["masked"] = "masked"
    title: ClassVar[str] = "masked LM head"
    suffix: ClassVar[str | None] = "ForMaskedLM"

    def build(self, config: EncoderConfig) -> nn.Module:
        if config.readout.masked == "direct" and config.embedding is not None:
            message = "a direct head reads the encoder's width, and the embeddings have another"
            raise ConfigError(message, where="encoder.readout.masked", fix="Use an activation.")
        return head_modules.MaskedOutput(config)


class _PooledValue(HeadValue):
    """A head of whole sequences."""

    of_sequences: ClassVar[bool] = True

    def _source(self, config: EncoderConfig) -> FromPooler | Own | None:
        return FromPooler()


@dataclass(frozen=True)
class PoolerHead(_PooledValue):
    """Returns one vector per sequence, from [CLS]."""

    kind: Literal["pooler"] = "pooler"
    title: ClassVar[str] = "pooler"

    def build(self, config: EncoderConfig) -> nn.Module:
        return head_modules.Pooler(config)

    def reads_pooler(self, config: EncoderConfig) -> bool:
        return False  # it is the pooler


@dataclass(frozen=True)
class PairHead(_PooledValue):
    """Predicts from the pooled vector whether B follows A (0) or is a random segment (1)."""

    kind: Literal["pair"] = "pair"
    title: ClassVar[str] = "next sentence head"
    fixed_outputs: ClassVar[int | None] = 2

    def build(self, config: EncoderConfig) -> nn.Module:
        return head_modules.LinearOutput(config, 2, config.readout.pair_dropout)


@dataclass(frozen=True)
class LabelHead(_PooledValue):
    """Returns `count` outputs per sequence: logits of classes, or a score.

    Attributes:
        dropout: on the pooled vector; None for the encoder's.
    """

    count: int
    dropout: float | None = None
    kind: Literal["labels"] = "labels"
    title: ClassVar[str] = "label head"
    suffix: ClassVar[str | None] = "ForSequenceClassification"

    def __post_init__(self) -> None:
        _check_outputs(self.kind, self.count, self.dropout)

    @property
    def outputs(self) -> int:
        return self.count

    def _source(self, config: EncoderConfig) -> FromPooler | Own | None:
        return config.readout.labels

    def build(self, config: EncoderConfig) -> nn.Module:
        return _output(config, self._source(config), self.count, self.dropout)


@dataclass(frozen=True)
class TagHead(HeadValue):
    """Returns `count` logits for each token.

    Attributes:
        dropout: on the token's vector; None for the encoder's.
    """

    count: int
    dropout: float | None = None
    kind: Literal["tags"] = "tags"
    title: ClassVar[str] = "tag head"
    suffix: ClassVar[str | None] = "ForTokenClassification"

    def __post_init__(self) -> None:
        _check_outputs(self.kind, self.count, self.dropout)

    @property
    def outputs(self) -> int:
        return self.count

    def build(self, config: EncoderConfig) -> nn.Module:
        return _output(config, config.readout.tokens, self.count, self.dropout)


@dataclass(frozen=True)
class SpanHead(HeadValue):
    """Returns two scores for each token: that an answer begins there, and that it ends there."""

    kind: Literal["span"] = "span"
    title: ClassVar[str] = "span head"
    fixed_outputs: ClassVar[int | None] = 2
    suffix: ClassVar[str | None] = "ForQuestionAnswering"

    def build(self, config: EncoderConfig) -> nn.Module:
        if config.readout.span is not None:
            return head_modules.DeepOutput(config, 2)
        return _output(config, config.readout.tokens, 2, config.readout.span_dropout)


@dataclass(frozen=True)
class ChoiceHead(_PooledValue):
    """Returns one score per sequence; the choices of one question are compared by it.

    Attributes:
        dropout: on the pooled vector; None for the encoder's.
    """

    dropout: float | None = None
    kind: Literal["choice"] = "choice"
    title: ClassVar[str] = "choice head"
    fixed_outputs: ClassVar[int | None] = 1
    suffix: ClassVar[str | None] = "ForMultipleChoice"

    def __post_init__(self) -> None:
        _check_outputs(self.kind, 1, self.dropout)

    def _source(self, config: EncoderConfig) -> FromPooler | Own | None:
        return config.readout.choice

    def build(self, config: EncoderConfig) -> nn.Module:
        return _output(config, self._source(config), 1, self.dropout)


@dataclass(frozen=True)
class ReplacedHead(HeadValue):
    """Returns one score per token: that it was replaced (Clark et al. 2020, section 2)."""

    kind: Literal["replaced"] = "replaced"
    title: ClassVar[str] = "replaced-token head"
    fixed_outputs: ClassVar[int | None] = 1

    def build(self, config: EncoderConfig) -> nn.Module:
        return head_modules.ReplacedOutput(config)


@dataclass(frozen=True)
class NextTokenHead(HeadValue):
    """Predicts the next token at each position, for causal attention (Radford et al. 2018)."""

    kind: Literal["causal"] = "causal"
    title: ClassVar[str] = "next-token head"
    suffix: ClassVar[str | None] = "LMHeadModel"

    def build(self, config: EncoderConfig) -> nn.Module:
        if config.embedding is not None and config.readout.output == "embedding":
            raise ConfigError(
                f"the next-token head predicts with the token embedding, whose {config.embedding} "
                f"features differ from the encoder's {config.width}",
                where="encoder.embedding",
                fix='Leave it out, or give the head its own matrix: readout.output = "own".',
            )
        return head_modules.NextTokenOutput(config)


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
)
HEADS: dict[str, type[Head]] = {
    each.__dataclass_fields__["kind"].default: each for each in get_args(Head)
}
"""The heads by kind."""


def token_head(config: EncoderConfig) -> MaskedHead | NextTokenHead:
    """Return the head that predicts tokens that the encoder has not read."""
    return NextTokenHead() if config.is_causal else MaskedHead()


def with_pooler(config: EncoderConfig, heads: Iterable[Head]) -> tuple[Head, ...]:
    """Return these heads, with the pooler in front if one of them reads it."""
    specification = tuple(heads)
    needs = any(head.reads_pooler(config) for head in specification)
    return (
        (PoolerHead(), *specification)
        if needs and PoolerHead() not in specification
        else specification
    )


def _output(
    config: EncoderConfig, source: FromPooler | Own | None, outputs: int, dropout: float | None
) -> nn.Module:
    rate = config.head_dropout if dropout is None else dropout
    if isinstance(source, Own):
        return head_modules.OwnOutput(config, source, outputs, rate)
    return head_modules.LinearOutput(config, outputs, rate)


def _check_outputs(kind: str, count: int, dropout: float | None) -> None:
    require_at_least(1, f"heads.{kind}", count=count)
    require_probability(f"heads.{kind}", dropout=dropout)
