"""Heads: frozen values that say which heads a model has, and the modules on top of the encoder.

A value knows its module (`build`), which vectors it reads, how many outputs it
has and the suffix of its class in transformers. To add a head, write such a value and its module,
and add the value to `Head`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bothways.core.batch import Layout
from bothways.core.config.values import require_at_least, require_range
from bothways.core.errors import ConfigError, setting
from bothways.model.block import activate
from bothways.model.config import EncoderConfig, FromPooler, FromVector, Own
from bothways.model.init import initialise, layer_norm
from bothways.model.kernels.dropout import Dropout
from bothways.model.kernels.linear import on_round_rows, to_vocabulary
from bothways.model.positions import Disentangled

Source = FromPooler | Own | FromVector
"""What a head reads of a sequence."""


class MaskedOutput(nn.Module):
    """Dense layer, activation, LayerNorm, then the transposed token embedding and a bias per token.

    Instead of the embedding it may have a matrix of its own (`Readout.output`). With an enhanced
    mask decoder (He et al. 2020, section 3.2) it holds the absolute positions that
    `Model.masked_vectors` adds.

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
        initialise(self, config, outputs=("dense",))

    def forward(
        self, x: Float[Tensor, "targets width"], embedding: Float[Tensor, "vocab embedded"]
    ) -> Float[Tensor, "targets vocab"]:
        """Return logits for vectors at masked positions, given the encoder's token embedding."""
        weight = embedding if self.output is None else self.output.weight

        def compute(rows: Tensor) -> Tensor:
            if self.activation is not None:
                rows = self.norm(activate(self.activation, self.dense(rows)))
            return to_vocabulary(rows, weight, self.bias)

        return on_round_rows(compute, x)


class Pooler(nn.Module):
    """tanh of a dense layer on one vector of each sequence: the first, or the last if causal."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.causal = config.is_causal
        self.dense = nn.Linear(config.width, config.width)
        initialise(self, config)

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
        initialise(self, config)

    def forward(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows labels"]:
        """Return W dropout(x) + b."""
        return on_round_rows(self.dense, self.dropout(x))


class VectorOutput(LinearOutput):
    """A dense layer on the sentence vector, such as a logistic regression (`FromVector`)."""

    def __init__(
        self, config: EncoderConfig, source: FromVector, outputs: int, dropout: float
    ) -> None:
        super().__init__(config, outputs, dropout)
        self.reads, self.causal = source.reads, config.is_causal

    def pool(
        self, x: Float[Tensor, "tokens width"], layout: Layout
    ) -> Float[Tensor, "sequences width"]:
        """Return the vector that the head reads of each sequence, of length 1 and in fp32."""
        first = self.reads == "first"
        x = x[pooled_tokens(layout, self.causal)] if first else _means(x.float(), layout)
        return nn.functional.normalize(x.float(), dim=-1)


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
        initialise(self, config, outputs=("inner",))

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
        if self.reads == "first":
            return x[pooled_tokens(layout, self.causal)]
        return _means(on_round_rows(self._hidden, x) if self.reads == "late" else x, layout)


class DeepOutput(nn.Module):
    """A feed-forward layer with residual path and LayerNorm, then a dense layer to the outputs.

    Source: transformers' BigBirdForQuestionAnswering.
    """

    def __init__(self, config: EncoderConfig, outputs: int) -> None:
        super().__init__()
        self.activation = config.activation
        self.first, self.dropout = Dropout(config.dropout.hidden), Dropout(config.dropout.hidden)
        self.up = nn.Linear(config.width, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.width)
        self.norm = layer_norm(config)
        self.dense = nn.Linear(config.width, outputs)
        initialise(self, config)

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
        initialise(self, config)

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
        initialise(self, config)

    def forward(
        self, x: Float[Tensor, "tokens width"], embedding: Float[Tensor, "vocab embedded"]
    ) -> Float[Tensor, "tokens vocab"]:
        """Return logits of the token after each, given the encoder's token embedding."""
        weight = embedding if self.output is None else self.output.weight
        return on_round_rows(lambda rows: to_vocabulary(rows, weight), x)


def pooled_tokens(layout: Layout, causal: bool) -> Int[Tensor, " sequences"]:
    """Return the token that represents each sequence: the first, [CLS], or the last if causal.

    In a causal encoder the first token attends to itself alone.
    """
    return layout.last_tokens if causal else layout.first_tokens


def _means(x: Float[Tensor, "tokens width"], layout: Layout) -> Float[Tensor, "sequences width"]:
    """Return the mean over the tokens of each sequence, special ones included."""
    # A sum in bf16 would lose small terms beside hundreds of others.
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    sums = exact.new_zeros(layout.sequences, x.shape[1]).index_add(0, layout.sequence_ids, exact)
    return (sums / layout.cu_seqlens.diff()[:, None].to(exact.dtype)).to(x.dtype)


