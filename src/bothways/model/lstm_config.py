"""What a recurrent encoder is: as ELMo's, with two directions that never meet (Devlin et al. 2018, figure 3, right)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bothways.core.config.checks import require_at_least, require_probability
from bothways.core.errors import ConfigError
from bothways.model.config import Bias, EncoderConfig
from bothways.model.head_config import Own, Readout


@dataclass(frozen=True)
class LSTMConfig:
    """The shape of two stacks of LSTMs, one for each direction, as in ELMo (Peters et al. 2018, section 3.1).

    Attributes:
        vocab: rows of the token embedding.
        projection: features that a direction gives of a token, and those of the token embedding.
        cells: memory cells of an LSTM; where they are more than its features, a matrix takes them to those.
        depth: layers, L.
        dropout: on what each layer reads, and on what the heads read.
        initial_range: σ of the truncated normal that the embedding and the heads start from.
        pad: the id of the padding token, which no packed sequence holds; none if there is none.
        max_positions: the longest input that is asked of it, in tokens. An LSTM itself could go on.
    """

    vocab: int
    projection: int = 512
    cells: int = 4096
    depth: int = 2
    dropout: float = 0.1
    initial_range: float = 0.02
    pad: int | None = 0
    max_positions: int = 512
    kind: Literal["recurrent"] = "recurrent"

    @property
    def head_dropout(self) -> float:
        """The rate in heads, unless they have their own."""
        return self.dropout

    @property
    def width(self) -> int:
        """Features of a token: what reads forward, then what reads back."""
        return 2 * self.projection

    @property
    def embedding_width(self) -> int:
        """Features of a token before the first layer."""
        return self.projection

    @property
    def segments(self) -> int:
        """It has no embedding of segments."""
        return 0

    @property
    def readout(self) -> Readout:
        """Heads of whole sequences read the mean of all tokens: at [CLS] what reads forward has seen nothing yet."""
        return Readout(labels=Own(reads="mean"), choice=Own(reads="mean"))

    @property
    def bias(self) -> Bias:
        """All layers of heads have one."""
        return Bias()

    @property
    def norm_epsilon(self) -> float:
        """Added to the variance in LayerNorms, of which it has none of its own."""
        return 1e-12

    def __post_init__(self) -> None:
        require_at_least(
            1,
            "encoder",
            vocab=self.vocab,
            projection=self.projection,
            cells=self.cells,
            depth=self.depth,
        )
        require_at_least(1, "encoder", max_positions=self.max_positions)
        if self.cells < self.projection:
            what = f"{self.cells} cells cannot give {self.projection} features"
            raise ConfigError(what, where="encoder.cells", fix=f"Use {self.projection} or more.")
        require_probability("encoder", dropout=self.dropout)
        if not self.initial_range > 0:
            raise ConfigError(
                f"must be above 0, not {self.initial_range}", where="encoder.initial_range"
            )
        if self.pad is not None and not 0 <= self.pad < self.vocab:
            raise ConfigError(
                f"id {self.pad} is not in the vocabulary of {self.vocab}", where="encoder.pad"
            )


ModelConfig = EncoderConfig | LSTMConfig
"""The shape of any encoder."""
