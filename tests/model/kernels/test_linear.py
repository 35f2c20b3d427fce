"""Compiled linear layers against products in double precision, and against PyTorch's operators."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.nn import functional as F

from bothways.model.kernels.int8 import OneDNNInt8, quantize_weights
from bothways.model.kernels.linear import CompiledLinear
from kernel_cases import NEEDS_AVX512, NEEDS_BF16, NEEDS_VNNI, SAME_PROCESSOR, examples

LAYERS = (st.integers(1, 200), st.booleans(), st.integers(0, 2**31))
"""Outputs, whether there is a bias, and a seed."""


def drawn_layer(
    rows: int, width: int, outputs: int, bias: bool, seed: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Weights, what they multiply, and a bias or none."""
    generator = torch.Generator().manual_seed(seed)
    weight, x = (torch.randn(n, width, generator=generator) for n in (outputs, rows))
    return weight, x, torch.randn(outputs, generator=generator) if bias else None


@NEEDS_VNNI
@pytest.mark.usefixtures("processor")
@settings(deadline=None, max_examples=examples(60), suppress_health_check=SAME_PROCESSOR)
@given(st.integers(1, 230), st.integers(1, 200), *LAYERS)
def test_int8_is_the_same_rounding_as_torchs_operators(rows, width, outputs, bias, seed):
    weight, x, added = drawn_layer(rows, width, outputs, bias, seed)
    parts = (*quantize_weights(weight), added)
    found, wanted = CompiledLinear(*parts)(x), OneDNNInt8(*parts)(x)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6 * float(wanted.abs().max()))


@NEEDS_AVX512
@pytest.mark.usefixtures("processor")
@settings(deadline=None, max_examples=examples(60), suppress_health_check=SAME_PROCESSOR)
@given(st.integers(0, 230), st.integers(1, 900), *LAYERS)
def test_fp32_is_the_product(rows, width, outputs, bias, seed):
    weight, x, added = drawn_layer(rows, width, outputs, bias, seed)
    wanted = F.linear(x.double(), weight.double(), None if added is None else added.double())
    bound = 2**-23 * (1 + width) * 12  # of as many sums, each of products up to 4 × 4
    found = CompiledLinear(weight, None, added)(x).double()
    torch.testing.assert_close(found, wanted, rtol=0, atol=bound)


@NEEDS_AVX512
@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e15])
def test_fp32_is_as_exact_as_a_sum_of_products(scale):
    """By AMX, too, where numbers are sums of three: without one of the parts, or of the products
    of parts, the error is a hundred times as large.

    PyTorch's error depends on the processor: its library may add up in blocks."""
    torch.manual_seed(0)
    x = torch.randn(200, 700) * torch.randn(200, 1).exp() * scale
    weight = torch.randn(90, 700) / scale
    in_order = torch.zeros(200, 90)
    for feature in range(700):
        in_order += x[:, feature, None] * weight[:, feature]
    results = (CompiledLinear(weight, None, None)(x), F.linear(x, weight), in_order)
    wanted = F.linear(x.double(), weight.double())
    error, torchs, plain = ((result - wanted).abs().mean() for result in results)
    assert error <= 1.5 * max(torchs, plain)


@NEEDS_AVX512
@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("rows", [1, 64])
def test_in_fp32_a_number_that_is_not_finite_spoils_its_row_alone(rows, value):
    x, weight = torch.randn(rows, 70), torch.randn(40, 70)
    kept = CompiledLinear(weight, None, None)(x)
    x[0, 33] = value
    found = CompiledLinear(weight, None, None)(x)
    assert not found[0].isfinite().any()
    assert torch.equal(found[1:], kept[1:])


@NEEDS_BF16
@pytest.mark.usefixtures("processor")
@settings(deadline=None, max_examples=examples(60), suppress_health_check=SAME_PROCESSOR)
@given(st.integers(0, 230), st.integers(1, 200), *LAYERS)
def test_bf16_is_the_product_of_rounded_numbers(rows, width, outputs, bias, seed):
    weight, x, added = drawn_layer(rows, width, outputs, bias, seed)
    weight = weight.bfloat16()
    exact = None if added is None else added.double()
    wanted = F.linear(x.bfloat16().double(), weight.double(), exact)
    bound = 2**-22 * (1 + width) * 12  # sums by twos are rounded once more
    found = CompiledLinear(weight, None, added)(x).double()
    torch.testing.assert_close(found, wanted, rtol=0, atol=bound)
    short = CompiledLinear(weight, None, added, torch.bfloat16)(x.bfloat16())
    assert short.dtype == torch.bfloat16
    torch.testing.assert_close(short.double(), wanted, rtol=2**-8, atol=bound)
