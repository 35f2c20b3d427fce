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
    """

    most: int = 512
    kind: Literal["learned"] = "learned"

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
class EncoderConfig:
    """The shape of an encoder.

    Attributes:
        vocab: rows of the token embedding.
        width: features of a token, H.
        depth: blocks, L.
        heads: attention heads, A; each is width / heads wide.
        inner: features inside the feed-forward layer, 4H in BERT.
        segments: rows of the segment embedding; 0 for a family without one.
        position: how a token knows its place.
        order: where the LayerNorms stand.
        activation: of the feed-forward layer; "gelu" is exact (erf), "gelu_tanh" is Google's approximation.
        norm_epsilon: added to the variance in LayerNorm.
        dropout: on embeddings and on the output of each sub-layer.
        attention_dropout: on attention probabilities.
        initial_range: σ of the truncated normal that weights start from.
        pad: the id of the padding token, which no packed sequence holds: others need it. None if there is none.
    """

    vocab: int
    width: int = 768
    depth: int = 12
    heads: int = 12
    inner: int = 3072
    segments: int = 2
    position: Learned = Learned()
    order: PostNorm | PreNorm = PostNorm()
    activation: Activation = "gelu"
    norm_epsilon: float = 1e-12
    dropout: float = 0.1
    attention_dropout: float = 0.1
    initial_range: float = 0.02
    pad: int | None = 0

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
