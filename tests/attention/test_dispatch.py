"""Attention in rectangles against softmax(QKᵀ/√d)V of each sequence alone, in double precision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bothways.attention import dispatch as kernels
from bothways.attention.dispatch import Kernel, attend, choose
from bothways.attention.mask import EVERYTHING, AttentionView, RotaryTables, attention_mask
from bothways.attention.patterns import Causal, Full, Pattern, Window
from bothways.core.layout import EQUAL, LOOSE, Layout, RectanglePolicy

HEADS, SIZE = 2, 4


def sees(pattern: Pattern, query: int, key: int) -> bool:
    match pattern:
        case Full():
            return True
        case Window(radius):
            return abs(query - key) <= radius
        case Causal():
            return key <= query


def formula(qkv: Tensor, lengths: list[int], pattern: Pattern = EVERYTHING) -> Tensor:
    parts = []
    for part in qkv.double().split(lengths):
        q, k, v = (part[:, at].transpose(0, 1) for at in range(3))
        scores = q @ k.transpose(1, 2) / SIZE**0.5
        hidden = [
            [not sees(pattern, query, key) for key in range(len(part))]
            for query in range(len(part))
        ]
        scores = scores.masked_fill(torch.tensor(hidden), float("-inf"))
        exponents = torch.exp(scores - scores.amax(-1, keepdim=True))
        parts.append((exponents / exponents.sum(-1, keepdim=True) @ v).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("kernel", ["fused", "written_out", "in_place"])
@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    seed=st.integers(0, 99),
    cut=st.sampled_from([LOOSE, EQUAL, RectanglePolicy(small=0)]),
    pattern=st.one_of(st.just(Full()), st.just(Causal()), st.builds(Window, st.integers(0, 12))),
)
def test_output_and_gradient_equal_the_formula(
    kernel: Kernel, lengths: list[int], seed: int, cut: RectanglePolicy, pattern: Pattern
) -> None:
    torch.manual_seed(seed)
    qkv = torch.randn(sum(lengths), 3, HEADS, SIZE, dtype=torch.float64) * 2
    weights = torch.randn(sum(lengths), HEADS, SIZE, dtype=torch.float64)
    mine, reference = qkv.float().requires_grad_(), qkv.clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "choose", lambda *_: kernel)
        found, wanted = (
            attend(mine, AttentionView.of(Layout.of(lengths, cut), pattern)),
            formula(reference, lengths, pattern),
        )
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=3e-6)
    (found * weights).sum().backward()
    (wanted * weights).sum().backward()
    torch.testing.assert_close(mine.grad.double(), reference.grad, rtol=1e-5, atol=1e-5)


def test_dropout_acts_on_probabilities() -> None:
    """With p the probabilities and r the rate, the mean is p·v and the variance Σ p²v² · r / (1 − r)."""
    torch.manual_seed(0)
    copies, lengths, rate = 20_000, [5, 4], 0.3
    one = torch.randn(sum(lengths), 3, HEADS, SIZE)
    draws = (
        attend(one.repeat(copies, 1, 1, 1), AttentionView.of(Layout.of(lengths * copies)), rate)
        .double()
        .view(copies, *one[:, 0].shape)
    )

    expected = formula(one, lengths)
    wanted = []
    for part in one.double().split(lengths):
        q, k, v = (part[:, at].transpose(0, 1) for at in range(3))
        p = (q @ k.transpose(1, 2) / SIZE**0.5).softmax(-1)
        wanted.append((p**2 @ v**2).transpose(0, 1) * rate / (1 - rate))
    variance = torch.cat(wanted)
    z = (draws.mean(0) - expected) / (variance / copies).sqrt()
    assert float(z.abs().max()) < 5
    deviation = (draws - expected) ** 2
    z = (deviation.mean(0) - variance) / (deviation.var(0) / copies).sqrt()
    assert float(z.abs().max()) < 5


def test_half_precision_attends_within_its_rounding() -> None:
    torch.manual_seed(0)
    qkv = torch.randn(19, 3, HEADS, SIZE)
    found = attend(qkv.bfloat16(), AttentionView.of(Layout.of([9, 10])), 0.0)
    torch.testing.assert_close(found.double(), formula(qkv, [9, 10]), rtol=0, atol=0.05)


@pytest.mark.parametrize(
    ("device", "dtype", "longest", "rate", "kernel"),
    [
        ("cuda", torch.bfloat16, 128, 0.0, "fused"),
        ("cuda", torch.float32, 128, 0.1, "fused"),
        ("cpu", torch.float32, 4096, 0.1, "written_out"),
        ("cpu", torch.bfloat16, 512, 0.0, "written_out"),
        ("cpu", torch.bfloat16, 513, 0.0, "fused"),
        ("cpu", torch.float32, 256, 0.0, "written_out"),
        ("cpu", torch.float32, 257, 0.0, "fused"),
        ("cpu", torch.float64, 257, 0.0, "fused"),
    ],
)
def test_the_table_of_kernels(
    device: str, dtype: torch.dtype, longest: int, rate: float, kernel: Kernel
) -> None:
    assert choose(torch.device(device), dtype, longest, rate) == kernel


@pytest.mark.parametrize(
    ("device", "dtype", "longest", "kernel"),
    [
        ("cuda", torch.float32, 16, "fused"),
        ("cpu", torch.float32, 48, "in_place"),
        ("cpu", torch.float32, 49, "fused"),
        ("cpu", torch.bfloat16, 512, "written_out"),
    ],
)
def test_the_table_of_kernels_where_nothing_is_learned(
    device: str, dtype: torch.dtype, longest: int, kernel: Kernel
) -> None:
    assert choose(torch.device(device), dtype, longest, 0.0, learning=False) == kernel


def test_full_attention_needs_no_mask_where_nothing_is_padded() -> None:
    equal, mixed = Layout.of([5, 5]).rectangles[0], Layout.of([5, 4]).rectangles[0]
    cpu = torch.device("cpu")
    assert attention_mask(Full(), equal, cpu) is None
    assert attention_mask(Window(4), equal, cpu) is None  # as far as the sequence reaches
    assert attention_mask(Window(3), equal, cpu).shape == (1, 1, 5, 5)
    assert attention_mask(Full(), mixed, cpu).shape == (2, 1, 1, 5)
    assert attention_mask(Causal(), mixed, cpu).shape == (2, 1, 5, 5)


@pytest.mark.parametrize("base", [10.0, 10_000.0])
def test_turned_queries_and_keys_are_complex_numbers_turned(base: float) -> None:
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
