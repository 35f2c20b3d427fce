"""The shape of an encoder: one frozen configuration with a closed union for each axis of the
family.

A descendant of BERT is a value of these types (see `bothways.model.families`), never a class of its
own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from bothways.core.config.values import require_at_least, require_range
from bothways.core.errors import ConfigError
from bothways.model.attention.patterns import Blocks, Causal, Full, Pattern, Window
from bothways.model.positions import Disentangled, Learned, Position, Rotary

T = TypeVar("T")
Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]
"""GELU (Hendrycks & Gimpel 2016), exact or approximated as Google does, ReLU, and SiLU."""


@dataclass(frozen=True)
class PostNorm:
    """x ← LayerNorm(x + f(x)): the order of the Transformer and BERT.

    Attributes:
        embedding: whether a LayerNorm follows the embeddings, too; GPT has none.
        projected: whether it follows the layer that projects narrower embeddings to the width,
            which then has no bias.
    """

    embedding: bool = True
    projected: bool = False
    kind: Literal["post"] = "post"


@dataclass(frozen=True)
class PreNorm:
    """x ← x + f(LayerNorm(x)), and a LayerNorm after the last block (Xiong et al. 2020).

    It trains at higher learning rates. With segments and a pooler, transformers calls the result
    `megatron-bert`.

    Attributes:
        embedding: whether the first LayerNorm follows the embeddings, so that the residual path
            begins with normed vectors, and the first block's attention has none: ModernBERT's
            order.
    """

    embedding: bool = False
    kind: Literal["pre"] = "pre"


@dataclass(frozen=True)
class Plain:
    """down(f(up(x))): two dense layers with an activation between them."""

    kind: Literal["plain"] = "plain"


@dataclass(frozen=True)
class Gated:
    """down(f(up(x)) · gate(x)); GeGLU where the activation f is GELU (Shazeer 2020).

    Attributes:
        dropout: on the product.
    """

    dropout: float = 0.0
    kind: Literal["gated"] = "gated"

    def __post_init__(self) -> None:
        require_range("[0, 1)", "encoder.mlp", dropout=self.dropout)


@dataclass(frozen=True)
class Bias:
    """Which layers have a bias.

    Attributes:
        attention: the dense layers of attention.
        mlp: the feed-forward layers.
        up: among `mlp`, those before the activation.
        projections: among attention's layers, queries, keys and values.
        norm: LayerNorms, also in heads.
        head: the dense layer before the output of the masked LM head and of heads that read `Own`.
        output: the masked LM head's output, one number for each token of the vocabulary.
        key: among `projections`, keys, of tokens and of relative positions.
    """

    attention: bool = True
    mlp: bool = True
    projections: bool = True
    norm: bool = True
    head: bool = True
    output: bool = True
    key: bool = True
    up: bool = True


@dataclass(frozen=True)
class Sharing:
    """Layers that share their weights, as in ALBERT (Lan et al. 2019, section 3.1).

    Attributes:
        groups: of layers; all layers of a group have the same weights.
        layers_per_group: blocks that make up one layer.
        parts: what the layers of a group share: all, or attention or the feed-forward layer, each
            with its LayerNorm, while each layer has the other by itself (section 4.5).
    """

    groups: int = 1
    layers_per_group: int = 1
    parts: Literal["all", "attention", "mlp"] = "all"

    def __post_init__(self) -> None:
        location = "encoder.sharing"
        require_at_least(1, location, groups=self.groups, layers_per_group=self.layers_per_group)
        if self.parts != "all" and self.layers_per_group > 1:
            message = f"must be 1 where layers share {self.parts} alone, "
            message += f"not {self.layers_per_group}"
            raise ConfigError(message, where=f"{location}.layers_per_group")


DropoutPlace = Literal["sum", "embedding", "attention", "mlp"]
"""The sum of embeddings before its LayerNorm; after it; the outputs of attention; of the MLP."""


@dataclass(frozen=True)
class Dropouts:
    """Dropout rates.

    Attributes:
        hidden: on embeddings and on the outputs of sub-layers, at `places`, and on what heads read.
        attention: on attention probabilities.
        embedding: on embeddings; None for `hidden`.
        places: where `hidden` applies in the encoder.
    """

    hidden: float = 0.1
    attention: float = 0.1
    embedding: float | None = None
    places: tuple[DropoutPlace, ...] = ("embedding", "attention", "mlp")

    def __post_init__(self) -> None:
        require_range(
            "[0, 1)",
            "encoder.dropout",
            hidden=self.hidden,
            attention=self.attention,
            embedding=self.embedding,
        )


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
        require_range("[0, 1)", "encoder.readout", input_dropout=self.input_dropout)


@dataclass(frozen=True)
class FromVector:
    """The head reads the sentence vector, scaled to length 1, without a layer between.

    Attributes:
        reads: the first token, the last one in a causal encoder, or the mean of all tokens.
    """

    reads: Literal["first", "mean"] = "mean"
    kind: Literal["vector"] = "vector"


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
        shifted: whether the masked LM head predicts a token from the vector of the token before
            it (masked next-token prediction), not from the token's own.
        pair_dropout: the rate on the vector that the pair head reads.
        span_dropout: the rate on the vectors that the span head reads, unless `span` is set.
        replaced: what the replaced-token head reads of a token: its vector, or the normed sum of
            its vector and the first token's.
        output: the output matrix of the masked LM and next-token heads: the token embedding, or
            one of the head's "own" (not tied).
    """

    labels: FromPooler | Own | FromVector = FromPooler()
    choice: FromPooler | Own = FromPooler()
    tokens: Own | None = None
    span: Deep | None = None
    masked: Activation | Literal["direct"] | None = None
    shifted: bool = False
    pair_dropout: float = 0.0
    span_dropout: float = 0.0
    replaced: Literal["token", "with_first"] = "token"
    output: Literal["embedding", "own"] = "embedding"

    def __post_init__(self) -> None:
        require_range(
            "[0, 1)",
            "encoder.readout",
            pair_dropout=self.pair_dropout,
            span_dropout=self.span_dropout,
        )


