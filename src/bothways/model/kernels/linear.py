"""Linear layers and whole blocks for inference on a CPU, with weights as they are multiplied.

A product of few rows with a matrix as a checkpoint has it spends most of its time on putting the
matrix in order. Packed once, a text of 17 tokens takes less than half the time in the layers of
MiniLM on two threads; for a thousand tokens nothing changes.

| dtype | kernels for it | AMX | rows | product |
|---|---|---|---|---|
| bf16 | yes | | any | `CompiledLinear` |
| fp32 | yes | yes | any | `CompiledLinear` |
| fp32 | yes | no | up to `TUNING.panel_rows` | `CompiledLinear` |
| fp32 | yes | no | more | `torch.nn.functional.linear` |
| fp32, bf16 | no | | any | `OneDNNLinear` |

Whole post-norm blocks (`CompiledLayers`) are one compiled kernel a call: what a block computes on
the way stays in the cache of a core, and Python does not run between the parts. `prediction`
decides which models have such blocks; others run layer by layer.

In int8 (`Int8Linear`), weights and activations are quantized symmetrically to one byte: weights
once, x ≈ s·q with a scale s for each output; activations at each call, with a scale for each token.
Products are added up in int32, which is exact, and scaled back to fp32. So only the rounding of
weights and activations is lost, and the result for a text does not depend on the other texts of a
batch. One scale for all tokens of a batch, as PyTorch's dynamic layers have it, takes 0.85 of the
time and loses five times as much: a few tokens, such as [SEP], have one feature ten times as large
as any other. x86 with AVX512-VNNI has `CompiledLinear`, any other that `has_int8` `OneDNNInt8`.

In training, layers keep their weights as they are, and `on_round_rows` pads the rows.

Source: Zafrir et al., Q8BERT (2019), with measured scales instead of trained ones.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import torch
from jaxtyping import Float, Int, Int8, UInt8
from torch import Tensor, nn
from torch.nn import functional as F

from bothways.core.batch import Layout
from bothways.core.errors import ConfigError
from bothways.core.runtime.tuning import TUNING
from bothways.model.kernels import abi
from bothways.model.kernels.attention import attention_batch, packed_attention
from bothways.model.kernels.library import (
    FORMATS,
    Feature,
    call_kernel,
    is_tracing,
    kernel_features,
    multiplies,
)

# 32 outputs are two vectors of 16 fp32 sums, or two AMX tiles of 16 columns.
PANEL, LINE = 32, 64
"""Outputs of a panel, and bytes of a cache line, as in `csrc`."""
SPLIT_ROWS = 32
"""Rows of a call from which fp32 products are made by AMX, `MIN_SPLIT_ROWS` in `csrc/api.c`."""


def refuse_gradients(layer: object, *inputs: Tensor) -> None:
    """Check that no gradients are asked for.

    Raises:
        ConfigError: they are, and the layer has none.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        message = f"{type(layer).__name__} is for inference and has no gradients"
        raise ConfigError(
            message,
            where="precision",
            fix="Train the model itself, then prepare the trained model.",
        )


class InferenceLayer(nn.Module):
    """A layer made from another one for inference: without gradients, and never saved."""

    def get_extra_state(self) -> NoReturn:
        """Refuse to be in a state_dict, so that no folder is written without these weights.

        Raises:
            ConfigError: always.
        """
        message = "layers prepared for inference exist in memory only"
        raise ConfigError(
            message, where="precision", fix="Save the model that they were made from."
        )


class CompiledPart:
    """Input of a kernel: addresses of tensors that this object holds and nobody changes.

    A deep copy is the object itself.
    """

    def __deepcopy__(self, memo: object) -> CompiledPart:
        return self


