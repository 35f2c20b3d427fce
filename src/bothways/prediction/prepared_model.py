"""Models prepared for predictions: dense layers of blocks packed for the kernels of a CPU.

`prepare_model` builds a `PreparedModel` from a `Model` and leaves the model unchanged. All weights
other than those of the packed layers are shared. A prepared model has the interface of `Model`, is
always in evaluation mode, has no gradients and cannot be saved.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bothways.core.batch import Batch
from bothways.core.errors import ConfigError
from bothways.core.runtime import devices
from bothways.core.runtime.tuning import TUNING
from bothways.model.attention.dispatch import AttentionCall, choose
from bothways.model.attention.patterns import Full
from bothways.model.block import Block, GroupedProjection
from bothways.model.config import EncoderConfig
from bothways.model.embedding import Embedding
from bothways.model.heads import MaskedOutput, NextTokenOutput
from bothways.model.kernels import library
from bothways.model.kernels.encoder import CompiledBlockTail, CompiledLayers
from bothways.model.kernels.int8 import Int8Linear
from bothways.model.kernels.library import HEAD_STEP, Feature, multiplies
from bothways.model.kernels.linear import CompiledLinear, OneDNNLinear, PanelLinear
from bothways.model.model import Encoder, Hidden, Model, spread
from bothways.model.positions import Disentangled, Learned, Sinusoidal
from bothways.prediction import PredictPrecision

GraphPrecision = Literal["fp32", "int8"]
"""The precision of an exported graph."""
PackLayer = Callable[[nn.Linear], nn.Module]
"""Makes the packed form of a dense layer."""


class PreparedBlock(Block):
    """A block with packed dense layers; where it exists, one kernel computes all after attention.

    | order | activation | dense layers | LayerNorms | fused kernel for |
    |---|---|---|---|---|
    | post-norm | GELU, not gated | all int8, by `CompiledLinear` | with weights | all rows |
    | post-norm | GELU, not gated | all `PanelLinear` | with weights | `max_rows` rows |
    | any other | | | | none |

    Args:
        block: the parts, which become those of this block.
        plain_queries: whether the projection to queries, keys and values stays an `nn.Linear`, as
            an enhanced mask decoder applies a part of it.
    """

    def __init__(self, block: Block, pack: PackLayer, *, plain_queries: bool) -> None:
        nn.Module.__init__(self)
        self.normed_after, self.compiled = block.normed_after, False
        self.attention, self.attention_norm = block.attention, block.attention_norm
        self.mlp, self.mlp_norm = block.mlp, block.mlp_norm
        self.attention_dropout, self.mlp_dropout = block.attention_dropout, block.mlp_dropout
        projections = ("global_qkv", "out") if plain_queries else ("qkv", "global_qkv", "out")
        _pack_layers(self.attention, projections, pack)
        _pack_layers(self.mlp, ("up", "down"), pack)
        if isinstance(self.attention.qkv, GroupedProjection):
            _pack_layers(self.attention.qkv, ("query", "key_value"), pack)
        # Int8 layers take any number of rows; the panels of others pay off for few.
        up = self.mlp.up
        self.max_fused_rows = up.max_rows if isinstance(up, PanelLinear) else math.inf
        self.fused: CompiledBlockTail | None = None
        dense = _kernels((self.attention.out, self.mlp.up, self.mlp.down))
        norms = (self.attention_norm, self.mlp_norm)
        plain = self.normed_after and self.mlp.activation == "gelu" and not self.mlp.gated
        if plain and dense is not None and all(isinstance(n, nn.LayerNorm) for n in norms):
            pair = cast("tuple[nn.LayerNorm, nn.LayerNorm]", norms)
            self.fused = CompiledBlockTail(dense, pair)

    def rest(
        self, start: Float[Tensor, "asked width"], heads: Float[Tensor, "asked width"]
    ) -> Float[Tensor, "asked width"]:
        """Compute what follows the attention, see `Block.rest`."""
        if self.fused is not None and len(start) <= self.max_fused_rows:
            return self.fused(start, heads)
        return super().rest(start, heads)


class PreparedEmbedding:
    """An embedding layer without dropout and gradients, with its tensors at hand.

    Looking up and calling its modules takes as long as the operations on a short text.
    """

    def __init__(self, embedding: Embedding) -> None:
        self.token, self.scale = embedding.token.weight, embedding.scale
        self.position = None if embedding.position is None else embedding.position.forward
        self.segment = None if embedding.segment is None else embedding.segment.weight
        self.task = None if embedding.task is None else embedding.task.weight[0]
        norm, project = embedding.norm.forward, embedding.project.forward
        self.steps = (project, norm) if embedding.late else (norm, project)

    def __call__(
        self, batch: Batch
    ) -> tuple[Float[Tensor, "tokens width"], Float[Tensor, "vocab embedded"]]:
        """Return the first block's input and the token embedding, see `Embedding.forward`."""
        x = nn.functional.embedding(batch.ids, self.token)
        if self.scale != 1.0:
            x = x * self.scale
        if self.position is not None:
            x = x + self.position(batch.layout.positions)
        if self.segment is not None:
            x = x + nn.functional.embedding(batch.segments, self.segment)
        if self.task is not None:
            x = x + self.task
        for step in self.steps:
            x = step(x)
        return x, self.token