@dataclass(frozen=True)
class EncoderConfig:
    """The shape of a Transformer encoder.

    Attributes:
        vocab: rows of the token embedding.
        width: features of a token, H.
        depth: layers, L; a layer is one block, or several (`sharing.layers_per_group`).
        heads: attention heads, A; each has width / heads features.
        intermediate_size: features inside the feed-forward layer, 4H in BERT.
        segments: rows of the segment embedding; 0 for a family without one.
        position: how positions are encoded.
        patterns: attention patterns, one for each layer in turn, repeated.
        order: where the LayerNorms are.
        mlp: how the feed-forward layer is built.
        bias: which layers have one.
        activation: of the feed-forward layer; "gelu" is exact (erf), "gelu_tanh" Google's
            approximation.
        norm_epsilon: added to the variance in LayerNorm.
        dropout: the rates, and where they apply.
        initial_range: σ of the truncated normal that weights are drawn from.
        pad: the id of the padding token, which other libraries need; no packed sequence contains
            it. None without one.
        embedding: features of the embeddings, E, which a dense layer projects to the width; None
            if they have the same width.
        sharing: which layers share weights; None if no two do.
        readout: how heads read the encoder.
        norm: LayerNorm, or RMSNorm without mean and bias (Zhang & Sennrich 2019), everywhere.
        key_value_heads: heads of keys and values, each read by a group of query heads (Ainslie et
            al. 2023); None for as many as `heads`.
        task_types: rows of the task embedding, whose first one is added to every token; 0 for a
            family without one. ERNIE has it.

    Examples:
        >>> config = bothways.EncoderConfig(vocab=30522, width=256, depth=4, heads=4)
        >>> config.max_positions
        512
    """

    vocab: int
    width: int = 768
    depth: int = 12
    heads: int = 12
    intermediate_size: int = 3072
    segments: int = 2
    position: Position = Learned()
    patterns: tuple[Pattern, ...] = (Full(),)
    order: PostNorm | PreNorm = PostNorm()
    mlp: Plain | Gated = Plain()
    bias: Bias = Bias()
    activation: Activation = "gelu"
    norm_epsilon: float = 1e-12
    dropout: Dropouts = Dropouts()
    initial_range: float = 0.02
    pad: int | None = 0
    embedding: int | None = None
    sharing: Sharing | None = None
    readout: Readout = Readout()
    task_types: int = 0
    norm: Literal["layer", "rms"] = "layer"
    key_value_heads: int | None = None

    @property
    def max_positions(self) -> int:
        """The longest input, in tokens."""
        return self.position.max_positions

    @property
    def embedding_width(self) -> int:
        """Features of a token before the first layer."""
        return self.width if self.embedding is None else self.embedding

    @property
    def blocks(self) -> int:
        """The number of blocks with weights of their own."""
        sharing = self.sharing
        if sharing is None or sharing.parts != "all":
            return self.depth
        return sharing.groups * sharing.layers_per_group

    @property
    def steps(self) -> int:
        """The number of blocks that a token goes through."""
        return self.depth * (1 if self.sharing is None else self.sharing.layers_per_group)

    @property
    def has_global_attention(self) -> bool:
        """True if attention has separate queries, keys and values for global tokens.

        If one layer has them, all have.
        """
        return any(
            isinstance(pattern, Window) and pattern.global_attention for pattern in self.patterns
        )

    @property
    def has_relative_scores(self) -> bool:
        """True if distances between tokens add to the attention scores."""
        position = self.position
        return isinstance(position, Disentangled) or (
            isinstance(position, Learned) and position.bias is not None
        )

    @property
    def is_causal(self) -> bool:
        """True if every layer is causal, so that only the last token has seen all others."""
        return all(isinstance(pattern, Causal) for pattern in self.patterns)

    def require_causal(self, where: str) -> None:
        """Raise ConfigError if this encoder cannot read single sequences from left to right.

        Blocks, global tokens and an n-gram convolution see later tokens, too.
        """
        position = self.position
        reasons = {
            "a convolution of n-grams": isinstance(position, Disentangled) and position.convolution,
            "global tokens": self.has_global_attention,
            "blocks": any(isinstance(pattern, Blocks) for pattern in self.patterns),
        }
        if parts := [name for name, present in reasons.items() if present]:
            message = f"an encoder with {' and '.join(parts)} cannot read from left to right"
            fix = "Choose a shape with full attention, such as bert-mini."
            raise ConfigError(message, where=where, fix=fix)

    @property
    def norm_after_projection(self) -> bool:
        """True if the LayerNorm of narrow embeddings follows their projection to the width."""
        order = self.order
        normed = isinstance(order, PostNorm) and order.embedding and order.projected
        return normed and self.embedding is not None

    @property
    def first_norm(self) -> bool:
        """True if the first block's attention has a LayerNorm; shared blocks always have."""
        post = isinstance(self.order, PostNorm)
        return post or not self.order.embedding or self.sharing is not None

    @property
    def canonical(self) -> EncoderConfig:
        """The same encoder with the shortest cycles: equal for encoders that compute the same."""
        position, depth = self.position, self.depth
        if isinstance(position, Rotary):
            bases = [position.bases[layer % len(position.bases)] for layer in range(depth)]
            position = replace(position, bases=_shortest(bases))
        patterns = _shortest([self.pattern(layer) for layer in range(depth)])
        return replace(self, position=position, patterns=patterns)

    def pattern(self, layer: int) -> Pattern:
        """Return the attention pattern of a layer."""
        return self.patterns[layer % len(self.patterns)]

    def base(self, layer: int) -> float | None:
        """Return the base of a layer's rotary angles; None without them."""
        position = self.position
        return position.bases[layer % len(position.bases)] if isinstance(position, Rotary) else None

    def dropout_at(self, site: DropoutPlace) -> float:
        """Return the rate at a place."""
        rates = self.dropout
        if site not in rates.places:
            return 0.0
        specific = rates.embedding if site in ("sum", "embedding") else None
        return rates.hidden if specific is None else specific

    def with_dropout(self, rates: Dropouts, mlp: float) -> EncoderConfig:
        """Return this encoder with other dropout rates; `mlp` is that inside a gated layer."""
        gated = replace(self.mlp, dropout=mlp) if isinstance(self.mlp, Gated) else self.mlp
        return replace(self, dropout=rates, mlp=gated)

    def with_dropout_of(self, other: EncoderConfig) -> EncoderConfig:
        """Return this encoder with the dropout rates of another encoder."""
        return self.with_dropout(other.dropout, getattr(other.mlp, "dropout", 0.0))

    def __post_init__(self) -> None:
        sizes = ("vocab", "width", "depth", "heads", "intermediate_size", "embedding")
        require_at_least(1, "encoder", **{name: getattr(self, name) for name in sizes})
        require_at_least(0, "encoder", segments=self.segments, task_types=self.task_types)
        require_range(
            "(0, inf)",
            "encoder",
            norm_epsilon=self.norm_epsilon,
            initial_range=self.initial_range,
        )
        if self.width % self.heads:
            message = f"width {self.width} cannot be divided among {self.heads} heads"
            fix = f"Use a number of heads that divides {self.width}."
            raise ConfigError(message, where="encoder.heads", fix=fix)
        require_at_least(1, "encoder", key_value_heads=self.key_value_heads)
        if self.key_value_heads is not None:
            location = "encoder.key_value_heads"
            if self.heads % self.key_value_heads:
                groups = f"{self.key_value_heads} heads of keys and values"
                message = f"{self.heads} heads cannot be divided among {groups}"
                fix = f"Use a number that divides {self.heads}."
                raise ConfigError(message, where=location, fix=fix)
            if isinstance(self.position, Disentangled) or not self.bias.key:
                message = "cannot be combined with disentangled positions or keys without a bias"
                raise ConfigError(message, where=location, fix="Leave it out.")
        if self.sharing is not None and self.sharing.groups > self.depth:
            message = f"{self.sharing.groups} groups cannot share {self.depth} layers"
            fix = f"Use at most {self.depth}."
            raise ConfigError(message, where="encoder.sharing.groups", fix=fix)
        if not self.patterns:
            message = "must hold at least one pattern"
            raise ConfigError(message, where="encoder.patterns", fix='Full attention is ["full"].')
        self._check_position()
        if self.pad is not None and not 0 <= self.pad < self.vocab:
            message = f"id {self.pad} is not in the vocabulary of {self.vocab}"
            raise ConfigError(message, where="encoder.pad")

    def _check_position(self) -> None:
        position, heads, width = self.position, self.heads, self.width
        if isinstance(position, Rotary) and width // heads % 2:
            actual = f"width / heads = {width // heads}"
            message = f"rotary positions need an even head size, but {actual}"
            raise ConfigError(message, where="encoder.heads", fix="Use heads of an even width.")
        convolution = position.convolution if isinstance(position, Disentangled) else None
        if convolution is not None and width % convolution.groups:
            message = f"width {width} cannot be divided among {convolution.groups} groups"
            fix = f"Use a number that divides {width}."
            raise ConfigError(message, where="encoder.position.convolution.groups", fix=fix)
        sparse = self.has_global_attention or any(isinstance(p, Blocks) for p in self.patterns)
        if self.has_relative_scores and sparse:
            relative = isinstance(position, Disentangled)
            name = "disentangled positions" if relative else "a bias of distances"
            message = f"{name} cannot be combined with block-sparse patterns or global tokens"
            fix = "Use learned positions, or full attention and windows."
            raise ConfigError(message, where="encoder.patterns", fix=fix)


def with_vocabulary(encoder: EncoderConfig, size: int, pad: int | None) -> EncoderConfig:
    """Return the encoder with another vocabulary size and padding id.

    RoBERTa's positions count from the padding id.
    """
    position = encoder.position
    if isinstance(position, Learned) and position.offset and pad is not None:
        position = replace(position, offset=pad + 1)
    return replace(encoder, vocab=size, pad=pad, position=position)


def _shortest(values: Sequence[T]) -> tuple[T, ...]:
    """Return the shortest cycle that gives these values: [a, b, a, b, a] → (a, b)."""
    lengths = range(1, len(values) + 1)
    cycles = (n for n in lengths if all(v == values[at % n] for at, v in enumerate(values)))
    return tuple(values[: next(cycles)])
