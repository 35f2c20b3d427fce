"""What an encoder is: one frozen configuration with a closed union for each axis on which the family differs.

A descendant of BERT is a value of this type (see `bothways.families`), never a class of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from bothways.attention.patterns import Blocks, Causal, Full, Pattern, Window
from bothways.core.config.checks import require_at_least, require_probability
from bothways.core.errors import ConfigError
from bothways.model.activation import Activation
from bothways.model.head_config import Deep, FromPooler, Own, Readout
from bothways.model.positions import Disentangled, Learned, Rotary, Sinusoidal

__all__ = [
    "Activation",
    "Bias",
    "Blocks",
    "Causal",
    "Deep",
    "Disentangled",
    "DropoutPlace",
    "Dropouts",
    "EncoderConfig",
    "FromPooler",
    "Full",
    "Gated",
    "Learned",
    "Own",
    "Pattern",
    "Plain",
    "PostNorm",
    "PreNorm",
    "Readout",
    "Rotary",
    "Sharing",
    "Sinusoidal",
    "Window",
]  # fmt: skip

T = TypeVar("T")


@dataclass(frozen=True)
class PostNorm:
    """x ← LayerNorm(x + f(x)): the Transformer's and BERT's order.

    Attributes:
        embedding: whether a LayerNorm comes after the embeddings, too; GPT has none.
        projected: whether it comes after the layer that takes narrower embeddings to the width, which then has no bias.
    """

    embedding: bool = True
    projected: bool = False
    kind: Literal["post"] = "post"


@dataclass(frozen=True)
class PreNorm:
    """x ← x + f(LayerNorm(x)), and a LayerNorm after the last block: trains at higher rates (Xiong et al. 2020).

    With segments and a pooler this is what transformers calls `megatron-bert`.

    Attributes:
        embedding: whether the first LayerNorm comes right after the embeddings, so that the residual path begins with normed
            vectors, in the place of the one before the first block's attention: ModernBERT's order.
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
        require_probability("encoder.mlp", dropout=self.dropout)


@dataclass(frozen=True)
class Bias:
    """Which layers have one.

    Attributes:
        attention: the dense layers of attention.
        key: of these, those that make keys, of tokens and of relative positions.
        mlp: those of the feed-forward layer.
        projections: of attention's, those that make queries, keys and values.
        norm: LayerNorms, those of heads too.
        head: the dense layer with an activation, of a head that has one.
        output: the masked LM head's output, a number for each token of the vocabulary.
    """

    attention: bool = True
    mlp: bool = True
    projections: bool = True
    norm: bool = True
    head: bool = True
    output: bool = True
    key: bool = True


@dataclass(frozen=True)
class Sharing:
    """Layers that share their weights, as in ALBERT (Lan et al. 2019, section 3.1).

    Attributes:
        groups: of layers; all layers of a group have the same weights.
        layers_per_group: blocks that make up one layer of a group.
    """

    groups: int = 1
    layers_per_group: int = 1

    def __post_init__(self) -> None:
        require_at_least(
            1, "encoder.sharing", groups=self.groups, layers_per_group=self.layers_per_group
        )


DropoutPlace = Literal["sum", "embedding", "attention", "mlp"]
"""The sum of embeddings before their LayerNorm; the same after it; the output of attention; that of the feed-forward layer."""


@dataclass(frozen=True)
class Dropouts:
    """How much dropout there is.

    Attributes:
        hidden: the rate on embeddings and on the output of each sub-layer, where `places` says so, and on what heads read.
        attention: on attention probabilities.
        embedding: on embeddings, if it is another; none means `hidden`.
        places: where `hidden` applies in the encoder.
    """

    hidden: float = 0.1
    attention: float = 0.1
    embedding: float | None = None
    places: tuple[DropoutPlace, ...] = ("embedding", "attention", "mlp")

    def __post_init__(self) -> None:
        require_probability(
            "encoder.dropout",
            hidden=self.hidden,
            attention=self.attention,
            embedding=self.embedding,
        )


