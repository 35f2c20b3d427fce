"""The encoder: embeddings, then blocks, over packed tokens (Devlin et al. 2018, section 3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn

from bothways.core.batch import Batch
from bothways.model.block import Block
from bothways.model.config import EncoderConfig, PreNorm, Sharing
from bothways.model.embedding import Embedding
from bothways.model.init import initialise
from bothways.model.norm import layer_norm
from bothways.model.view import views


@dataclass(frozen=True)
class Hidden:
    """Attributes:
    last: the vector of every token after the last block `(tokens, width)`.
    layers: if asked for, the embeddings and then the output of each layer; `layers[-1]` is `last`.
    """

    last: Float[Tensor, "tokens width"]
    layers: tuple[Float[Tensor, "tokens width"], ...] = ()


class Encoder(nn.Module):
    """A Transformer encoder; bidirectional, unless its attention patterns are not.

    Args:
        config: its shape; weights start as Google's do.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.width = config.width
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(_blocks(config, config.sharing))
        final = isinstance(config.order, PreNorm)
        self.norm = layer_norm(config) if final else nn.Identity()
        initialise(self, config.initial_range)

    def layer(self, number: int) -> list[nn.Module]:
        """The blocks of a layer, one after the other: one of its own, or those of its group."""
        depth, sharing = self.config.depth, self.config.sharing
        if sharing is None:
            return [self.blocks[number]]
        group = self.blocks[int(number / (depth / sharing.groups))]  # in floating point, as ALBERT's code has it
        return list(group.children())

    def forward(self, batch: Batch, keep_layers: bool = False) -> Hidden:
        """Encode a packed batch; `keep_layers` also returns what each layer gave."""
        x = self.embedding(batch)
        layers = [x]
        for layer, view in enumerate(views(self.config, batch.layout)):
            for block in self.layer(layer):
                x = block(x, view)
            if keep_layers:  # else a prediction would hold what every layer gave
                layers.append(x)
        last = self.norm(x)
        return Hidden(last, (*layers[:-1], last) if keep_layers else ())


def _blocks(config: EncoderConfig, sharing: Sharing | None) -> Iterator[nn.Module]:
    if sharing is None:
        yield from (Block(config, normed=layer > 0 or config.first_norm) for layer in range(config.depth))
    else:
        yield from (nn.ModuleList(Block(config) for _ in range(sharing.inner)) for _ in range(sharing.groups))