class PreparedEncoder(Encoder):
    """An encoder of `PreparedBlock`s; one kernel computes all layers, where it exists.

    Args:
        encoder: the parts, which become those of this encoder.

    Attributes:
        embed: the embedding, for batches that `layers` computes.
        layers: the kernel of all layers; None if there is none for this encoder.
        max_tokens: the most tokens of a batch that `layers` computes.
    """

    def __init__(self, encoder: Encoder, pack: PackLayer) -> None:
        nn.Module.__init__(self)
        self.config, self.recompute = encoder.config, False
        self.embedding, self.relative = encoder.embedding, encoder.relative
        self.convolution, self.norm = encoder.convolution, encoder.norm
        decodes = isinstance(self.config.position, Disentangled)
        last_block = encoder.layer(self.config.depth - 1)[-1]
        self.blocks = encoder.blocks
        # A block that layers share, or a stack of blocks, may be nested: replaced where it is.
        for parent in list(self.blocks.modules()):
            for name, block in parent.named_children():
                if isinstance(block, Block):
                    plain = decodes and block is last_block
                    setattr(parent, name, PreparedBlock(block, pack, plain_queries=plain))
        self.embed = PreparedEmbedding(self.embedding)
        self.max_tokens = 0.0
        self.layers = self._fuse_layers()

    def _fuse_layers(self) -> CompiledLayers | None:
        """Return the kernel of all layers, if each is one fused block and all attend to all.

        Its attention needs heads of a multiple of `HEAD_STEP` features.
        """
        config = self.config
        blocks = [block for layer in range(config.depth) for block in self.layer(layer)]
        prepared = [block for block in blocks if isinstance(block, PreparedBlock)]
        fused = [block.fused for block in prepared if block.fused is not None]
        projections = _kernels([block.attention.qkv for block in prepared])
        plain = (
            all(isinstance(pattern, Full) for pattern in config.patterns)
            and isinstance(config.position, Learned | Sinusoidal)
            and not config.has_relative_scores
            and self.convolution is None
            and prepared[0].attention.bias is None
            and config.width // config.heads % HEAD_STEP == 0
        )
        if not plain or projections is None or not len(fused) == config.depth == len(blocks):
            return None
        # With AMX, attention in bf16 takes a third of the time, and loses less than int8 has.
        int8 = isinstance(prepared[0].mlp.up, Int8Linear)
        in_tiles = int8 and _has_amx()
        dtype = torch.bfloat16 if in_tiles else projections[0].dtype
        device = devices.device_of(self)
        self.max_tokens = prepared[0].max_fused_rows
        self._attention = functools.partial(
            AttentionCall, device, dtype, config.width // config.heads
        )
        return CompiledLayers(projections, fused, config.heads, dtype)

    def forward(
        self, batch: Batch, keep_layers: bool = False, only: Int[Tensor, " asked"] | None = None
    ) -> Hidden:
        """Encode a packed batch, see `Encoder.forward`.

        `Hidden.before` is missing where all layers are one kernel.
        """
        layout, depth = batch.layout, self.config.depth
        if (
            self.layers is None
            or keep_layers
            or batch.causal is not None
            or layout.tokens > self.max_tokens
            or choose(self._attention(layout.max_seqlen)) != "compiled"
        ):
            return super().forward(batch, keep_layers, only)
        x, table = self.embed(batch)
        if only is None:
            return Hidden(self.layers(x, layout, depth), table)
        x = self.layers(x, layout, depth - 1)
        return Hidden(spread(self.layers.last(x, layout, only), only, len(x)), table)