def _own_output(config: EncoderConfig, width: int) -> nn.Linear | None:
    """Return the head's own output matrix; None if it shares the token embedding."""
    return nn.Linear(width, config.vocab, bias=False) if config.readout.output == "own" else None


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

    of_vocabulary: ClassVar[bool] = False
    """Whether it has an output for each token of the vocabulary."""

    reads_batch: ClassVar[bool] = True
    """Whether `Model.outputs` computes it; one that reads more is called by its task model."""

    def __post_init__(self) -> None:
        require_at_least(1, f"heads.{self.kind}", count=self.label_count)
        require_range("[0, 1)", f"heads.{self.kind}", dropout=getattr(self, "dropout", None))

    @property
    def outputs(self) -> int | None:
        """Outputs per row; None for one per token of the vocabulary, and for vectors."""
        return self.fixed_outputs if self.label_count is None else self.label_count

    @property
    def label_count(self) -> int | None:
        """Outputs that labels name, the field `count`; None for a head without this field."""
        count: int | None = getattr(self, "count", None)
        return count

    def build(self, config: EncoderConfig) -> nn.Module:
        """Return a new module; ConfigError if the encoder has nothing that the head could read."""
        raise NotImplementedError

    def _source(self, config: EncoderConfig) -> Source | None:
        """Return the source of its input in a sequence; None for every token."""
        return None

    def reads_one_token(self, config: EncoderConfig) -> bool:
        """Return True if it reads one token of each sequence, the pooler's, and no other."""
        source = self._source(config)
        if isinstance(source, Own | FromVector):
            return source.reads == "first"
        return source is not None

    def reads_pooler(self, config: EncoderConfig) -> bool:
        """Return True if it reads the pooled vector."""
        return isinstance(self._source(config), FromPooler)


@dataclass(frozen=True)
class MaskedHead(HeadValue):
    """Predicts the token at a masked position."""

    kind: Literal["masked"] = "masked"
    title: ClassVar[str] = "masked LM head"
    of_vocabulary: ClassVar[bool] = True
    suffix: ClassVar[str | None] = "ForMaskedLM"

    def build(self, config: EncoderConfig) -> nn.Module:
        if config.readout.masked == "direct" and config.embedding is not None:
            message = "a direct head reads the encoder's width, and the embeddings have another"
            raise ConfigError(message, where="encoder.readout.masked", fix="Use an activation.")
        head = MaskedOutput(config)
        if config.readout.shifted and head.position is not None:
            message = "an enhanced mask decoder predicts a token in its own place"
            raise ConfigError(message, where="encoder.readout.shifted", fix="Leave it out.")
        return head


class _PooledValue(HeadValue):
    """A head of whole sequences."""

    of_sequences: ClassVar[bool] = True

    def _source(self, config: EncoderConfig) -> Source | None:
        return FromPooler()


@dataclass(frozen=True)
class PoolerHead(_PooledValue):
    """Returns one vector per sequence, from [CLS]."""

    kind: Literal["pooler"] = "pooler"
    title: ClassVar[str] = "pooler"

    def build(self, config: EncoderConfig) -> nn.Module:
        return Pooler(config)

    def reads_pooler(self, config: EncoderConfig) -> bool:
        return False  # it is the pooler


@dataclass(frozen=True)
class PairHead(_PooledValue):
    """Predicts from the pooled vector whether B follows A (0) or is a random segment (1)."""

    kind: Literal["pair"] = "pair"
    title: ClassVar[str] = "next sentence head"
    fixed_outputs: ClassVar[int | None] = 2

    def build(self, config: EncoderConfig) -> nn.Module:
        return LinearOutput(config, 2, config.readout.pair_dropout)


@dataclass(frozen=True)
class LabelHead(_PooledValue):
    """Returns `count` outputs per sequence: logits of classes, or a score.

    Attributes:
        dropout: on the pooled vector; None for the encoder's, and for 0 on a sentence vector.
    """

    count: int
    dropout: float | None = None
    kind: Literal["labels"] = "labels"
    title: ClassVar[str] = "label head"
    suffix: ClassVar[str | None] = "ForSequenceClassification"

    def _source(self, config: EncoderConfig) -> Source | None:
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
            return DeepOutput(config, 2)
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

    def _source(self, config: EncoderConfig) -> Source | None:
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
        return ReplacedOutput(config)


@dataclass(frozen=True)
class NextTokenHead(HeadValue):
    """Predicts the next token at each position, for causal attention (Radford et al. 2018)."""

    kind: Literal["causal"] = "causal"
    title: ClassVar[str] = "next-token head"
    of_vocabulary: ClassVar[bool] = True
    suffix: ClassVar[str | None] = "LMHeadModel"

    def build(self, config: EncoderConfig) -> nn.Module:
        if config.embedding is not None and config.readout.output == "embedding":
            message = "the next-token head predicts with the token embedding, whose "
            message += f"{config.embedding} features differ from the encoder's {config.width}"
            fix = f"Leave it out, or set {setting('encoder.readout.output', 'own')}."
            raise ConfigError(message, where="encoder.embedding", fix=fix)
        return NextTokenOutput(config)


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
HEADS: dict[str, type[Head]] = {head.kind: head for head in get_args(Head)}
"""The heads by kind."""


def token_head(config: EncoderConfig) -> MaskedHead | NextTokenHead:
    """Return the head that predicts tokens that the encoder has not read."""
    return NextTokenHead() if config.is_causal else MaskedHead()


def with_pooler(config: EncoderConfig, heads: Iterable[Head]) -> tuple[Head, ...]:
    """Return these heads, with the pooler in front if one of them reads it."""
    specification = tuple(heads)
    needs = any(head.reads_pooler(config) for head in specification)
    if needs and PoolerHead() not in specification:
        return (PoolerHead(), *specification)
    return specification


def _output(
    config: EncoderConfig, source: Source | None, outputs: int, dropout: float | None
) -> nn.Module:
    rate = config.dropout.hidden if dropout is None else dropout
    if isinstance(source, Own):
        return OwnOutput(config, source, outputs, rate)
    if isinstance(source, FromVector):
        return VectorOutput(config, source, outputs, dropout or 0.0)
    return LinearOutput(config, outputs, rate)
