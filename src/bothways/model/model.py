"""The model: embeddings, then blocks, over packed tokens (Devlin et al. 2018, §3), and its heads.

A model is an encoder and a set of heads, each of which computes only where it has a target.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bothways.core.batch import Batch, Layout
from bothways.core.errors import ConfigError
from bothways.core.runtime.devices import cpu_by_default
from bothways.model import heads as head_modules
from bothways.model.attention.bigbird_random import RandomBlocks
from bothways.model.attention.dispatch import packed_view
from bothways.model.attention.mask import AttentionView, RotaryTables
from bothways.model.attention.patterns import Blocks
from bothways.model.block import Attention, Block
from bothways.model.config import EncoderConfig, PreNorm, Sharing
from bothways.model.embedding import Embedding, NgramConvolution, build_relative, distances_of
from bothways.model.heads import Head, with_pooler
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
        self.recompute = False
        self.embedding = Embedding(config)
        position = config.position if isinstance(config.position, Disentangled) else None
        convolution = position.convolution if position else None
        self.relative = build_relative(config)
        self.convolution = NgramConvolution(config, convolution) if convolution else None
        self.blocks = nn.ModuleList(_blocks(config, config.sharing))
        final = isinstance(config.order, PreNorm)
        self.norm = layer_norm(config) if final else nn.Identity()
        initialise(self, config)

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

    @cpu_by_default()
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

    def is_static(self, batch: Batch) -> bool:
        """Return True if all batches of this one's shape are computed alike, whatever they hold.

        So it is where every layer has the kernel for packed sequences. Call it in the context of
        the computation's precision.
        """
        size = self.config.width // self.config.heads
        weight = self.embedding.token.weight
        return (
            self.relative is None
            and self.convolution is None
            and not self.recompute
            and all(packed_view(view, weight, size) is not None for view in self._views(batch))
        )

    def _views(self, batch: Batch) -> list[AttentionView]:
        return attention_views(
            self.config, batch.layout, batch.global_attention_mask, self.training, batch.causal
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

    with contextlib.ExitStack() as hooks:
        for module in encoder.modules() if enabled else ():
            if isinstance(module, Attention):
                hooks.enter_context(module.register_forward_pre_hook(record))
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

    with contextlib.ExitStack() as hooks:
        for module in encoder.modules():
            if isinstance(module, Attention):
                hooks.enter_context(module.projections.register_forward_hook(record))
        yield recorded


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
    causal: Bool[Tensor, " tokens"] | None = None,
) -> list[AttentionView]:
    """Return each layer's view; equal layers share one. Random blocks are drawn in training.

    Raises:
        ConfigError: `causal` is given, and a token would have seen later ones all the same.
    """
    if causal is not None:
        config.require_causal("batch")
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
                layout, pattern, rotary, distances, global_attention_mask, random, causal
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
                # The block computes with a part of the owner, which stays the only one that has it
                # as a submodule: so each weight has one name.
                for name in (sharing.parts, f"{sharing.parts}_norm"):
                    delattr(block, name)
                    block.__dict__[name] = getattr(owner, name)
            yield block


def _group_of(layer: int, depth: int, sharing: Sharing) -> int:
    """Return the group of a layer, in floating point as in ALBERT's code: for some depths integers
    would round differently.
    """
    return int(layer / (depth / sharing.groups))


@dataclass(frozen=True)
class ModelOutput:
    """The outputs of a model for a batch. `batch.split` divides tensors of tokens by sequence.

    Attributes:
        last_hidden_state: `(tokens, width)`, the vector of each token after the last layer.
        logits: the outputs of each head by kind, `(sequences, outputs)` or `(tokens, outputs)`.
        pooler_output: `(sequences, width)`, the pooled vectors; None for a model without a pooler.
        hidden_states: if asked for, the embeddings and the output of each layer, `(tokens, width)`.
        attentions: if asked for, of each layer one tensor `(heads, queries, keys)` for each
            sequence, in its own length and without dropout.

    Examples:
        >>> model = bothways.load_model("my-bert")
        >>> output = model(model.tokenizer.batch("a good film"), heads=["masked"])
        >>> isinstance(output, bothways.ModelOutput), tuple(output.logits["masked"].shape)
        (True, (5, 26))
    """

    last_hidden_state: Float[Tensor, "tokens width"]
    logits: Mapping[str, Tensor] = field(default_factory=dict)
    pooler_output: Float[Tensor, "sequences width"] | None = None
    hidden_states: tuple[Float[Tensor, "tokens width"], ...] = ()
    attentions: tuple[Attentions, ...] = ()


class Model(nn.Module):
    """An encoder with heads by kind: "masked", "pooler", "pair", "labels", "tags", "span", …

    Args:
        config: the encoder's shape.
        heads: which heads it has; the pooler is added if one of them reads it.
        encoder: an encoder of this shape to use as it is; None for a new one.

    Attributes:
        kept: settings of the model folder that only other programs use, by file.

    Examples:
        >>> model = bothways.load_model("my-bert")
        >>> isinstance(model, bothways.Model), sorted(model.heads)
        (True, ['masked', 'pair', 'pooler'])
    """

    kept: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    if TYPE_CHECKING:  # in torch a call returns Any, which hides the fields from an editor
        __call__: Callable[..., ModelOutput]

    def __init__(
        self, config: EncoderConfig, heads: Iterable[Head], encoder: Encoder | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.specification = with_pooler(config, heads)
        self.encoder = Encoder(config) if encoder is None else encoder
        self.heads = nn.ModuleDict({head.kind: head.build(config) for head in self.specification})

    def masked_sources(self, batch: Batch, index: Int[Tensor, " asked"]) -> Int[Tensor, " asked"]:
        """Return the tokens from whose vectors the masked LM head predicts these tokens.

        These are the tokens themselves, or with `readout.shifted` those before them. The first
        token of a sequence has none before it.
        """
        if not self.config.readout.shifted:
            return index
        return index - (batch.layout.positions[index] > 0).long()

    def masked_vectors(
        self, batch: Batch, hidden: Hidden, index: Int[Tensor, " asked"] | None = None
    ) -> Float[Tensor, "asked width"]:
        """Return the vectors from which the masked LM head predicts these tokens; None for all.

        The batch is encoded, at least for their `masked_sources`. The vectors are the last ones or,
        with an enhanced mask decoder, its output: its first queries are the last block's input plus
        absolute positions.
        """
        if index is None and self.config.readout.shifted:
            index = torch.arange(batch.layout.tokens, device=hidden.last.device)
        sources = None if index is None else self.masked_sources(batch, index)
        position = getattr(self.heads["masked"], "position", None)
        x, before = hidden.last, hidden.before
        if position is not None and before is not None:
            x = self.encoder.decode(
                batch, before, before + position(batch.layout.positions), sources
            )
        return x if sources is None else x[sources]

    def forward(
        self,
        batch: Batch,
        *,
        heads: str | Collection[str] | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> ModelOutput:
        """Encode a batch and compute heads, with gradients unless they are turned off.

        Args:
            batch: packed texts, as `Tokenizer.batch` returns them.
            heads: kinds of heads whose logits are computed. None for all but those that have an
                output for each token of the vocabulary ("masked", "causal"), which would
                take longer than the rest of a small model.
            output_hidden_states: whether to return the output of each layer, too.
            output_attentions: whether to return attention probabilities, too. They are computed
                once more for this, so it takes longer.

        Raises:
            ConfigError: no batch, a sequence longer than the model's positions, a head that the
                model does not have; attentions of random blocks.
        """
        self._check(batch)
        heads = [heads] if isinstance(heads, str) else heads
        if heads is None:
            values = (h for h in self.specification if h.reads_batch and h.outputs is not None)
            heads = [value.kind for value in values]
        # Asked for its layers, an encoder runs them one by one.
        keep = output_hidden_states or output_attentions
        with recorded_attentions(self.encoder, output_attentions) as attentions:
            hidden = self.encoder(batch, keep_layers=keep)
        pooled = self.outputs("pooler", batch, hidden) if "pooler" in self.heads else None
        return ModelOutput(
            hidden.last,
            {kind: self.outputs(kind, batch, hidden, pooled) for kind in heads},
            pooled,
            hidden.layers if output_hidden_states else (),
            tuple(attentions),
        )

    def _check(self, batch: object) -> None:
        if not isinstance(batch, Batch):
            message = f"a model reads a Batch, not a {type(batch).__name__}"
            raise ConfigError(message, where="batch", fix="Give model.tokenizer.batch(texts).")
        positions = self.config.max_positions
        if batch.layout.max_seqlen > positions:
            number, length = max(enumerate(batch.layout.lengths), key=lambda pair: pair[1])
            message = f"text {number} has {length} tokens, and the model {positions} positions"
            fix = f"Cut longer texts: tokenizer.batch(texts, length={positions})."
            raise ConfigError(message, where="batch", fix=fix)

    def read(self, kind: str, batch: Batch) -> Float[Tensor, "rows ..."]:
        """Return the outputs of a head, from no more vectors than it reads.

        Raises:
            ConfigError: no batch, a sequence longer than the model's positions, no such head.
        """
        self._check(batch)
        only = None
        if any(h.kind == kind and h.reads_one_token(self.config) for h in self.specification):
            only = head_modules.pooled_tokens(batch.layout, self.config.is_causal)
        return self.outputs(kind, batch, self.encoder(batch, only=only))

    def outputs(
        self,
        kind: str,
        batch: Batch,
        hidden: Hidden,
        pooled: Float[Tensor, "sequences width"] | None = None,
    ) -> Float[Tensor, "rows ..."]:
        """Return the outputs of a head for an encoded batch, for each token or each sequence.

        Args:
            pooled: the output of the pooler, where it has been computed already.

        Raises:
            ConfigError: the model does not have the head, or a task model alone computes it.
        """
        if kind not in self.heads:
            message = f"the model has no head {kind!r}; it has {', '.join(self.heads) or 'none'}"
            raise ConfigError(message, where="heads", fix="Name one that it has.")
        head, layout = self.heads[kind], batch.layout
        of_sequences = any(h.kind == kind and h.of_sequences for h in self.specification)
        result: Tensor
        match head:
            case head_modules.MaskedOutput():
                result = head(self.masked_vectors(batch, hidden), hidden.table)
            case head_modules.NextTokenOutput():
                result = head(hidden.last, hidden.table)
            case head_modules.Pooler() | head_modules.ReplacedOutput():
                result = head(hidden.last, layout)
            case head_modules.VectorOutput() | head_modules.OwnOutput() if of_sequences:
                result = head(head.pool(hidden.last, layout))
            case head_modules.LinearOutput() if of_sequences:
                inputs = self.heads["pooler"](hidden.last, layout) if pooled is None else pooled
                result = head(inputs)
            case head_modules.LinearOutput() | head_modules.OwnOutput() | head_modules.DeepOutput():
                result = head(hidden.last)
            case _:
                message = f"the head {kind!r} is computed by its task model alone"
                fix = f"Call model.heads[{kind!r}] yourself."
                raise ConfigError(message, where="heads", fix=fix)
        return result