class PreparedModel(Model):
    """A model for predictions in one precision.

    Args:
        parts: a copy of a model, whose modules become those of this one.
        precision: of matrix products.
        pack_head: as `pack`, for the dense layers of heads and for the one that projects narrow
            embeddings; None to leave them as they are.

    Attributes:
        autocast_dtype: the type in which the layers that are not packed multiply.
        splits_batches: whether one kernel takes any number of tokens, as many at a time as the
            cache holds.
        batch_invariant: whether the vectors of a sequence up to `longest_fused` tokens, and all
            heads but those over the vocabulary, do not depend on its batch, to the bit.
        longest_fused: the longest sequence that the kernel of all layers takes.
    """

    def __init__(
        self,
        parts: Model,
        pack: PackLayer,
        precision: Literal["fp32", "bf16", "int8"],
        pack_head: PackLayer | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.config, self.specification, self.kept = parts.config, parts.specification, parts.kept
        self.precision, self.heads, encoder = precision, parts.heads, parts.encoder
        if pack_head is not None:
            _pack_layers(encoder.embedding, ("project",), pack_head)
        self.encoder = PreparedEncoder(encoder, pack)
        self.device = devices.device_of(parts)
        self.autocast_dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self.splits_batches = self.encoder.max_tokens == math.inf
        self.batch_invariant = pack_head is not None and self.splits_batches
        in_tiles = precision != "fp32" and _has_amx()
        self.longest_fused = TUNING.compiled_amx if in_tiles else TUNING.compiled
        if pack_head is not None:
            for module in list(self.heads.modules()):
                names = dict(module.named_children())
                if isinstance(module, MaskedOutput | NextTokenOutput):
                    names.pop("output", None)  # its weight is read, as the token embedding's is
                _pack_layers(module, tuple(names), pack_head)
        self.eval()

    def check_process(self) -> None:
        """Raise ResourceError where a call would never return: in a forked process with threads."""
        if self.device.type == "cpu":
            devices.require_threads()


class UnpackedModel(PreparedModel):
    """A model with the interface of a prepared one, of which nothing is packed.

    Args:
        encoder: computes the vectors, such as a graph in another runtime or a table.
    """

    def __init__(
        self, encoder: nn.Module, heads: dict[str, nn.Module], precision: GraphPrecision = "fp32"
    ) -> None:
        nn.Module.__init__(self)
        self.encoder = encoder  # type: ignore[assignment]
        self.config: EncoderConfig = encoder.config  # type: ignore[assignment]
        self.heads, self.specification, self.precision = nn.ModuleDict(heads), (), precision
        self.device, self.autocast_dtype = torch.device("cpu"), torch.float32
        self.splits_batches = self.batch_invariant = False
        self.eval()


def prepare_model(
    model: Model, precision: PredictPrecision = "fp32", *, batch_invariant: bool = False
) -> PreparedModel:
    """Build the prepared form of a model; later changes of its dense layers are not seen.

    Packed are the projections of attention, both layers of the feed-forward part and, with
    `batch_invariant`, the dense layers of heads. Embeddings, attention itself, LayerNorms, the
    projections of relative positions and layers other than a plain `nn.Linear` stay as they are;
    so do in fp32 all layers on a GPU, and with a torch without oneDNN.

    Args:
        batch_invariant: compute few rows as many, so that a sequence has the same result in every
            batch, to the bit; where the compiled kernels are not, it has no effect. With AMX a text
            of 5 tokens alone then takes twice as long, one of 30 as long.

    Raises:
        ConfigError: int8 on a device without it.
    """
    device = devices.device_of(model)
    if precision == "int8":
        if not devices.has_int8(device):
            message = f"int8 needs instructions that {devices.describe_device(device)} lacks"
            fix = "Set the precision to auto or fp32, or the device to cpu."
            raise ConfigError(message, where="precision", fix=fix)
        resolved: Literal["fp32", "bf16", "int8"] = "int8"
        pack: PackLayer = Int8Linear
        dtype = torch.float32
    else:
        dtype = devices.resolve_precision(precision, device)
        resolved = "bf16" if dtype is torch.bfloat16 else "fp32"
        pack = layer_packer(device, dtype, batch_invariant=batch_invariant)
    packs_heads = batch_invariant and devices.packs_weights(device) and _has_kernels(dtype)
    pack_head = layer_packer(device, dtype, batch_invariant=True) if packs_heads else None
    # `deepcopy` finds the tensors in its memo and shares them: only modules are copied.
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return PreparedModel(copy.deepcopy(model, tensors), pack, resolved, pack_head)


def layer_packer(
    device: torch.device, dtype: torch.dtype, *, batch_invariant: bool = False
) -> PackLayer:
    """Choose the packed form of a dense layer in fp32 or bf16.

    | device | dtype | kernels compiled | layer |
    |---|---|---|---|
    | CPU, x86 with AVX-512 | fp32 | yes | `PanelLinear` |
    | the same, with its instructions for bf16 | bf16 | yes | `PanelLinear` |
    | CPU, if `packs_weights` | any other case | | `OneDNNLinear` |
    | any other | bf16 | | `nn.Linear` in bf16, which autocast would make of it in every batch |
    | any other | fp32 | | unchanged |
    """
    if not devices.packs_weights(device):
        half = dtype is torch.bfloat16
        return lambda linear: copy.deepcopy(linear).to(dtype) if half else linear
    if _has_kernels(dtype):
        return functools.partial(PanelLinear, dtype=dtype, batch_invariant=batch_invariant)
    return functools.partial(OneDNNLinear, dtype=dtype)


def _has_kernels(dtype: torch.dtype) -> bool:
    return multiplies("fp32" if dtype == torch.float32 else "bf16")


def _has_amx() -> bool:
    return Feature.AMX in library.kernel_features()


def gains_at_bulk(model: Model) -> bool:
    """Return True if many tokens go faster through the prepared form of this model, in fp32.

    They do where the library's kernels are faster than torch's products for any number of rows.
    """
    if isinstance(model, PreparedModel) or not _has_amx():  # an exported one has no parameters
        return False
    return devices.device_of(model).type == "cpu"


def _pack_layers(module: nn.Module, names: tuple[str, ...], pack: PackLayer) -> None:
    for name in names:
        layer = getattr(module, name)
        if type(layer) is nn.Linear:
            setattr(module, name, pack(layer))


def _kernels(layers: Sequence[nn.Module]) -> list[CompiledLinear] | None:
    """Return the kernels of dense layers; None unless all have one."""
    products = [getattr(layer, "product", None) for layer in layers]
    compiled = [product for product in products if isinstance(product, CompiledLinear)]
    return compiled if len(compiled) == len(products) else None
