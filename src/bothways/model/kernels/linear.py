"""Linear layers for inference on a CPU, with weights in the order in which they are multiplied.

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

`int8` has the layers in int8.

In training, layers keep their weights as they are; `on_round_rows` pads the rows on a CPU, and
`to_vocabulary` the outputs of the largest product on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NoReturn

import torch
from jaxtyping import Float, Int8
from torch import Tensor, nn
from torch.nn import functional as F

from bothways.core.errors import ConfigError
from bothways.core.runtime.tuning import TUNING
from bothways.model.kernels import abi
from bothways.model.kernels.library import (
    FORMATS,
    Feature,
    call_kernel,
    is_tracing,
    kernel_features,
)

# 32 outputs are two vectors of 16 fp32 sums, or two AMX tiles of 16 columns.
PANEL, LINE = 32, 64
"""Outputs of a panel, and bytes of a cache line, as in `csrc`."""
SPLIT_ROWS = 32
"""Rows of a call from which fp32 products are made by AMX, `MIN_SPLIT_ROWS` in `csrc/api.c`."""
OUTPUT_MULTIPLE = 64
"""The number of outputs over a vocabulary is a multiple of 64 in a training step on a GPU."""


def refuse_gradients(layer: object, *inputs: Tensor) -> None:
    """Check that no gradients are asked for.

    Raises:
        ConfigError: they are, and the layer has none.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        message = f"{type(layer).__name__} is for inference and has no gradients"
        fix = "Train the model itself, then prepare the trained model."
        raise ConfigError(message, where="precision", fix=fix)


class InferenceLayer(nn.Module):
    """A layer made from another one for inference: without gradients, and never saved."""

    def get_extra_state(self) -> NoReturn:
        """Refuse to be in a state_dict, so that no folder is written without these weights.

        Raises:
            ConfigError: always.
        """
        message = "layers prepared for inference exist in memory only"
        fix = "Save the model that they were made from."
        raise ConfigError(message, where="precision", fix=fix)


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
        weight: in fp32 or bf16, or the codes of `int8.quantize_weights`.
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
        result: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x.to(self.dtype), self.packed, self.bias, "none", [], ""
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
    if not extra:
        return compute(*x)
    return compute(*(F.pad(rows_of, (0, 0, 0, extra)) for rows_of in x))[:rows]


def to_vocabulary(
    x: Float[Tensor, "rows width"],
    weight: Float[Tensor, "vocab width"],
    bias: Float[Tensor, " vocab"] | None = None,
) -> Float[Tensor, "rows vocab"]:
    """Return x·Wᵀ + b, with an output for each entry of a vocabulary.

    A GPU multiplies fast where the rows of each matrix are a multiple of 16 bytes, which 30,522
    outputs in bf16 (BERT's) are not: an H200 took 3.0 ms of a step for 0.9 ms of operations. So a
    training step adds outputs with zero weights there, and cuts them off.
    """
    extra = -len(weight) % OUTPUT_MULTIPLE
    learns = x.is_cuda and torch.is_autocast_enabled("cuda") and torch.is_grad_enabled()
    if not (learns and extra):
        return F.linear(x, weight, bias)
    rounded = weight.to(torch.get_autocast_dtype("cuda"))  # half as much to copy
    filled = F.pad(rounded, (0, 0, 0, extra))
    return F.linear(x, filled, None if bias is None else F.pad(bias, (0, extra)))[:, :-extra]
