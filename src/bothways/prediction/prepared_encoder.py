"""A model prepared for predictions on a CPU: the dense layers of its blocks in the form in which it multiplies them fastest."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor, nn
from typing_extensions import assert_never

from bothways.attention.dispatch import AttentionCall, Compiled, choose
from bothways.attention.patterns import Full
from bothways.core.batch import Batch
from bothways.core.errors import ConfigError
from bothways.kernels import library as native
from bothways.kernels.int8 import Int8Linear
from bothways.kernels.library import Feature, multiplies
from bothways.kernels.linear import Dense, Layers, Rest
from bothways.kernels.packed_linear import PackedLinear, PanelLinear, Prepared
from bothways.model.block import Block
from bothways.model.encoder import Encoder, Hidden, attention_views, spread
from bothways.model.positions import Disentangled, Learned, Sinusoidal
from bothways.runtime.devices import (
    Precision,
    describe_device,
    has_int8,
    packs_weights,
    resolve_precision,
)

M = TypeVar("M", bound=nn.Module)


def prepare(model: M, precision: Precision | Literal["int8"] = "fp32") -> M:
    """The same model in evaluation mode, with blocks whose dense layers are packed, or in int8; it shares all other weights.

    Where `join` allows it, all that follows the attention of a block is one kernel.

    These are the projections to queries, keys and values, those of global tokens too, the projection of what attention gives,
    and both layers of the feed-forward part, gated or not. As they were stay embeddings, attention itself, LayerNorms and
    heads; what makes keys and queries of relative positions; the projections of the last block, where disentangled attention
    may apply it with queries of its own; and layers that are no plain `nn.Linear`. Modules are called without regard to hooks.

    Where weights cannot be packed, on a GPU or with a torch that has no oneDNN, and where a model has no blocks, fp32 and bf16
    leave all layers as they are.

    Raises:
        ConfigError: int8 is asked for, and the model is not on a CPU that multiplies it, or has no blocks; bf16 where the
            device has none.
    """
    device = next(model.parameters()).device
    match precision:
        case "int8":
            _check_int8(model, device)
            return _replaced(model, Int8Linear)
        case "auto" | "fp32" | "bf16":
            return _replaced(model, packing(device, resolve_precision(precision, device)))
        case _:
            assert_never(precision)


def gains(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether many tokens go faster through this model prepared: where the library's own kernels for fp32 or bf16 are faster
    than torch's products for any number of rows, and it is not prepared yet."""
    own = (
        multiplies("bf16") if dtype is torch.bfloat16 else Feature.TILES in native.kernel_features()
    )
    return (
        own
        and next(model.parameters()).device.type == "cpu"
        and not any(isinstance(m, Prepared) for m in model.modules())
    )


def cuts_itself(model: nn.Module) -> bool:
    """Whether all layers are one kernel for any number of tokens, of which it takes as many at a time as its cache holds."""
    return any(
        isinstance(module, JoinedEncoder) and module.most == math.inf for module in model.modules()
    )


def packing(device: torch.device, dtype: torch.dtype) -> Callable[[nn.Linear], nn.Module]:
    """What stands for a dense layer in fp32 or bf16.

    | device | dtype | kernels compiled | layer |
    |---|---|---|---|
    | CPU, x86 with AVX-512 | fp32 | yes | `PanelLinear` |
    | the same, with its instructions for bf16 | bf16 | yes | `PanelLinear` |
    | CPU, as `packs_weights` says | any other case | | `PackedLinear` |
    | any other | | | as it is |
    """
    if not packs_weights(device):
        return lambda linear: linear
    own = multiplies("fp32" if dtype == torch.float32 else "bf16")
    return functools.partial(PanelLinear if own else PackedLinear, dtype=dtype)


def _check_int8(model: nn.Module, device: torch.device) -> None:
    if not has_int8(device):
        what = f"int8 is asked for, but {describe_device(device)} has no instructions for it that are used here"
        raise ConfigError(
            what, where="precision", fix="Set the precision to auto or fp32, or the device to cpu."
        )
    if not any(isinstance(module, Block) for module in model.modules()):
        what = "int8 is for the dense layers of Transformer blocks, and this model has none"
        raise ConfigError(what, where="precision", fix="Set the precision to fp32.")


def _replaced(model: M, made: Callable[[nn.Linear], nn.Module]) -> M:
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    result = copy.deepcopy(model, tensors)
    encoders = [module for module in result.modules() if isinstance(module, Encoder)]
    decoding = [
        encoder for encoder in encoders if isinstance(encoder.config.position, Disentangled)
    ]
    exact = [encoder.layer(encoder.config.depth - 1)[-1] for encoder in decoding]
    rests = {}
    for block in [module for module in result.modules() if isinstance(module, Block)]:
        _replace(
            block.attention,
            ("global_qkv", "out") if block in exact else ("qkv", "global_qkv", "out"),
            made,
        )
        _replace(block.mlp, ("up", "down"), made)
        rests[block] = join_block(block)
    for encoder in encoders:
        join_layers(encoder, rests)
    for module in result.modules():
        module.__class__ = _called_directly(type(module))  # type: ignore[arg-type]
        vars(module).update(
            module._modules | module._parameters
        )  # found at once, where nn.Module would look for them
    return result.eval()


