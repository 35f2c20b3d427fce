"""The dense layers of an encoder's blocks in int8, for predictions on a CPU that multiplies it.

Both are rounded symmetrically to one byte: weights once, x ≈ s·q with a scale s for each output; activations at each call, with
a scale for each token. Products are added up in int32, which is exact, and scaled back to fp32. So what is lost is the rounding
of weights and activations, and nothing else; and what a text becomes does not depend on what is predicted beside it.

A scale for all tokens of a batch, as torch's own dynamic layers have it, takes 0.85 of the time, and loses five times as much:
a few tokens, such as [SEP], have one feature ten times as large as any other.

Source: Zafrir et al., Q8BERT (2019), with scales that are measured at each call in the place of its training.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int8, UInt8
from torch import Tensor, nn

from bothways.kernels.library import multiplies
from bothways.kernels.linear import Dense, refuse_gradients
from bothways.kernels.packed_linear import Prepared

ROWS = 16
"""Batches are filled up to a multiple of this: oneDNN plans each number of rows anew, which takes as long as a product."""
CACHED = 2**17
"""Numbers that are scaled and then rounded together, so that they are still in the cache."""
ZERO = 128
"""The code of 0: VNNI multiplies unsigned activations by signed weights."""
ROUNDING = 1.5 * 2.0**23
"""The fp32 numbers around it are whole: adding it rounds to the nearest, half to even, into the lowest bits of the sum."""


class Codes(NamedTuple):
    """Activations x ≈ scales · (codes − 128).

    Attributes:
        codes: of the rows, and of some more that mean nothing, up to a multiple of `ROWS`.
        scales: one for each row.
    """

    codes: UInt8[Tensor, "filled width"]
    scales: Float[Tensor, "rows 1"]


def quantise_weights(
    weight: Float[Tensor, "outputs width"],
) -> tuple[Int8[Tensor, "outputs width"], Float[Tensor, " outputs"]]:
    """q and s of each output, with weight ≈ s·q: the largest of a row becomes 127 or −127."""
    scales = weight.abs().amax(1) / 127
    codes = (weight / scales[:, None]).round()
    return codes.nan_to_num(0.0, 0.0, 0.0).to(
        torch.int8
    ), scales  # no number where all of a row is 0


def quantise_activations(x: Float[Tensor, "rows width"]) -> Codes:
    """The largest of a row becomes 128 ± 127. The scale of zeros is 0; that of a row with NaN or infinity is not finite."""
    codes = x.new_empty(-(-len(x) // ROWS) * ROWS, x.shape[1], dtype=torch.uint8)
    rows = max(1, CACHED // x.shape[1])
    if len(x) <= rows:  # for a short text the many calls would take longer than the work
        return Codes(codes, _quantise(x, codes[: len(x)]))
    parts = zip(torch.split(x, rows), torch.split(codes[: len(x)], rows), strict=True)
    return Codes(codes, torch.cat([_quantise(part, place) for part, place in parts]))


def _quantise(
    x: Float[Tensor, "rows width"], place: UInt8[Tensor, "rows width"]
) -> Float[Tensor, "rows 1"]:
    """The scales; the codes go to `place`."""
    largest = x.abs().amax(1, keepdim=True)
    # The lowest byte of the sum is the code: round, shift and cast in one pass where they would take three.
    place.copy_((x * (127 / largest)).add_(ROUNDING + ZERO).view(torch.int32))
    return largest.div_(127)


class Int8Linear(Prepared):
    """A dense layer whose products are in int8; for predictions alone.

    | processor | kernels compiled | product |
    |---|---|---|
    | x86 with AVX512-VNNI | yes | `panels.Dense` |
    | any other that `has_int8` | | `OneDNN` |

    Args:
        linear: what it stands for; finite weights.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        codes, scales = quantise_weights(linear.weight.detach().float())
        bias = None if linear.bias is None else linear.bias.detach().float().contiguous()
        self.product = (Dense if multiplies("int8") else OneDNN)(codes, scales, bias)

    def forward(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows outputs"]:
        """In fp32. Where a row holds a number that is not finite, so do all of its outputs.

        Raises:
            ConfigError: gradients are asked for.
        """
        refuse_gradients(self, x)
        return self.product(x)


class OneDNN:
    """A product by torch's operators; the rounding before it and the scaling after it are further passes.

    Args:
        codes, scales: of the weights.
        bias: of the outputs; none without one.
    """

    def __init__(
        self,
        codes: Int8[Tensor, "outputs width"],
        scales: Float[Tensor, " outputs"],
        bias: Float[Tensor, " outputs"] | None,
    ) -> None:
        self.packed = torch.ops.onednn.qlinear_prepack(codes, None)
        self.scales, self.zeros, self.bias = (
            scales,
            torch.zeros(len(scales), dtype=torch.int32),
            bias,
        )

    def __call__(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows outputs"]:
        """Rounds the rows, multiplies, scales and adds the bias; in fp32."""
        if not len(x):
            return x.new_empty(0, len(self.scales), dtype=torch.float32)
        codes, scales = quantise_activations(x.float())
        products: Tensor = torch.ops.onednn.qlinear_pointwise(
            codes,
            1.0,
            ZERO,
            self.packed,
            self.scales,
            self.zeros,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        result = products[: len(x)]
        return (
            result.mul_(scales)
            if self.bias is None
            else torch.addcmul(self.bias, result, scales, out=result)
        )
