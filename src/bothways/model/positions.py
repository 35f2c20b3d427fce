"""How positions are encoded: the values of `EncoderConfig.position`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bothways.core.config.values import require_at_least, require_range
from bothways.core.errors import ConfigError


@dataclass(frozen=True)
class DistanceBias:
    """A number for each head and each range of distances, added to the scores of every layer.

    Half of the buckets are for keys after the query. Of a half, the first half are single distances
    from 0 on; the others widen with the logarithm, and the last has all from `max_distance` on.

    Source: Raffel et al. 2020, section 2.1.

    Attributes:
        buckets: rows of the table, for both directions; a multiple of 4.
        max_distance: the first distance that is not told from larger ones.
    """

    buckets: int = 32
    max_distance: int = 128

    def __post_init__(self) -> None:
        location = "encoder.position.bias"
        require_at_least(4, location, buckets=self.buckets)
        if self.buckets % 4:
            message = f"must be a multiple of 4, not {self.buckets}"
            raise ConfigError(message, where=f"{location}.buckets")
        require_at_least(self.buckets // 4 + 1, location, max_distance=self.max_distance)


@dataclass(frozen=True)
class Learned:
    """A learned vector for each absolute position, as in BERT (Devlin et al. 2018, section 3).

    Attributes:
        max_positions: the longest input, in tokens.
        offset: rows of the table before the first position's; RoBERTa has 2.
        scaled: whether token vectors are multiplied by √width before positions are added (Vaswani
            et al. 2017, section 3.4).
        bias: what distances add to attention scores; None for nothing.
    """

    max_positions: int = 512
    offset: int = 0
    scaled: bool = False
    bias: DistanceBias | None = None
    kind: Literal["learned"] = "learned"

    def __post_init__(self) -> None:
        require_at_least(1, "encoder.position", max_positions=self.max_positions)
        require_at_least(0, "encoder.position", offset=self.offset)


@dataclass(frozen=True)
class Sinusoidal:
    """Fixed sines and cosines of geometric wavelengths, added to the tokens.

    Source: Vaswani et al. 2017, section 3.5.

    Attributes:
        max_positions: the longest input, in tokens.
        interleaved: whether sine and cosine of one wavelength are neighbours, as in the paper;
            otherwise all sines come first.
        scaled: as in `Learned`.
    """

    max_positions: int = 512
    interleaved: bool = True
    scaled: bool = False
    kind: Literal["sinusoidal"] = "sinusoidal"

    def __post_init__(self) -> None:
        require_at_least(1, "encoder.position", max_positions=self.max_positions)


@dataclass(frozen=True)
class Rotary:
    """Queries and keys rotated by an angle that grows with the position, by pairs of features.

    Source: Su et al. 2021, section 3.

    Attributes:
        max_positions: the longest input, in tokens.
        bases: of the angles' wavelengths, one for each layer in turn, repeated, like `patterns`.
        factor: what positions are divided by, "linear" scaling.
    """

    max_positions: int = 512
    bases: tuple[float, ...] = (10_000.0,)
    factor: float = 1.0
    kind: Literal["rotary"] = "rotary"

    def __post_init__(self) -> None:
        require_at_least(1, "encoder.position", max_positions=self.max_positions)
        if not self.bases or not all(base > 1 for base in self.bases):
            message = f"must be numbers above 1, not {self.bases}"
            raise ConfigError(message, where="encoder.position.bases")
        require_range("(0, inf)", "encoder.position", factor=self.factor)


@dataclass(frozen=True)
class Convolution:
    """A convolution over the embeddings, added to the first layer's output: it sees n-grams.

    Source: He et al. 2020, appendix A.5.

    Attributes:
        size: tokens that it sees at once, odd.
        groups: of features that are not mixed with each other.
        activation: after it.
    """

    size: int = 3
    groups: int = 1
    activation: Literal["tanh", "gelu", "gelu_tanh", "relu", "silu"] = "tanh"

    def __post_init__(self) -> None:
        if self.size < 1 or self.size % 2 == 0:
            message = f"must be odd, not {self.size}"
            raise ConfigError(message, where="encoder.position.convolution.size")
        require_at_least(1, "encoder.position.convolution", groups=self.groups)


Term = Literal["c2p", "p2c"]


@dataclass(frozen=True)
class Disentangled:
    """Scores from content and from relative position apart: DeBERTa's attention.

    A table shared by all layers has a vector for each relative position. Each layer makes keys and
    queries from it.

    Source: He et al. 2020, section 3.1.

    Attributes:
        max_positions: the longest input, in tokens.
        terms: what is added to the scores of content: a query with the position of its key (content
            to position), a key with the position of its query (position to content).
        max_distance: the largest distance with a vector of its own; None for `max_positions`.
        buckets: rows of the table on each side: distances up to half of them have one each; beyond,
            buckets widen with the logarithm, and `max_distance` has the last. None for a row each.
        shared: whether positions use the content's projections to keys and queries.
        norm: whether a LayerNorm follows the table.
        absolute: where absolute positions are added: nowhere, at the input, or in the masked LM
            head, which then applies the last layer twice more (the enhanced mask decoder, section
            3.2).
        convolution: after the first layer; None for none.
    """

    max_positions: int = 512
    terms: tuple[Term, ...] = ("c2p", "p2c")
    max_distance: int | None = None
    buckets: int | None = None
    shared: bool = False
    norm: bool = False
    absolute: Literal["none", "input", "decoder"] = "none"
    convolution: Convolution | None = None
    kind: Literal["disentangled"] = "disentangled"

    @property
    def farthest(self) -> int:
        """The largest distance with a vector of its own."""
        return self.max_positions if self.max_distance is None else self.max_distance

    @property
    def span(self) -> int:
        """Rows of the table on each side."""
        return self.farthest if self.buckets is None else self.buckets

    def __post_init__(self) -> None:
        require_at_least(
            1, "encoder.position", max_positions=self.max_positions, max_distance=self.max_distance
        )
        require_at_least(2, "encoder.position", buckets=self.buckets)
        if not self.terms or len(set(self.terms)) < len(self.terms):
            message = f"must hold c2p, p2c or both, once each, not {self.terms}"
            raise ConfigError(message, where="encoder.position.terms")
        # Between these bounds the formula for buckets would divide by a logarithm ≤ 0 and yet be
        # used; see `model.embedding.row_of`.
        low, high = 2 * (self.farthest - 1), 2 * (self.max_positions - 1)
        if self.buckets is not None and low <= self.buckets < high:
            message = f"must be below twice the distance {self.farthest} less 1 or at least {high}"
            message += f", enough for every distance in {self.max_positions} positions, "
            message += f"not {self.buckets}"
            raise ConfigError(message, where="encoder.position.buckets")


Position = Learned | Sinusoidal | Rotary | Disentangled