class CompiledLinear(CompiledPart):
    """x·Wᵀ + b by a compiled kernel.

    The weights are packed in panels of 32 outputs. A panel has, for every 4 bytes of an output's
    weights, a row with those of all its outputs:

        fp32:  w[0][0]    w[1][0]    …  w[31][0]    |  w[0][1]    w[1][1]    …
        int8:  w[0][0:4]  w[1][0:4]  …  w[31][0:4]  |  w[0][4:8]  w[1][4:8]  …

    Args:
        weight: in fp32 or bf16, or the codes of `quantize_weights`.
        scales: of the codes; None for fp32 and bf16.
        bias: of the outputs, or None.
        dtype: of the result, fp32 or bf16.
        least_rows: rows to which fewer are filled with zeros. With `SPLIT_ROWS` the result of a row
            does not depend on the number of rows, to the bit.
    """

    def __init__(
        self,
        weight: Float[Tensor, "outputs width"] | Int8[Tensor, "outputs width"],
        scales: Float[Tensor, " outputs"] | None,
        bias: Float[Tensor, " outputs"] | None,
        dtype: torch.dtype = torch.float32,
        least_rows: int = 0,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.least_rows = least_rows
        self.dtype, size = dtype, FORMATS[weight.dtype]
        # 4 bytes of one output are adjacent: 1 number in fp32, 2 in bf16, 4 in int8. That is what
        # one lane of a multiply-add instruction (FMA, VDPBF16PS, VPDPBUSD, TDPBF16PS, …) reads.
        together = 4 // size
        step = together if size == 4 else LINE // size  # an AMX tile reads whole lines
        padding = (0, -self.in_features % step, 0, -self.out_features % PANEL)
        padded = F.pad(weight, padding)
        # (outputs, width) → (panels, 32, width/together, together) → (panels, width/together, 32,
        # together): within a panel, the numbers that are multiplied together come first.
        groups = padded.view(-1, PANEL, padded.shape[1] // together, together)
        panels = groups.transpose(1, 2).contiguous()
        # VNNI multiplies unsigned by signed bytes, so a row's codes are q + 128, and
        # Σ (q + 128) · w = Σ q · w + 128 · Σ w: the last term is subtracted from each output.
        sums = None if scales is None else weight.sum(1, dtype=torch.int32) * 128
        self.tensors = panels, scales, sums, as_fp32(bias)
        sizes = (self.in_features, self.out_features, panels.nbytes, size)
        self.struct = abi.LinearStruct(*map(address, self.tensors), *sizes)

    def __call__(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows outputs"]:
        """Return x·Wᵀ + b of rows in fp32 or bf16; for int8 the kernel quantizes each row first."""
        count = x.shape[0]
        x = filled(as_float(x), self.least_rows)
        if x.shape[1:] != (self.in_features,):
            raise ValueError(f"rows have {self.in_features} features, not {[*x.shape[1:]]}")
        rows = x.shape[0]
        out = x.new_empty(rows, self.out_features, dtype=self.dtype)
        inputs = self.struct, x, FORMATS[x.dtype], rows
        call_kernel("bothways_linear", *inputs, out, FORMATS[self.dtype])
        return out[:count]


def filled(x: Tensor, least: int) -> Tensor:
    """Return `x` with zeros below it, up to `least` rows; `x` itself if it has as many."""
    return x if len(x) >= least else F.pad(x, (0, 0, 0, least - len(x)))


def as_float(x: Tensor) -> Tensor:
    """Return `x` contiguous, in bf16 if it is, else in fp32."""
    return (x if x.dtype is torch.bfloat16 else x.float()).contiguous()


def as_fp32(x: Tensor | None) -> Tensor | None:
    """Return `x` contiguous in fp32, detached: it keeps its memory, whatever the module does."""
    return None if x is None else x.detach().float().contiguous()


def address(x: Tensor | None) -> int | None:
    """Return the address of a tensor's data."""
    return None if x is None else x.data_ptr()


class PanelLinear(InferenceLayer):
    """A linear layer in fp32 or bf16 by compiled kernels, as the table above says.

    Args:
        linear: the layer; later changes of its weights have no effect.
        dtype: of the product and the result.
        batch_invariant: whether the result of a row does not depend on the number of rows, to the
            bit: the compiled kernel takes any number, and makes few as it makes many.
    """

    def __init__(
        self,
        linear: nn.Linear,
        dtype: torch.dtype = torch.float32,
        *,
        batch_invariant: bool = False,
    ) -> None:
        super().__init__()
        weight = linear.weight.detach().to(dtype)
        self.bias = as_fp32(linear.bias)
        amx = Feature.AMX in kernel_features()
        fill = SPLIT_ROWS if batch_invariant and amx and dtype is torch.float32 else 0
        self.product = CompiledLinear(weight, None, self.bias, dtype, fill)
        # PyTorch's fp32 products are as fast by vectors once the rows are many; AMX stays ahead.
        always = dtype is torch.bfloat16 or amx or batch_invariant
        self.max_rows = math.inf if always else float(TUNING.panel_rows)
        """Rows up to which the kernel is used."""
        self.weight = None if always else weight

    def forward(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows outputs"]:
        """Return x·Wᵀ + b.

        Raises:
            ConfigError: gradients are asked for.
        """
        refuse_gradients(self, x)
        if self.weight is None or len(x) <= self.max_rows:
            return self.product(x)
        return F.linear(x.float(), self.weight, self.bias)


class OneDNNLinear(InferenceLayer):
    """A linear layer in fp32 or bf16 by oneDNN, with packed weights.

    Args:
        linear: the layer; later changes of its weights have no effect.
        dtype: of the product and the result.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        weight = linear.weight.detach().to(dtype).contiguous()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self.bias = None if linear.bias is None else linear.bias.detach().to(dtype).contiguous()

    def forward(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows outputs"]:
        """Return x·Wᵀ + b.

        Raises:
            ConfigError: gradients are asked for.
        """
        refuse_gradients(self, x)
        if x.dtype is not self.dtype:
            x = x.to(self.dtype)
        result: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x, self.packed, self.bias, "none", [], ""
        )
        return result


def round_rows(rows: int) -> int:
    """Return a number at most an eighth above `rows`, one of nine between any n and 2n."""
    # Four leading binary digits stay, rounded up: 8, 9, … 15, 16, 18, … 30, 32, 36, …
    step = 1 << max(0, rows.bit_length() - 4)
    return -(-rows // step) * step


def on_round_rows(
    compute: Callable[..., Float[Tensor, "filled outputs"]], *x: Float[Tensor, "rows inputs"]
) -> Float[Tensor, "rows outputs"]:
    """Return `compute(*x)`, a row-wise function, computed for a number of rows that recurs.

    oneDNN plans every new shape: 1 to 8 ms for each of the three products of a linear layer, 20 ms
    with a vocabulary, longer than the products of some hundred tokens take. Packed batches hardly
    ever have the same number of tokens twice. So where a CPU computes gradients in bf16, rows of
    zeros are added up to `round_rows`; elsewhere the rows stay as they are.
    """
    rows = len(x[0])
    # Products in fp32 are MKL's, which plans nothing; predictions have packed layers.
    learns = x[0].is_cpu and torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
    extra = round_rows(rows) - rows if learns and not is_tracing() else 0
    return (
        compute(*(F.pad(rows_of, (0, 0, 0, extra)) for rows_of in x))[:rows]
        if extra
        else compute(*x)
    )


ROWS = 16
"""Rows are filled up to a multiple of it: oneDNN plans each new number of rows, which takes as long
as a product."""
ZERO_POINT = 128
"""The code of 0: VNNI multiplies unsigned activations by signed weights."""
ROUND_TO_INTEGER = 1.5 * 2.0**23
"""The fp32 numbers around it are integers: adding it rounds to the nearest, ties to even, into the
lowest bits of the sum."""


class Codes(NamedTuple):
    """Activations x ≈ scales · (codes − 128).

    Attributes:
        codes: of the rows, and of meaningless further ones up to a multiple of `ROWS`.
        scales: one for each row.
    """

    codes: UInt8[Tensor, "filled width"]
    scales: Float[Tensor, "rows 1"]


def quantize_weights(
    weight: Float[Tensor, "outputs width"],
) -> tuple[Int8[Tensor, "outputs width"], Float[Tensor, " outputs"]]:
    """Return codes q and scales s with weight ≈ s·q; the largest of a row becomes ±127."""
    scales = weight.abs().amax(1) / 127
    # Symmetric, without −128: the largest product of a pair, 127 · 255, leaves int32 room for
    # 66,000 features.
    codes = (weight / scales[:, None]).round()
    # A row of zeros has a scale of 0, and NaN for codes.
    return codes.nan_to_num(0.0, 0.0, 0.0).to(torch.int8), scales


def quantize_activations(x: Float[Tensor, "rows width"]) -> Codes:
    """Return the codes of rows; the largest of a row becomes 128 ± 127.

    The scale of a row of zeros is 0; that of a row with NaN or infinity is not finite.
    """
    codes = x.new_empty(-(-len(x) // ROWS) * ROWS, x.shape[1], dtype=torch.uint8)
    rows = max(1, TUNING.int8_chunk_elements // x.shape[1])
    if len(x) <= rows:  # for a short text, splitting takes longer than the work
        return Codes(codes, _quantize_rows(x, codes[: len(x)]))
    chunks = zip(torch.split(x, rows), torch.split(codes[: len(x)], rows), strict=True)
    return Codes(codes, torch.cat([_quantize_rows(chunk, target) for chunk, target in chunks]))


def _quantize_rows(
    x: Float[Tensor, "rows width"], codes: UInt8[Tensor, "rows width"]
) -> Float[Tensor, "rows 1"]:
    """Write the codes of rows to `codes`, and return their scales."""
    largest = x.abs().amax(1, keepdim=True)
    # The lowest byte of the sum is the code: rounding, shift and cast in one pass, not in three.
    codes.copy_((x * (127 / largest)).add_(ROUND_TO_INTEGER + ZERO_POINT).view(torch.int32))
    return largest.div_(127)


class Int8Linear(InferenceLayer):
    """A linear layer with products in int8.

    Args:
        linear: the layer, with finite weights; later changes of them have no effect.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        codes, scales = quantize_weights(linear.weight.detach().float())
        product = CompiledLinear if multiplies("int8") else OneDNNInt8
        self.product = product(codes, scales, as_fp32(linear.bias))

    def forward(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows outputs"]:
        """Return x·Wᵀ + b in fp32. If a number of a row is not finite, none of its outputs is.

        Raises:
            ConfigError: gradients are asked for.
        """
        refuse_gradients(self, x)
        return self.product(x)


class OneDNNInt8:
    """A product in int8 by PyTorch's operators, which quantize and scale in passes of their own."""

    def __init__(
        self,
        codes: Int8[Tensor, "outputs width"],
        scales: Float[Tensor, " outputs"],
        bias: Float[Tensor, " outputs"] | None,
    ) -> None:
        # oneDNN's own order, chosen for this processor.
        self.packed = torch.ops.onednn.qlinear_prepack(codes, None)
        self.scales, self.bias = scales, bias
        self.zeros = torch.zeros(len(scales), dtype=torch.int32)

    def __call__(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows outputs"]:
        """Return x·Wᵀ + b in fp32."""
        if not len(x):
            return x.new_empty(0, len(self.scales), dtype=torch.float32)
        codes, scales = quantize_activations(x.float())
        weights = (self.packed, self.scales, self.zeros, None)
        # No scale and no activation in the epilogue: it has one scale for all rows.
        epilogue: tuple[object, ...] = (1.0, 0, torch.float32, "none", [], "")
        # Σ (q − 128) · w in fp32, scaled by the weights: the scale of each row follows below.
        products: Tensor = torch.ops.onednn.qlinear_pointwise(
            codes, 1.0, ZERO_POINT, *weights, *epilogue
        )
        result = products[: len(x)]
        if self.bias is None:
            return result.mul_(scales)
        return torch.addcmul(self.bias, result, scales, out=result)


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
