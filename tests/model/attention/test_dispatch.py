"""Attention in rectangles against softmax(QKᵀ/√d)V of each sequence alone, and the choice of a kernel."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from attention_formulas import HEADS, SIZE, assert_same_with_gradients, formula
from bothways.core.batch import EQUAL, LOOSE, Layout, RectanglePolicy
from bothways.model.attention import dispatch as kernels
from bothways.model.attention.dispatch import AttentionCall, attend, choose, padded_kernel
from bothways.model.attention.mask import AttentionPart, AttentionView, RotaryTables
from bothways.model.attention.patterns import Blocks, Causal, Full, Window
from bothways.model.kernels import library
from bothways.model.kernels.library import Feature


@pytest.mark.parametrize("kernel", ["fused", "products", "in_place"])
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    seed=st.integers(0, 99),
    cut=st.sampled_from([LOOSE, EQUAL, RectanglePolicy(small=0)]),
    pattern=st.one_of(st.just(Full()), st.just(Causal()), st.builds(Window, st.integers(0, 12))),
)
def test_output_and_gradient_equal_the_formula(kernel, lengths, seed, cut, pattern):
    torch.manual_seed(seed)
    qkv = torch.randn(sum(lengths), 3, HEADS, SIZE, dtype=torch.float64) * 2
    mine, reference = qkv.float().requires_grad_(), qkv.clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "padded_kernel", lambda _: kernel)
        found = attend(mine, AttentionView(Layout.of(lengths, cut), pattern))
    wanted = formula(reference, lengths, pattern)
    assert_same_with_gradients(found, wanted, [mine], [reference], near=2.5e-6)


def test_half_precision_attends_within_its_rounding():
    torch.manual_seed(0)
    qkv = torch.randn(19, 3, HEADS, SIZE)
    found = attend(qkv.bfloat16(), AttentionView(Layout.of([9, 10])), 0.0)
    torch.testing.assert_close(found.double(), formula(qkv, [9, 10]), rtol=0, atol=0.05)


CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FP32, BF16 = torch.float32, torch.bfloat16
AVX512, AMX = Feature(7), Feature(15)
GLOBAL = Window(64, global_attention=True)


def call(device: torch.device, dtype: torch.dtype, length: int, **more: Any) -> AttentionCall:
    return AttentionCall(device, dtype, more.pop("head_size", 64), length, **more)


@pytest.fixture
def features(monkeypatch) -> Callable[[Feature], None]:
    """A machine whose compiled kernels use these features, with a GPU that has all kernels."""

    def use(these: Feature) -> None:
        monkeypatch.setattr(library, "kernel_features", lambda: these)
        monkeypatch.setattr(kernels, "has_varlen", lambda device: device.type == "cuda")
        monkeypatch.setattr(kernels, "has_flex", lambda device: device.type == "cuda")

    return use


@pytest.mark.parametrize(
    ("row", "query", "kernel"),
    [
        (1, call(CUDA, BF16, 9000, learning=True), "packed"),
        (1, call(CUDA, torch.float16, 99, pattern=Window(8), head_size=256), "packed"),
        (1, call(CUDA, BF16, 99, pattern=Causal(), head_size=8), "packed"),
        (1, call(CUDA, BF16, 99, head_size=12), "fused"),
        (1, call(CUDA, BF16, 99, head_size=264), "fused"),
        (1, call(CUDA, BF16, 99, dropout=0.1), "packed"),
        (1, call(CUDA, FP32, 99), "fused"),
        (1, call(CUDA, BF16, 99, pattern=Blocks(64)), "fused"),
        (2, call(CUDA, BF16, 99, pattern=GLOBAL, global_tokens=True), "flexible"),
        (2, call(CUDA, FP32, 99, pattern=GLOBAL, global_tokens=True), "flexible"),
        (2, call(CUDA, FP32, 99, pattern=GLOBAL, global_tokens=True, head_size=24), "fused"),
        (2, call(CUDA, FP32, 99, pattern=GLOBAL, global_tokens=True, dropout=0.1), "fused"),
        (3, call(CPU, FP32, 512), "compiled"),
        (3, call(CPU, FP32, 512, learning=True), "compiled"),
        (3, call(CPU, FP32, 65, pattern=Window(64)), "compiled"),
        (3, call(CPU, FP32, 513), "fused"),
        (3, call(CPU, FP32, 40, head_size=12), "in_place"),
        (3, call(CPU, FP32, 40, pattern=GLOBAL, global_tokens=True), "in_place"),
        (4, call(CPU, FP32, 4096, dropout=0.1, learning=True), "compiled"),
        (5, call(CPU, BF16, 4096, learning=True), "compiled"),
        (5, call(CPU, BF16, 4097), "fused"),
        (6, call(CPU, BF16, 9000, dropout=0.1), "compiled"),
        (8, call(CPU, FP32, 256, learning=True, head_size=12), "gathered"),
        (8, call(CPU, FP32, 257, learning=True, head_size=12), "fused"),
        (8, call(CPU, FP32, 40, learning=True, pattern=Causal()), "gathered"),
        (8, call(CPU, FP32, 90, learning=True, pattern=GLOBAL, global_tokens=True), "products"),
        (9, call(CPU, FP32, 128 + 257, pattern=Window(64)), "blocked"),
        (9, call(CPU, FP32, 128 + 256, pattern=Window(64)), "fused"),
        (9, call(CUDA, FP32, 512 + 1025, pattern=Window(256)), "blocked"),
        (9, call(CUDA, FP32, 512 + 1024, pattern=Window(256)), "fused"),
        (10, call(CUDA, BF16, 705, pattern=Blocks(64, 3)), "blocked"),
        (10, call(CPU, FP32, 704, pattern=Blocks(64, 3), head_size=12), "fused"),
        (11, call(CPU, FP32, 40, rectangle=True), "in_place"),
        (11, call(CPU, FP32, 40, rectangle=True, learning=True), "products"),
    ],
)  # fmt: skip
def test_the_table(row, query, kernel, features):
    features(AMX)
    assert choose(query) == kernel, f"row {row}"


@pytest.mark.parametrize(
    ("query", "kernel"),
    [
        (call(CPU, BF16, 512), "compiled"),
        (call(CPU, BF16, 513), "fused"),
        (call(CPU, BF16, 9, learning=True), "gathered"),
        (call(CPU, BF16, 9, dropout=0.1), "products"),
    ],
)
def test_the_table_without_amx(query, kernel, features):
    """Row 7."""
    features(AVX512)
    assert choose(query) == kernel
    features(Feature(0))
    assert choose(call(CPU, FP32, 40)) == "in_place"
    assert choose(call(CPU, FP32, 40, learning=True)) == "gathered"


@pytest.mark.parametrize(
    ("device", "dtype", "keys", "rate", "learning", "kernel"),
    [
        (CUDA, BF16, 128, 0.0, True, "fused"),
        (CUDA, FP32, 128, 0.1, True, "fused"),
        (CUDA, FP32, 16, 0.0, False, "fused"),
        (CPU, FP32, 4096, 0.1, True, "products"),
        (CPU, BF16, 512, 0.0, True, "products"),
        (CPU, BF16, 513, 0.0, True, "fused"),
        (CPU, BF16, 512, 0.0, False, "products"),
        (CPU, FP32, 256, 0.0, True, "products"),
        (CPU, FP32, 257, 0.0, True, "fused"),
        (CPU, torch.float64, 257, 0.0, True, "fused"),
        (CPU, FP32, 48, 0.0, False, "in_place"),
        (CPU, FP32, 49, 0.0, False, "fused"),
    ],
)
def test_the_table_of_padded_kernels(device, dtype, keys, rate, learning, kernel):
    assert padded_kernel(call(device, dtype, keys, dropout=rate, learning=learning)) == kernel


def test_an_empty_set_of_global_tokens_is_none():
    layout, none = Layout.of([40, 3]), torch.zeros(43, dtype=torch.bool)
    assert not AttentionView(layout, GLOBAL, global_attention_mask=none).has_global_tokens
    assert AttentionView(layout, GLOBAL, global_attention_mask=~none).has_global_tokens
    assert not AttentionView(layout, Window(64), global_attention_mask=~none).has_global_tokens


def test_full_attention_needs_no_mask_where_nothing_is_padded():
    equal, mixed = Layout.of([5, 5]).rectangles[0], Layout.of([5, 4]).rectangles[0]
    assert AttentionPart(equal, Full(), CPU).mask is None
    assert AttentionPart(equal, Window(4), CPU).mask is None  # as far as the sequence reaches
    assert AttentionPart(equal, Window(3), CPU).mask.shape == (1, 1, 5, 5)
    assert AttentionPart(mixed, Full(), CPU).mask.shape == (2, 1, 1, 5)
    assert AttentionPart(mixed, Causal(), CPU).mask.shape == (2, 1, 5, 5)


@pytest.mark.parametrize("base", [10.0, 10_000.0])
def test_turned_queries_and_keys_are_complex_numbers_turned(base):
    """Features i and i + d/2 as a complex number times e^(i·p·base^(−2i/d)); scores then depend on the distance alone."""
    torch.manual_seed(0)
    layout = Layout.of([7, 3])
    qkv = torch.randn(10, 3, HEADS, SIZE)
    found = RotaryTables.of(layout.positions, SIZE, base)(qkv)
    both = torch.complex(*qkv[:, :2].double().chunk(2, -1))
    rates = base ** (-torch.arange(0, SIZE, 2).double() / SIZE)
    wanted = both * torch.exp(1j * layout.positions[:, None].double() * rates)[:, None, None, :]
    torch.testing.assert_close(
        found[:, :2].double(), torch.cat([wanted.real, wanted.imag], -1), rtol=0, atol=1e-5
    )
    assert torch.equal(found[:, 2], qkv[:, 2])
    same = torch.randn(1, 3, HEADS, SIZE).expand(7, 3, HEADS, SIZE)
    q, k, _ = RotaryTables.of(torch.arange(7), SIZE, base)(same).unbind(1)
    scores = torch.einsum("qhd,khd->hqk", q, k)
    torch.testing.assert_close(scores[:, 1:, 1:], scores[:, :-1, :-1], rtol=0, atol=1e-5)
