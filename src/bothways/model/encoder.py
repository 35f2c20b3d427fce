"""The encoder: embeddings, then blocks, over packed tokens (Devlin et al. 2018, section 3)."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn

from bothways.core.batch import Batch
from bothways.model.block import Block
from bothways.model.config import EncoderConfig, PreNorm
from bothways.model.embedding import Embedding
from bothways.model.init import initialise


@dataclass(frozen=True)
class Hidden:
    """Attributes:
    last: the vector of every token after the last block `(tokens, width)`.
    layers: if asked for, the embeddings and then the output of each block; `layers[-1]` is `last`.
    """

    last: Float[Tensor, "tokens width"]
    layers: tuple[Float[Tensor, "tokens width"], ...] = ()


class Encoder(nn.Module):
    """A bidirectional Transformer encoder.

    Args:
        config: its shape; weights start as Google's do.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.width = config.width
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        final = isinstance(config.order, PreNorm)
        self.norm = nn.LayerNorm(config.width, config.norm_epsilon) if final else nn.Identity()
        initialise(self, config.initial_range)

    def forward(self, batch: Batch, keep_layers: bool = False) -> Hidden:
        """Encode a packed batch; `keep_layers` also returns what each block gave."""
        x = self.embedding(batch)
        layers = [x]
        for block in self.blocks:
            x = block(x, batch.layout)
            layers.append(x)
        layers[-1] = last = self.norm(x)
        return Hidden(last, tuple(layers) if keep_layers else ())
