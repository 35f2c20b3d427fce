"""What tests of compiled kernels share: what they need of the processor, and random inputs."""

import contextlib
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, strategies as st
from torch import Tensor

from bothways.model.kernels import library
from bothways.model.kernels.library import Feature


def needs(feature: Feature) -> pytest.MarkDecorator:
    """Skip a test on processors without a feature; `BOTHWAYS_EXPECT_KERNELS` guards the library itself."""
    reason = f"no compiled kernels for {feature.name} here"
    return pytest.mark.skipif(feature not in library.available(), reason=reason)


NEEDS_AVX512, NEEDS_VNNI = needs(Feature.AVX512), needs(Feature.VNNI)
NEEDS_BF16, NEEDS_AMX = needs(Feature.BF16), needs(Feature.AMX)
PRECISIONS = [
    pytest.param("fp32", marks=NEEDS_AVX512),
    pytest.param("bf16", marks=NEEDS_BF16),
    pytest.param("int8", marks=NEEDS_VNNI),
]


def examples(count: int) -> int:
    """Return a number of examples for hypothesis: fewer under sanitizers, where each takes longer."""
    return -(-count // int(os.environ.get("BOTHWAYS_EXAMPLES_DIVISOR", "2")))


@contextlib.contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Compute on another number of threads meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


SAME_PROCESSOR = [HealthCheck.function_scoped_fixture]
"""The processor is the same for all examples of a test."""
LENGTHS = st.lists(st.integers(1, 40) | st.integers(41, 150), min_size=1, max_size=6)
SHAPES = {
    "heads": st.integers(1, 3),
    "size": st.sampled_from([16, 32, 48, 64, 80]),
    "seed": st.integers(0, 2**31),
}


def draw_qkv(lengths: list[int], heads: int, size: int, seed: int, spread: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(lengths), 3, heads, size, generator=generator) * spread
