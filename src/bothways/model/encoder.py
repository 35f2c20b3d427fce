"""The Transformer encoder: embeddings, then blocks, over packed tokens (Devlin et al. 2018, §3)."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from bothways.core.batch import Batch
from bothways.core.layout import Layout
from bothways.model.attention.bigbird_random import RandomBlocks
from bothways.model.attention.mask import AttentionView, RotaryTables
from bothways.model.attention.patterns import Blocks
from bothways.model.block import Attention, Block
from bothways.model.config import EncoderConfig, PreNorm, Sharing
from bothways.model.disentangled import NgramConvolution, build_relative, distances_of
from bothways.model.embedding import Embedding
from bothways.model.init import initialise, layer_norm
from bothways.model.positions import Disentangled, Rotary


@dataclass(frozen=True)
class Hidden:
    """What an encoder returns.

    Attributes:
        last: each token's vector after the last block; zeros for tokens that nobody asked for.
        table: the token embedding, for heads that multiply by it (`embedding.look_up`).
        layers: if asked for, the embeddings and the output of each layer; `layers[-1]` is `last`.
        before: the input of the last block; None where there is none.
    """

    last: Float[Tensor, "tokens width"]
    table: Float[Tensor, "vocab embedded"]
    layers: tuple[Float[Tensor, "tokens width"], ...] = ()
    before: Float[Tensor, "tokens width"] | None = None


class Encoder(nn.Module):
    """A Transformer encoder, bidirectional unless its attention patterns are not.

    Args:
        config: its shape; weights start like Google's.

    Attributes:
        recompute: whether a training step keeps only the input of each block and computes the rest
            again in the backward pass (Chen et al. 2016, "Training deep nets with sublinear memory
            cost"); not for the last block, whose backward pass comes first.

    Examples:
        >>> model = bothways.load_model("my-bert")
        >>> isinstance(model.encoder, bothways.Encoder)
        True
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.width = config.width
        self.recompute = False
        self.embedding = Embedding(config)
        position = config.position if isinstance(config.position, Disentangled) else None
        convolution = position.convolution if position else None
        self.relative = build_relative(config)
        self.convolution = NgramConvolution(config, convolution) if convolution else None
        self.blocks = nn.ModuleList(_blocks(config, config.sharing))
        final = isinstance(config.order, PreNorm)
        self.norm = layer_norm(config) if final else nn.Identity()
        initialise(self, config.initial_range)

    @property
    def gathered_apart(self) -> list[nn.Module]:
        """The blocks that run once in a forward pass: `training.sharding` gathers each by itself.

        Blocks that layers share run more often, as does the last one of a mask decoder.
        """
        if self.config.sharing is not None:
            return []
        position = self.config.position
        decoder = isinstance(position, Disentangled) and position.absolute == "decoder"
        return [*self.blocks][:-1] if decoder else [*self.blocks]

    def layer(self, number: int) -> list[nn.Module]:
        """Return the blocks of a layer in order: one of its own, or those of its group."""
        sharing = self.config.sharing
        if sharing is None or sharing.parts != "all":
            return [self.blocks[number]]
        return list(self.blocks[_group_of(number, self.config.depth, sharing)].children())

    def forward(
        self, batch: Batch, keep_layers: bool = False, only: Int[Tensor, " asked"] | None = None
    ) -> Hidden:
        """Encode a packed batch.

        Args:
            batch: the tokens.
            keep_layers: whether to return the output of each layer ("hidden states"), too.
            only: indices of the tokens whose final vectors are needed, each once; None for all.
                After the last block's attention, which reads all tokens, only these are computed.
        """
        x, table = self.embedding(batch)
        previous, layers, tokens, depth = x, [x], len(x), self.config.depth
        end = self.layer(depth - 1)[-1]
        cut = only is not None and not keep_layers and (depth > 1 or self.convolution is None)
        views = self._views(batch)
        relative = self._relative(views[0])
        recompute = self.recompute and self.training and torch.is_grad_enabled()
        for layer, view in enumerate(views):
            for block in self.layer(layer):
                previous = x
                if layer == depth - 1 and block is end:
                    x = block(x, view, relative, only=only if cut else None)
                elif recompute:
                    x = checkpoint(block, x, view, relative, use_reentrant=False)
                else:
                    x = block(x, view, relative)
            if layer == 0 and self.convolution is not None:
                x = self.convolution(layers[0], x, batch.layout)
            if keep_layers:  # otherwise a prediction would hold the output of every layer
                layers.append(x)
        output = self.norm(x)
        if only is not None and cut:
            output = spread(output, only, tokens)
        return Hidden(output, table, (*layers[:-1], output) if keep_layers else (), previous)

    def decode(
        self,
        batch: Batch,
        previous: Float[Tensor, "tokens width"],
        queries: Float[Tensor, "tokens width"],
        only: Int[Tensor, " asked"] | None = None,
    ) -> Float[Tensor, "tokens width"]:
        """Apply the last block twice with other queries: the enhanced mask decoder.

        Source: He et al. 2020, section 3.2.

        Args:
            batch: as it was encoded.
            previous: the input of the last block.
            queries: what attends to it first; the result attends to it again.
            only: as in `forward`.
        """
        view = self._views(batch)[-1]
        block, relative = self.layer(self.config.depth - 1)[-1], self._relative(view)
        queries = block(previous, view, relative, queries)
        result: Tensor = self.norm(block(previous, view, relative, queries, only))
        return result if only is None else spread(result, only, len(previous))

    def _views(self, batch: Batch) -> list[AttentionView]:
        return attention_views(
            self.config, batch.layout, batch.global_attention_mask, self.training
        )

    def _relative(self, view: AttentionView) -> Float[Tensor, "rows features"] | None:
        """Return the vectors of relative positions, or their bias; None without them."""
        if self.relative is None or view.distances is None:
            return None
        result: Tensor = self.relative(view.distances)
        return result


Attentions = list[Float[Tensor, "heads _ _"]]
"""The attention probabilities of a block, of each sequence in its own length."""


@contextlib.contextmanager
def recorded_attentions(encoder: nn.Module, enabled: bool = True) -> Iterator[list[Attentions]]:
    """Collect the attention probabilities of a forward pass, if wanted, an entry for each block.

        with recorded_attentions(encoder) as found:
            encoder(batch)

    They are computed next to the forward pass, which does not keep them, and without dropout.

    Raises:
        ConfigError: a layer reads random blocks (BigBird) of a long sequence.
    """
    recorded: list[Attentions] = []

    def record(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Keep the probabilities of a block that is about to run."""
        assert isinstance(module, Attention)
        recorded.append(module.probabilities(*arguments[:3]))

    blocks = [module for module in encoder.modules() if enabled and isinstance(module, Attention)]
    with _hooked([block.register_forward_pre_hook(record) for block in blocks]):
        yield recorded


@contextlib.contextmanager
def recorded_projections(
    encoder: Encoder, layers: Collection[int]
) -> Iterator[dict[int, Float[Tensor, "tokens 3 heads d"]]]:
    """Collect the queries, keys and values that layers of a forward pass make, by layer from 1.

    Of a layer with several blocks, the last one's.

        with recorded_projections(encoder, {12}) as found:
            encoder(batch)
        queries, keys, values = found[12].unbind(1)

    Queries and keys are as before rotary positions. Vectors of relative positions, which some
    encoders project in the same product, follow the tokens'.
    """
    recorded: dict[int, Tensor] = {}
    depth, calls = encoder.config.depth, itertools.count()
    repeats = encoder.config.steps // depth

    def record(module: nn.Module, arguments: object, output: Tensor) -> None:
        """Keep what a block has made, if it is the last one of a wanted layer."""
        layer, step = divmod(next(calls), repeats)
        if step == repeats - 1 and layer + 1 in layers:
            recorded[layer + 1] = output

    blocks = [module for module in encoder.modules() if isinstance(module, Attention)]
    with _hooked([block.projections.register_forward_hook(record) for block in blocks]):
        yield recorded


@contextlib.contextmanager
def _hooked(hooks: Iterable[RemovableHandle]) -> Iterator[None]:
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def spread(
    x: Float[Tensor, "asked width"], only: Int[Tensor, " asked"], tokens: int
) -> Float[Tensor, "tokens width"]:
    """Put vectors in the places of their tokens, with zeros elsewhere."""
    return x.new_zeros(tokens, x.shape[1]).index_copy(0, only, x)


def attention_views(
    config: EncoderConfig,
    layout: Layout,
    global_attention_mask: Bool[Tensor, " tokens"] | None = None,
    training: bool = False,
) -> list[AttentionView]:
    """Return each layer's view; equal layers share one. Random blocks are drawn in training."""
    position, size = config.position, config.width // config.heads
    distances = distances_of(position, layout) if config.has_relative_scores else None
    tables: dict[float, RotaryTables] = {}
    views: dict[object, AttentionView] = {}
    result = []
    for layer in range(config.depth):
        pattern, base = config.pattern(layer), config.base(layer)
        drawn = training and isinstance(pattern, Blocks)
        random = RandomBlocks(layer, config.heads, config.max_positions) if drawn else None
        key = (pattern, base, random)
        if base is not None and base not in tables:
            factor = position.factor if isinstance(position, Rotary) else 1.0
            tables[base] = RotaryTables.of(layout.positions, size, base, factor)
        if key not in views:
            rotary = None if base is None else tables[base]
            views[key] = AttentionView(
                layout, pattern, rotary, distances, global_attention_mask, random
            )
        result.append(views[key])
    return result


def _blocks(config: EncoderConfig, sharing: Sharing | None) -> Iterator[nn.Module]:
    if sharing is None:
        for layer in range(config.depth):
            yield Block(config, normed=layer > 0 or config.first_norm)
    elif sharing.parts == "all":
        for _ in range(sharing.groups):
            yield nn.ModuleList(Block(config) for _ in range(sharing.layers_per_group))
    else:
        owners: dict[int, Block] = {}
        for layer in range(config.depth):
            block = Block(config)
            owner = owners.setdefault(_group_of(layer, config.depth, sharing), block)
            if owner is not block:
                _borrow(block, owner, sharing.parts)
            yield block


def _group_of(layer: int, depth: int, sharing: Sharing) -> int:
    """Return the group of a layer, in floating point as in ALBERT's code: for some depths integers
    would round differently.
    """
    return int(layer / (depth / sharing.groups))


def _borrow(block: Block, owner: Block, part: Literal["attention", "mlp"]) -> None:
    """Let a block compute with a part of another, which stays the only one that has it as a
    submodule: so each weight has one name.
    """
    for name in (part, f"{part}_norm"):
        delattr(block, name)
        block.__dict__[name] = getattr(owner, name)
