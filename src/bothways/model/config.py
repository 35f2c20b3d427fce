"""What an encoder is: one frozen configuration with a closed union for each axis on which the family differs.

A descendant of BERT is a value of this type (see `bothways.families`), never a class of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bothways.core.errors import ConfigError

Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]


@dataclass(frozen=True)
class Learned:
    """A learned vector for each absolute position, as in BERT (Devlin et al. 2018, section 3).

    Attributes:
        most: the longest input, in tokens.
        offset: rows of the table before that of the first position: RoBERTa has 2.
    """

    most: int = 512
    offset: int = 0
    kind: Literal["learned"] = "learned"

    def __post_init__(self) -> None:
        if self.most < 1:
            raise ConfigError(f"must be at least 1, not {self.most}", where="encoder.position.most")
        if self.offset < 0:
            raise ConfigError(f"must be at least 0, not {self.offset}", where="encoder.position.offset")


@dataclass(frozen=True)
class Sinusoidal:
    """Sines and cosines of geometric wavelengths, fixed, added to the tokens (Vaswani et al. 2017, section 3.5).

    Attributes:
        most: the longest input, in tokens.
        interleaved: sine and cosine of one wavelength lie side by side, as in the paper; else all sines come first.
    """

    most: int = 512
    interleaved: bool = True
    kind: Literal["sinusoidal"] = "sinusoidal"

    def __post_init__(self) -> None:
        if self.most < 1:
            raise ConfigError(f"must be at least 1, not {self.most}", where="encoder.position.most")


@dataclass(frozen=True)
class PostNorm:
    """x ← LayerNorm(x + f(x)), and a LayerNorm after the embeddings: the Transformer's and BERT's order."""

    kind: Literal["post"] = "post"


@dataclass(frozen=True)
class PreNorm:
    """x ← x + f(LayerNorm(x)), and a LayerNorm after the last block: trains at higher rates (Xiong et al. 2020).

    With segments and a pooler this is what transformers calls `megatron-bert`.
    """

    kind: Literal["pre"] = "pre"


@dataclass(frozen=True)
class Sharing:
    """Layers that share their weights, as in ALBERT (Lan et al. 2019, section 3.1).

    Attributes:
        groups: of layers; all layers of a group have the same weights.
        inner: blocks that make up one layer of a group.
    """

    groups: int = 1
    inner: int = 1

    def __post_init__(self) -> None:
        for name in ("groups", "inner"):
            if getattr(self, name) < 1:
                raise ConfigError(f"must be at least 1, not {getattr(self, name)}", where=f"encoder.sharing.{name}")


@dataclass(frozen=True)
class Own:
    """The head has a dense layer of its own on [CLS], and does not read the pooler.

    Attributes:
        activation: after that layer.
        dropout_first: whether dropout comes before it, too.
    """

    activation: Activation | Literal["tanh"] = "tanh"
    dropout_first: bool = False
    kind: Literal["own"] = "own"


@dataclass(frozen=True)
class FromPooler:
    """The head reads the pooled vector."""

    kind: Literal["pooler"] = "pooler"


@dataclass(frozen=True)
class Readout:
    """How heads read the encoder, where families differ.

    Attributes:
        labels, choice: what these heads read.
        masked: the activation in the masked LM head; none means the encoder's.
        pair_dropout: on the vector that the pair head reads.
        span_dropout: on the vectors that the span head reads.
    """

    labels: FromPooler | Own = FromPooler()
    choice: FromPooler | Own = FromPooler()
    masked: Activation | None = None
    pair_dropout: float = 0.0
    span_dropout: float = 0.0


Place = Literal["embedding", "attention", "mlp"]


@dataclass(frozen=True)
class EncoderConfig:
    """The shape of an encoder.

    Attributes:
        vocab: rows of the token embedding.
        width: features of a token, H.
        depth: layers, L: blocks, unless a layer has several (`sharing.inner`).
        heads: attention heads, A; each is width / heads wide.
        inner: features inside the feed-forward layer, 4H in BERT.
        segments: rows of the segment embedding; 0 for a family without one.
        position: how a token knows its place.
        order: where the LayerNorms stand.
        activation: of the feed-forward layer; "gelu" is exact (erf), "gelu_tanh" is Google's approximation.
        norm_epsilon: added to the variance in LayerNorm.
        dropout: on embeddings and on the output of each sub-layer, where `dropped` says so.
        attention_dropout: on attention probabilities.
        initial_range: σ of the truncated normal that weights start from.
        pad: the id of the padding token, which no packed sequence holds: others need it. None if there is none.
        embedding: features of the embeddings, E, which a dense layer takes to the width; none if they are as wide.
        sharing: which layers share weights; none if no two do.
        dropped: where `dropout` applies.
        readout: how heads read it.
    """

    vocab: int
    width: int = 768
    depth: int = 12
    heads: int = 12
    inner: int = 3072
    segments: int = 2
    position: Learned | Sinusoidal = Learned()
    order: PostNorm | PreNorm = PostNorm()
    activation: Activation = "gelu"
    norm_epsilon: float = 1e-12
    dropout: float = 0.1
    attention_dropout: float = 0.1
    initial_range: float = 0.02
    pad: int | None = 0
    embedding: int | None = None
    sharing: Sharing | None = None
    dropped: tuple[Place, ...] = ("embedding", "attention", "mlp")
    readout: Readout = Readout()

    @property
    def embedding_width(self) -> int:
        """Features of a token before the first layer."""
        return self.width if self.embedding is None else self.embedding

    @property
    def blocks(self) -> int:
        """How many blocks have weights of their own."""
        return self.depth if self.sharing is None else self.sharing.groups * self.sharing.inner

    @property
    def steps(self) -> int:
        """How many blocks a token goes through."""
        return self.depth * (1 if self.sharing is None else self.sharing.inner)

    def dropout_at(self, place: Place) -> float:
        """The rate at this place."""
        return self.dropout if place in self.dropped else 0.0

    def __post_init__(self) -> None:
        for name in ("vocab", "width", "depth", "heads", "inner"):
            if getattr(self, name) < 1:
                raise ConfigError(f"must be at least 1, not {getattr(self, name)}", where=f"encoder.{name}")
        if self.width % self.heads:
            raise ConfigError(
                f"width {self.width} cannot be divided among {self.heads} heads",
                where="encoder.heads",
                fix=f"Use a number of heads that divides {self.width}.",
            )
        if self.embedding is not None and self.embedding < 1:
            raise ConfigError(f"must be at least 1, not {self.embedding}", where="encoder.embedding")
        if self.sharing is not None and self.sharing.groups > self.depth:
            what = f"{self.sharing.groups} groups cannot share {self.depth} layers"
            raise ConfigError(what, where="encoder.sharing.groups", fix=f"Use at most {self.depth}.")
        if self.segments < 0:
            raise ConfigError(f"must be at least 0, not {self.segments}", where="encoder.segments")
        for name in ("norm_epsilon", "initial_range"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"must be above 0, not {getattr(self, name)}", where=f"encoder.{name}")
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"must lie in [0, 1), not {getattr(self, name)}", where=f"encoder.{name}")
        if self.pad is not None and not 0 <= self.pad < self.vocab:
            raise ConfigError(f"id {self.pad} is not in the vocabulary of {self.vocab}", where="encoder.pad")
