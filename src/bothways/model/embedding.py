"""Token + segment + position embeddings (Devlin et al. 2018, figure 2)."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from bothways.core.batch import Batch
from bothways.model.config import EncoderConfig, PostNorm
from bothways.model.dropout import Dropout


class Embedding(nn.Module):
    """The sum of three learned vectors per token, then (post-norm) LayerNorm, then dropout."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab, config.width)
        self.position = nn.Embedding(config.position.most, config.width)
        self.segment = nn.Embedding(config.segments, config.width) if config.segments else None
        normed = isinstance(config.order, PostNorm)
        self.norm = nn.LayerNorm(config.width, config.norm_epsilon) if normed else nn.Identity()
        self.dropout = Dropout(config.dropout)

    def forward(self, batch: Batch) -> Float[Tensor, "tokens width"]:
        """Raises IndexError for an id, segment or position outside its table; the caller checks inputs before."""
        x = self.token(batch.ids) + self.position(batch.layout.positions)
        if self.segment is not None:
            x = x + self.segment(batch.segments)
        result: Tensor = self.dropout(self.norm(x))
        return result
