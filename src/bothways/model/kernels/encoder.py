"""Whole post-norm blocks for inference, each call one compiled kernel.

What a block computes on the way stays in the cache of a core, and Python does not run between the
parts. `prediction` decides which models have such blocks; others run layer by layer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bothways.core.batch import Layout
from bothways.model.kernels import abi
from bothways.model.kernels.attention import attention_batch, packed_attention
from bothways.model.kernels.library import FORMATS, call_kernel
from bothways.model.kernels.linear import (
    CompiledLinear,
    CompiledPart,
    address,
    as_float,
    as_fp32,
    filled,
    refuse_gradients,
)


class CompiledBlockTail(CompiledPart):
    """What follows the attention in a post-norm block with GELU, without dropout.

    Args:
        linears: the projection of the attention's output, and both layers of the feed-forward part.
        norms: the LayerNorms after the attention and after the feed-forward part.
    """

    def __init__(
        self,
        linears: Sequence[CompiledLinear],
        norms: tuple[nn.LayerNorm, nn.LayerNorm],
    ) -> None:
        # The struct holds addresses; `tensors` and `linears` keep alive what they point to.
        out = linears[0]
        self.heads_width, self.width = out.in_features, out.out_features
        self.tensors = [(as_fp32(norm.weight), as_fp32(norm.bias)) for norm in norms]
        self.linears = linears
        self.least_rows = max(linear.least_rows for linear in linears)
        # `ctypes` copies the linear layers' structs into this one.
        self.struct = abi.BlockTail(
            *(linear.struct for linear in self.linears),
            *(
                abi.LayerNorm(*map(address, pair), norm.normalized_shape[0], norm.eps)
                for pair, norm in zip(self.tensors, norms, strict=True)
            ),
        )

    def __call__(
        self, residual: Float[Tensor, "rows width"], heads: Float[Tensor, "rows inputs"]
    ) -> Float[Tensor, "rows width"]:
        """Return mlp_norm(y + down(gelu(up(y)))) with y = attention_norm(residual + out(heads)).

        Args:
            residual: the input of the block.
            heads: the output of the attention, in fp32 or bf16.
        """
        refuse_gradients(self, residual, heads)
        residual, heads, count = residual.float().contiguous(), as_float(heads), len(residual)
        if residual.shape != (count, self.width) or heads.shape != (count, self.heads_width):
            shapes = f"{[*residual.shape]} and {[*heads.shape]}"
            expected = f"(rows, {self.width}) and (rows, {self.heads_width})"
            raise ValueError(f"residual and heads have the shapes {expected}, not {shapes}")
        residual, heads = filled(residual, self.least_rows), filled(heads, self.least_rows)
        result, rows = torch.empty_like(residual), len(residual)
        inputs = self.struct, residual, heads, FORMATS[heads.dtype], rows
        call_kernel("bothways_block_tail", *inputs, result)
        return result[:count]


class CompiledLayers(CompiledPart):
    """Consecutive post-norm blocks in which all tokens of a sequence attend to each other.

    Args:
        qkv: the projections to queries, keys and values of each block, all of one dtype.
        tails: what follows the attention of each.
        heads: the number of heads.
        dtype: of the attention.
    """

    def __init__(
        self,
        qkv: Sequence[CompiledLinear],
        tails: Sequence[CompiledBlockTail],
        heads: int,
        dtype: torch.dtype,
    ) -> None:
        self.parts = qkv, tails
        self.least_rows = max(
            *(layer.least_rows for layer in qkv), *(layer.least_rows for layer in tails)
        )
        self.width, self.dtype = tails[0].width, dtype
        self.heads, self.head_size = heads, tails[0].heads_width // heads
        # An array of pointers to one struct per block: `depth` in a call chooses how many are read.
        pairs = zip(qkv, tails, strict=True)
        layers = [abi.EncoderLayer(linear.struct, tail.struct) for linear, tail in pairs]
        self.layers = (ctypes.POINTER(abi.EncoderLayer) * len(layers))(*map(ctypes.pointer, layers))

    def __call__(
        self, x: Float[Tensor, "tokens width"], layout: Layout, depth: int
    ) -> Float[Tensor, "tokens width"]:
        """Return `x` after the first `depth` blocks, in fp32.

        The kernel takes some sequences at a time through all blocks, as many as fit in the cache.
        """
        refuse_gradients(self, x)
        if x.shape[1:] != (self.width,) or depth > len(self.layers):
            limits = f"{self.width} features and {len(self.layers)} layers"
            raise ValueError(f"there are {limits}, not {[*x.shape[1:]]} and {depth}")
        # The kernel works in place: each block reads its residual from `x` and writes its output
        # there. Queries, keys, values and what lies between exist in workspaces only.
        if len(x) < self.least_rows:  # filled with a sequence of zeros
            layout = Layout.of([*layout.lengths, self.least_rows - len(x)])
            return self(filled(x, self.least_rows), layout, depth)[: len(x)]
        x = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        batch = attention_batch(layout, len(x), self.heads, self.head_size, self.dtype)
        call_kernel("bothways_encoder_layers", self.layers, depth, batch, x)
        return x

    def last(
        self, x: Float[Tensor, "tokens width"], layout: Layout, only: Int[Tensor, " asked"]
    ) -> Float[Tensor, "asked width"]:
        """Return the output of the last block for some of the tokens, given its input `x`.

        All tokens are keys and values; what follows the attention is computed for `only`.
        """
        (*_, project), (*_, tail) = self.parts
        qkv = project(x).view(len(x), 3, self.heads, self.head_size)
        heads = packed_attention(qkv, layout).flatten(1)
        return tail(x[only], heads[only])