def join_block(block: Block) -> Rest | None:
    """Let all that follows the attention be one kernel, where its layers have their own and it does as they do; that kernel.

    | order | activation | dense layers | LayerNorms | one kernel |
    |---|---|---|---|---|
    | post-norm | GELU, not gated | all int8, by `Dense` | with weights | always |
    | the same | the same | all `PanelLinear` | the same | for as many rows as these say |
    | any other | | | | never |
    """
    dense = _dense((block.attention.out, block.mlp.up, block.mlp.down))
    norms = [
        norm for norm in (block.attention_norm, block.mlp_norm) if isinstance(norm, nn.LayerNorm)
    ]
    plain = block.normed_after and block.mlp.activation == "gelu" and not block.mlp.gated
    if not plain or dense is None or len(norms) < 2:
        return None
    joined, apart, most = Rest(dense, norms), block.rest, _most(block.mlp.up)

    def rest(start: Tensor, heads: Tensor) -> Tensor:
        return joined(start, heads) if len(start) <= most else apart(start, heads)

    block.rest = rest  # type: ignore[method-assign]
    return joined


class JoinedEncoder(Encoder):
    """An encoder all of whose layers are one kernel, for batches that it suits; `join_layers` turns one into it.

    Attributes:
        layers: the kernel.
        most: tokens that it is for.
        kind: of what it computes attention in: device, type and size of heads.
    """

    layers: Layers
    most: float
    kind: tuple[torch.device, torch.dtype, int]

    def forward(
        self, batch: Batch, keep_layers: bool = False, only: Int[Tensor, " asked"] | None = None
    ) -> Hidden:
        """As `Encoder.forward`; what the last block read is not kept."""
        layout, depth = batch.layout, self.config.depth
        suits = (
            layout.tokens <= self.most
            and choose(AttentionCall(*self.kind, layout.max_seqlen)) == Compiled()
        )
        if keep_layers or not suits:
            return super().forward(batch, keep_layers, only)
        x, table = self.embedding(batch)
        if only is None:
            return Hidden(self.layers(x, layout, depth), table)
        x, view = self.layers(x, layout, depth - 1), attention_views(self.config, layout)[-1]
        return Hidden(spread(self.layer(depth - 1)[-1](x, view, only=only), only, len(x)), table)


def join_layers(encoder: Encoder, rests: Mapping[Block, Rest | None]) -> None:
    """Let all layers be one kernel, where each is one block, what follows its attention is one, and the attention is plain.

    Plain is: all tokens of a sequence see each other, through one projection, whatever lies between them.
    """
    config = encoder.config
    blocks = [
        block
        for layer in range(config.depth)
        for block in encoder.layer(layer)
        if isinstance(block, Block)
    ]
    after = [rest for rest in map(rests.get, blocks) if rest is not None]
    before = _dense([block.attention.qkv for block in blocks])
    plain = (
        all(isinstance(pattern, Full) for pattern in config.patterns)
        and encoder.convolution is None
    )
    plain = (
        plain
        and isinstance(config.position, Learned | Sinusoidal)
        and blocks[0].attention.bias is None
    )
    if plain and before is not None and len(after) == config.depth == len(blocks):
        # By AMX attention takes a third of the time in bf16, which loses less than int8 has lost before it.
        rounded = (
            isinstance(blocks[0].mlp.up, Int8Linear) and Feature.TILES in native.kernel_features()
        )
        dtype = torch.bfloat16 if rounded else before[0].dtype
        layers = Layers(before, after, config.heads, dtype)
        encoder.__class__ = JoinedEncoder
        kind = (next(encoder.parameters()).device, dtype, config.width // config.heads)
        vars(encoder).update(layers=layers, most=_most(blocks[0].mlp.up), kind=kind)


def _dense(layers: Sequence[nn.Module]) -> list[Dense] | None:
    """Their kernels; none unless all have one."""
    products = [
        layer.product if isinstance(layer, Int8Linear | PanelLinear) else None for layer in layers
    ]
    found = [product for product in products if isinstance(product, Dense)]
    return found if len(found) == len(layers) else None


def _most(layer: nn.Module) -> float:
    """The most rows for which a layer has a kernel."""
    return layer.most if isinstance(layer, PanelLinear) else math.inf


@functools.cache
def _called_directly(kind: type[nn.Module]) -> type[nn.Module]:
    """The same modules, called as functions: the way by torch's hooks takes 5 % of the time of a short text."""
    made: type[nn.Module] = type(kind.__name__, (kind,), {"__call__": kind.forward})
    return made


def _replace(
    module: nn.Module, names: tuple[str, ...], made: Callable[[nn.Linear], nn.Module]
) -> None:
    for name in names:
        layer = getattr(module, name)
        if type(layer) is nn.Linear:
            setattr(module, name, made(layer))
