"""The encoder: embeddings, then blocks, over packed tokens (Devlin et al. 2018, section 3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bothways.attention.bigbird_random import RandomBlocks
from bothways.attention.mask import AttentionView, RotaryTables
from bothways.attention.patterns import Blocks
from bothways.core.batch import Batch
from bothways.core.layout import Layout
from bothways.model.block import Block
from bothways.model.config import EncoderConfig, PreNorm, Sharing
from bothways.model.convolution import NgramConvolution
from bothways.model.embedding import Embedding
from bothways.model.init import initialise
from bothways.model.norm import layer_norm
from bothways.model.positions import Disentangled
from bothways.model.relative_positions import RelativePositions, distances_of


@dataclass(frozen=True)
class Hidden:
    """Attributes:
    last: the vector of every token after the last block `(tokens, width)`; 0 for one that nobody asked for.
    table: the vectors of all tokens at the input, for a head that multiplies by them (`embedding.look_up`).
    layers: if asked for, the embeddings and then the output of each layer; `layers[-1]` is `last`.
    before: what the last block made it from; none where there is no such block.
    """

    last: Float[Tensor, "tokens width"]
    table: Float[Tensor, "vocab embedded"]
    layers: tuple[Float[Tensor, "tokens width"], ...] = ()
    before: Float[Tensor, "tokens width"] | None = None


class Encoder(nn.Module):
    """A Transformer encoder; bidirectional, unless its attention patterns are not.

    Args:
        config: its shape; weights start as Google's do.

    Attributes:
        recompute: whether a training step keeps no more of a block than its input, and computes the rest again in the backward
            pass (Chen et al. 2016, Training deep nets with sublinear memory cost). Not so the last block, whose backward
            pass comes first.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.width = config.width
        self.recompute = False
        self.embedding = Embedding(config)
        place = config.position if isinstance(config.position, Disentangled) else None
        self.relative = RelativePositions(config, place) if place else None
        self.convolution = (
            NgramConvolution(config, place.convolution) if place and place.convolution else None
        )
        self.blocks = nn.ModuleList(_blocks(config, config.sharing))
        final = isinstance(config.order, PreNorm)
        self.norm = layer_norm(config) if final else nn.Identity()
        initialise(self, config.initial_range)

    def layer(self, number: int) -> list[nn.Module]:
        """The blocks of a layer, one after the other: one of its own, or those of its group."""
        depth, sharing = self.config.depth, self.config.sharing
        if sharing is None:
            return [self.blocks[number]]
        group = self.blocks[
            int(number / (depth / sharing.groups))
        ]  # in floating point, as ALBERT's code has it
        return list(group.children())

    def forward(
        self, batch: Batch, keep_layers: bool = False, only: Int[Tensor, " asked"] | None = None
    ) -> Hidden:
        """Encode a packed batch.

        Args:
            batch: the tokens.
            keep_layers: also return what each layer gave.
            only: the tokens whose last vectors are asked for, each once; none for all. After the attention of the last block,
                which reads all, no more is computed than these.
        """
        x, table = self.embedding(batch)
        before, layers, tokens, depth = x, [x], len(x), self.config.depth
        end = self.layer(depth - 1)[-1]
        cut = only is not None and not keep_layers and (depth > 1 or self.convolution is None)
        seen = attention_views(
            self.config, batch.layout, batch.global_attention_mask, self.training
        )
        relative = self._relative(seen[0])
        again = self.recompute and self.training and torch.is_grad_enabled()
        for layer, view in enumerate(seen):
            for block in self.layer(layer):
                before = x
                if layer == depth - 1 and block is end:
                    x = block(x, view, relative, only=only if cut else None)
                else:
                    x = (
                        checkpoint(block, x, view, relative, use_reentrant=False)
                        if again
                        else block(x, view, relative)
                    )
            if layer == 0 and self.convolution is not None:
                x = self.convolution(layers[0], x, batch.layout)
            if keep_layers:  # else a prediction would hold what every layer gave
                layers.append(x)
        last = self.norm(x)
        if only is not None and cut:
            last = spread(last, only, tokens)
        return Hidden(last, table, (*layers[:-1], last) if keep_layers else (), before)

    def decode(
        self,
        batch: Batch,
        before: Float[Tensor, "tokens width"],
        queries: Float[Tensor, "tokens width"],
        only: Int[Tensor, " asked"] | None = None,
    ) -> Float[Tensor, "tokens width"]:
        """The last block applied twice with queries of one's own: the enhanced mask decoder (He et al. 2020, section 3.2).

        Args:
            batch: as it was encoded.
            before: what the last block read.
            queries: what attends to it at first; then, what that gave.
            only: as in `forward`.
        """
        view = attention_views(
            self.config, batch.layout, batch.global_attention_mask, self.training
        )[-1]
        block, relative = self.layer(self.config.depth - 1)[-1], self._relative(view)
        queries = block(before, view, relative, queries)
        result: Tensor = self.norm(block(before, view, relative, queries, only))
        return result if only is None else spread(result, only, len(before))

    def _relative(self, view: AttentionView) -> Float[Tensor, "rows width"] | None:
        """The vectors of relative positions."""
        if self.relative is None or view.distances is None:
            return None
        result: Tensor = self.relative(view.distances)
        return result


def spread(
    x: Float[Tensor, "asked width"], only: Int[Tensor, " asked"], tokens: int
) -> Float[Tensor, "tokens width"]:
    """Vectors in the places of their tokens, 0 in the others."""
    return x.new_zeros(tokens, x.shape[1]).index_copy(0, only, x)


def attention_views(
    config: EncoderConfig,
    layout: Layout,
    global_attention_mask: Bool[Tensor, " tokens"] | None = None,
    training: bool = False,
) -> list[AttentionView]:
    """Return the view of each layer; equal layers share one. Random blocks are drawn in training."""
    position, size = config.position, config.width // config.heads
    distances = distances_of(position, layout) if isinstance(position, Disentangled) else None
    tables: dict[float, RotaryTables] = {}
    views: dict[object, AttentionView] = {}
    result = []
    for layer in range(config.depth):
        pattern, base = config.pattern(layer), config.base(layer)
        drawn = training and isinstance(pattern, Blocks)
        random = RandomBlocks(layer, config.heads, config.max_positions) if drawn else None
        key = (pattern, base, random)
        if base is not None and base not in tables:
            tables[base] = RotaryTables.of(layout.positions, size, base)
        if key not in views:
            rotary = None if base is None else tables[base]
            views[key] = AttentionView(
                layout, pattern, rotary, distances, global_attention_mask, random
            )
        result.append(views[key])
    return result


def _blocks(config: EncoderConfig, sharing: Sharing | None) -> Iterator[nn.Module]:
    if sharing is None:
        yield from (
            Block(config, normed=layer > 0 or config.first_norm) for layer in range(config.depth)
        )
    else:
        yield from (
            nn.ModuleList(Block(config) for _ in range(sharing.layers_per_group))
            for _ in range(sharing.groups)
        )
