"""int8 layers against the same rounding in float64, and what is left alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from bothways.core.errors import ConfigError
from bothways.core.runtime.devices import has_int8
from bothways.core.runtime.tuning import TUNING
from bothways.model.kernels import int8
from bothways.model.kernels.int8 import Int8Linear, quantize_activations, quantize_weights

pytestmark = [
    pytest.mark.skipif(
        not has_int8(torch.device("cpu")), reason="this processor does not multiply int8"
    ),
    pytest.mark.usefixtures("either_way"),
]
SHAPES = st.tuples(st.integers(1, 40), st.integers(1, 70), st.integers(1, 80))


def drawn(seed: int, *shape: int, spread: float = 1.0) -> Tensor:
    """Numbers whose rows are of unlike size."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp(
        spread * torch.randn(shape[0], 1, generator=generator)
    )


def assert_rounded(codes: np.ndarray, scales: Tensor, x: Tensor) -> None:
    """By the definition in float64; a code may be off by one where the quotient is on the edge between two."""
    wide = x.detach().double().numpy()
    steps = np.abs(wide).max(1, keepdims=True) / 127
    exact = np.divide(wide, steps, out=np.zeros_like(wide), where=steps > 0)
    edge = np.abs(np.abs(exact - np.rint(exact)) - 0.5) < 1e-4
    assert (np.abs(codes - np.rint(exact)) <= edge).all()
    np.testing.assert_allclose(scales.reshape(-1, 1), steps, rtol=1e-6)


@given(SHAPES, st.integers(0, 2**31), st.floats(0, 6), st.booleans())
def test_a_layer_is_its_rounding_in_float64(shape, seed, spread, bias):
    rows, width, outputs = shape
    linear = nn.Linear(width, outputs, bias=bias)
    linear.weight.data = drawn(seed, outputs, width, spread=spread)
    x = drawn(seed + 1, rows, width, spread=spread)
    x[0] = 0
    codes, scales = quantize_activations(x)
    found = codes[:rows].numpy().astype(np.float64) - 128
    found[0] = 0  # the codes of a row of zeros mean nothing
    assert_rounded(found, scales, x)
    weights, their = (part.double().numpy() for part in quantize_weights(linear.weight.detach()))
    assert_rounded(weights, their, linear.weight)
    expected = (found @ weights.T) * scales.double().numpy() * their
    expected += 0 if linear.bias is None else linear.bias.detach().double().numpy()
    with torch.no_grad():
        result = Int8Linear(linear)(x).numpy()
    np.testing.assert_allclose(
        result, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max() + 1e-30
    )


def test_ends_stay_at_their_end():
    """No number rounds to a code beyond the byte, which would be the other end of it."""
    x = torch.rand(5000, 3, generator=torch.Generator().manual_seed(0)) * 2 - 1
    codes = quantize_activations(x)[0][:5000]
    largest = x.abs().argmax(1, keepdim=True)
    expected = torch.where(x.gather(1, largest) > 0, 255, 1)
    assert torch.equal(codes.gather(1, largest).long(), expected)


def test_many_rows_in_parts_are_what_they_are_alone(monkeypatch):
    x, layer = drawn(3, 50, 24), Int8Linear(nn.Linear(24, 10))
    with torch.no_grad():
        whole = layer(x)
        alone = torch.cat([layer(row[None]) for row in x])
        monkeypatch.setattr(int8, "TUNING", replace(TUNING, int8_chunk_elements=24 * 7))
        assert torch.equal(layer(x), whole)
    assert torch.equal(alone, whole)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_does_not_pass_unseen(value):
    x = drawn(5, 4, 20)
    x[2, 7] = value
    with torch.no_grad():
        finite = Int8Linear(nn.Linear(20, 6))(x).isfinite()
    assert finite[[0, 1, 3]].all()
    assert not finite[2].any()


def test_no_rows_give_no_rows_and_bf16_is_read():
    layer = Int8Linear(nn.Linear(8, 3))
    x = drawn(1, 4, 8).bfloat16()
    with torch.no_grad():
        assert layer(torch.zeros(0, 8)).shape == (0, 3)
        assert torch.equal(layer(x), layer(x.float()))


def test_weights_of_zeros_give_the_bias():
    linear = nn.Linear(8, 3)
    linear.weight.data[1] = 0
    with torch.no_grad():
        result = Int8Linear(linear)(drawn(1, 4, 8))
    assert torch.equal(result[:, 1], linear.bias.detach()[1].expand(4))


def test_gradients_are_refused():
    layer, x = Int8Linear(nn.Linear(8, 3)), torch.ones(2, 8, requires_grad=True)
    with pytest.raises(ConfigError, match="no gradients"):
        layer(x)
    with torch.no_grad():
        assert layer(x).shape == (2, 3)
