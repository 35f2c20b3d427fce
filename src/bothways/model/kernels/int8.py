"""Linear layers in int8, for inference on a CPU.

Weights and activations are quantized symmetrically to one byte: weights once, x ≈ s·q with a scale
s for each output; activations at each call, with a scale for each token. Products are added up in
int32, which is exact, and scaled back to fp32. So only the rounding of weights and activations is
lost, and the result for a text does not depend on the other texts of a batch.

One scale for all tokens of a batch, as PyTorch's dynamic layers have it, takes 0.85 of the time and
loses five times as much: a few tokens, such as [SEP], have one feature ten times as large as any
other.

| processor | kernels for int8 | product |
|---|---|---|
| x86 with AVX512-VNNI | yes | `CompiledLinear` |
| any other that `has_int8` | no | `OneDNNInt8` |

Source: Zafrir et al., Q8BERT (2019), with measured scales instead of trained ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int8, UInt8
from torch import Tensor, nn

from bothways.core.runtime.tuning import TUNING
from bothways.model.kernels.library import multiplies
from bothways.model.kernels.linear import CompiledLinear, InferenceLayer, as_fp32, refuse_gradients

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
    """A product in int8 by PyTorch's operators, which quantize and scale in passes of their own.

    Args:
        codes: of the weights.
        scales: of the weights.
        bias: of the outputs, or None.
    """

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