@dataclass(frozen=True)
class EncoderConfig:
    """The shape of an encoder.

    Attributes:
        vocab: rows of the token embedding.
        width: features of a token, H.
        depth: layers, L: blocks, unless a layer has several (`sharing.layers_per_group`).
        heads: attention heads, A; each is width / heads wide.
        intermediate_size: features inside the feed-forward layer, 4H in BERT.
        segments: rows of the segment embedding; 0 for a family without one.
        position: how a token knows its place.
        patterns: which tokens attend to which, one for each layer in turn, over and over.
        order: where the LayerNorms stand.
        mlp: how the feed-forward layer is built.
        bias: which layers have one.
        activation: of the feed-forward layer; "gelu" is exact (erf), "gelu_tanh" is Google's approximation.
        norm_epsilon: added to the variance in LayerNorm.
        dropout: how much of what is dropped, and where.
        initial_range: σ of the truncated normal that weights start from.
        pad: the id of the padding token, which no packed sequence holds: others need it. None if there is none.
        embedding: features of the embeddings, E, which a dense layer takes to the width; none if they are as wide.
        sharing: which layers share weights; none if no two do.
        readout: how heads read it.
    """

    vocab: int
    width: int = 768
    depth: int = 12
    heads: int = 12
    intermediate_size: int = 3072
    segments: int = 2
    position: Learned | Sinusoidal | Rotary | Disentangled = Learned()
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
        """How many blocks have weights of their own."""
        return (
            self.depth
            if self.sharing is None
            else self.sharing.groups * self.sharing.layers_per_group
        )

    @property
    def steps(self) -> int:
        """How many blocks a token goes through."""
        return self.depth * (1 if self.sharing is None else self.sharing.layers_per_group)

    @property
    def has_global_attention(self) -> bool:
        """Whether attention has queries, keys and values for global tokens; if it has them in one layer, in all."""
        return any(
            isinstance(pattern, Window) and pattern.global_attention for pattern in self.patterns
        )

    @property
    def norm_after_projection(self) -> bool:
        """Whether the LayerNorm of narrow embeddings comes after the layer that takes them to the width."""
        order = self.order
        return (
            self.embedding is not None
            and isinstance(order, PostNorm)
            and order.embedding
            and order.projected
        )

    @property
    def first_norm(self) -> bool:
        """Whether the first block has a LayerNorm for its attention; blocks that serve several layers always have it."""
        return (
            isinstance(self.order, PostNorm) or not self.order.embedding or self.sharing is not None
        )

    @property
    def canonical(self) -> EncoderConfig:
        """The same encoder with its cycles over layers as short as can be: equal for encoders that compute the same."""
        position, depth = self.position, self.depth
        if isinstance(position, Rotary):
            position = replace(
                position,
                bases=_shortest([position.bases[i % len(position.bases)] for i in range(depth)]),
            )
        return replace(
            self,
            position=position,
            patterns=_shortest([self.pattern(layer) for layer in range(depth)]),
        )

    def pattern(self, layer: int) -> Pattern:
        """Which tokens attend to which in this layer."""
        return self.patterns[layer % len(self.patterns)]

    def base(self, layer: int) -> float | None:
        """The base of the rotary angles in this layer; none without them."""
        position = self.position
        return position.bases[layer % len(position.bases)] if isinstance(position, Rotary) else None

    def dropout_at(self, place: DropoutPlace) -> float:
        """The rate at this place."""
        rates = self.dropout
        if place not in rates.places:
            return 0.0
        own = rates.embedding if place in ("sum", "embedding") else None
        return rates.hidden if own is None else own

    @property
    def head_dropout(self) -> float:
        """The rate in heads, unless they have their own."""
        return self.dropout.hidden

    def __post_init__(self) -> None:
        require_at_least(
            1,
            "encoder",
            vocab=self.vocab,
            width=self.width,
            depth=self.depth,
            heads=self.heads,
            intermediate_size=self.intermediate_size,
        )
        if self.width % self.heads:
            raise ConfigError(
                f"width {self.width} cannot be divided among {self.heads} heads",
                where="encoder.heads",
                fix=f"Use a number of heads that divides {self.width}.",
            )
        require_at_least(1, "encoder", embedding=self.embedding)
        if self.sharing is not None and self.sharing.groups > self.depth:
            what = f"{self.sharing.groups} groups cannot share {self.depth} layers"
            raise ConfigError(
                what, where="encoder.sharing.groups", fix=f"Use at most {self.depth}."
            )
        require_at_least(0, "encoder", segments=self.segments)
        for name in ("norm_epsilon", "initial_range"):
            if not getattr(self, name) > 0:
                raise ConfigError(
                    f"must be above 0, not {getattr(self, name)}", where=f"encoder.{name}"
                )
        _check_features(self.position, self.width, self.heads)
        if not self.patterns:
            raise ConfigError(
                "must hold at least one pattern",
                where="encoder.patterns",
                fix='Full attention is ["full"].',
            )
        if isinstance(self.position, Disentangled) and (
            self.has_global_attention or any(isinstance(p, Blocks) for p in self.patterns)
        ):
            what = "distances between tokens are scored for all keys, which blocks and global tokens do not read"
            raise ConfigError(
                what,
                where="encoder.patterns",
                fix="Use learned positions, or full attention and windows.",
            )
        if self.pad is not None and not 0 <= self.pad < self.vocab:
            raise ConfigError(
                f"id {self.pad} is not in the vocabulary of {self.vocab}", where="encoder.pad"
            )


def _check_features(
    position: Learned | Sinusoidal | Rotary | Disentangled, width: int, heads: int
) -> None:
    if isinstance(position, Rotary) and width // heads % 2:
        what = f"rotary positions turn pairs of features, but a head has {width // heads}"
        raise ConfigError(what, where="encoder.heads", fix="Use heads of an even width.")
    groups = (
        position.convolution.groups
        if isinstance(position, Disentangled) and position.convolution
        else 1
    )
    if width % groups:
        what = f"width {width} cannot be divided among {groups} groups"
        raise ConfigError(
            what,
            where="encoder.position.convolution.groups",
            fix=f"Use a number that divides {width}.",
        )


def _shortest(values: Sequence[T]) -> tuple[T, ...]:
    """The shortest cycle that gives these values."""
    lengths = range(1, len(values) + 1)
    return next(
        tuple(values[:n])
        for n in lengths
        if all(value == values[at % n] for at, value in enumerate(values))
    )
