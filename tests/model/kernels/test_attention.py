"""Compiled attention against softmax(QKᵀ/√d)V in double precision, with its gradients and dropout."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from attention_formulas import assert_same_with_gradients, formula
from bothways.core.batch import Layout
from bothways.model.kernels.attention import packed_attention
from bothways.model.kernels.library import Feature, kernel_features
from kernel_cases import (
    LENGTHS,
    NEEDS_AMX,
    NEEDS_AVX512,
    SAME_PROCESSOR,
    SHAPES,
    draw_qkv,
    examples,
    on_threads,
)

LEARNED = [torch.float32, pytest.param(torch.bfloat16, marks=NEEDS_AMX)]


@NEEDS_AVX512
@settings(deadline=None, max_examples=examples(60))
@given(lengths=LENGTHS, spread=st.sampled_from([0.1, 1.0, 4.0]), **SHAPES)
def test_attention_is_the_formula(lengths, heads, size, seed, spread):
    qkv = draw_qkv(lengths, heads, size, seed, spread)
    found = packed_attention(qkv, Layout.of(lengths))
    # A score is as exact as the sum of what its products are at most; a share is off by as much, relatively.
    q, k, v = qkv.abs().amax(-1).unbind(1)
    bound = 2**-23 * (1 + float(q.max() * k.max()) * size**0.5) * float(v.max())
    torch.testing.assert_close(found.double(), formula(qkv, lengths), rtol=0, atol=bound)


@NEEDS_AVX512
@pytest.mark.usefixtures("processor")
@settings(deadline=None, max_examples=examples(60), suppress_health_check=SAME_PROCESSOR)
@given(lengths=LENGTHS, spread=st.sampled_from([0.1, 1.0, 4.0]), **SHAPES)
def test_attention_in_bf16_loses_only_the_rounding_of_what_it_gives(
    lengths, heads, size, seed, spread
):
    """And with AMX that of the probabilities."""
    qkv = draw_qkv(lengths, heads, size, seed, spread).bfloat16()
    found, wanted = packed_attention(qkv, Layout.of(lengths)), formula(qkv, lengths)
    assert found.dtype == torch.bfloat16
    # Half a unit in the last of eight places; of probabilities as much, of which the values are an average.
    values = formula(torch.cat([qkv[:, :2], qkv[:, 2:].abs()], 1), lengths)
    lost = 2**-8 * values if Feature.AMX in kernel_features() else torch.zeros(())
    q, k, v = qkv.double().abs().amax(-1).unbind(1)
    of_scores = 2**-23 * (1 + float(q.max() * k.max()) * size**0.5) * float(v.max())
    bound = 2**-8 * wanted.abs() + 1.01 * lost + of_scores
    assert bool(((found.double() - wanted).abs() <= bound).all())
    exact = (found == wanted.float().bfloat16()).double().mean()
    assert exact > (0.3 if Feature.AMX in kernel_features() else 0.9)


@NEEDS_AVX512
@pytest.mark.usefixtures("processor")
def test_what_is_given_in_bf16_is_rounded_as_torch_does():
    """One token attends to itself alone, so that a value goes through as it is; but for the smallest, which are 0 to AMX."""
    numbers = [0.0, 1.0, 3.3895e38, -3.3895e38, 1e-40, float("inf"), float("nan"), -2e-38]
    values = torch.tensor(numbers).repeat(2).bfloat16()
    qkv = torch.zeros(1, 3, 1, 16, dtype=torch.bfloat16)
    qkv[0, 2, 0] = values
    found, wanted = packed_attention(qkv, Layout.of([1]))[0, 0], values.clone()
    if Feature.AMX in kernel_features():
        wanted[wanted.abs() < 1.2e-38] = 0.0
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@NEEDS_AVX512
def test_the_exponential_has_six_places_down_to_nothing():
    """Two keys whose scores lie x apart share e^x / (1 + e^x) of the value."""
    for x in [0.0, -1e-6, -0.3466, -1.0, -20.0, -80.0, -86.9, -200.0]:
        qkv = torch.zeros(2, 3, 1, 16)
        qkv[:, 0, 0, 0], qkv[1, 1, 0, 0], qkv[1, 2, 0] = 4.0, x, 1.0
        wanted = formula(qkv, [2])
        torch.testing.assert_close(
            packed_attention(qkv, Layout.of([2])).double(), wanted, rtol=2e-6, atol=1.7e-38
        )


@NEEDS_AVX512
@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_does_not_pass_unseen(which, value, dtype):
    qkv = draw_qkv([20, 20], 1, 16, 0).to(dtype)
    qkv[25, which, 0, 3] = value
    found, wanted = packed_attention(qkv, Layout.of([20, 20])), formula(qkv, [20, 20])
    assert torch.equal(found.isfinite(), wanted.isfinite())
    assert found[:20].isfinite().all()
    assert not found[20:].isfinite().all()


@NEEDS_AVX512
@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_is_what_it_is_alone_on_any_number_of_threads(dtype):
    lengths = [1, 33, 64, 7, 100]
    qkv = draw_qkv(lengths, 2, 32, 0).to(dtype)
    whole = packed_attention(qkv, Layout.of(lengths))
    alone = [packed_attention(part, Layout.of([len(part)])) for part in qkv.split(lengths)]
    assert torch.equal(torch.cat(alone), whole)
    with on_threads(3):
        assert torch.equal(packed_attention(qkv, Layout.of(lengths)), whole)
    assert packed_attention(qkv[:0], Layout.of([])).shape == (0, 2, 32)
    apart = qkv.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(packed_attention(apart, Layout.of(lengths)), whole)


def factors_of(qkv: Tensor, lengths: list[int], rate: float, seed: int) -> Tensor:
    """By what each probability was multiplied `(tokens, heads, longest)`: with one-hot values it is what comes out."""
    layout, size = Layout.of(lengths), qkv.shape[-1]
    found = torch.zeros(len(qkv), qkv.shape[2], -(-max(lengths) // size) * size)
    for start in range(0, max(lengths), size):
        hot = qkv.clone()
        hot[:, 2] = (layout.positions[:, None] == start + torch.arange(size)).float()[:, None]
        torch.manual_seed(seed)
        dropped = packed_attention(hot, layout, rate)
        whole = packed_attention(hot, layout)
        found[:, :, start : start + size] = torch.where(whole > 0, dropped / whole, 0.0)
    return found


@NEEDS_AVX512
@settings(deadline=None, max_examples=examples(40))
@given(lengths=LENGTHS, rate=st.sampled_from([0.0, 0.1, 0.5]), **SHAPES)
def test_learning_is_the_formula_and_so_is_its_gradient(lengths, heads, size, seed, rate):
    qkv = draw_qkv(lengths, heads, size, seed)
    scale = 1 / (1 - round(rate * 2**16) / 2**16)
    factors = factors_of(qkv, lengths, rate, seed)
    assert ((factors == 0) | ((factors - scale).abs() < 1e-4)).all()
    mine, reference = qkv.clone().requires_grad_(), qkv.double().requires_grad_()
    torch.manual_seed(seed)
    found = packed_attention(mine, Layout.of(lengths), rate)
    kept, parts = (factors > 0).double() * scale, []
    for part, mask in zip(reference.split(lengths), kept.split(lengths), strict=True):
        q, k, v = part.permute(1, 2, 0, 3)
        shares = (q @ k.mT / size**0.5).softmax(-1) * mask[:, :, : len(part)].transpose(0, 1)
        parts.append((shares @ v).transpose(0, 1))
    wanted = torch.cat(parts)
    assert_same_with_gradients(found, wanted, [mine], [reference], near=5e-6)


@NEEDS_AMX
@settings(deadline=None, max_examples=examples(60))
@given(lengths=LENGTHS, rate=st.sampled_from([0.0, 0.1, 0.5]), **SHAPES)
def test_learning_in_bf16_loses_only_rounding(lengths, heads, size, seed, rate):
    """The same draws as in fp32; shares, their gradients and what is given lose half a unit in the last of eight places."""
    qkv = draw_qkv(lengths, heads, size, seed).bfloat16()
    generator = torch.Generator().manual_seed(seed + 1)
    weights = torch.randn(len(qkv), heads, size, generator=generator).bfloat16()

    def learned(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        torch.manual_seed(seed)
        found = packed_attention(x, Layout.of(lengths), rate)
        found.backward(weights.to(x.dtype))
        assert x.grad is not None
        return found, x.grad

    (found, gradient), (wanted, exact) = learned(qkv), learned(qkv.float())
    assert found.dtype == gradient.dtype == torch.bfloat16
    pairs = zip(gradient.unbind(1), exact.unbind(1), strict=True)
    for mine, theirs in ((found.detach(), wanted.detach()), *pairs):
        off = mine.float() - theirs
        assert float(off.abs().max()) <= 2**-6 * float(theirs.abs().max()) + 1e-5
        assert float(off.norm()) <= 2**-7 * float(theirs.norm()) + 1e-5


@NEEDS_AVX512
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_is_drawn_anew_for_every_row_head_and_key(rate):
    """Shares dropped lie within five standard deviations, and neighbours of every kind have nothing to do with each other."""
    length, heads = 256, 4
    qkv, lengths = draw_qkv([length] * 2, heads, 64, 0), [length] * 2
    draws, again = (
        (factors_of(qkv, lengths, rate, seed) > 0).double() - (1 - rate) for seed in (5, 6)
    )
    deviation = (rate * (1 - rate)) ** 0.5
    assert abs(draws.mean()) < 5 * deviation / draws.numel() ** 0.5
    assert draws.mean((0, 1)).abs().max() < 5 * deviation / (2 * length * heads) ** 0.5
    assert draws.mean(2).abs().max() < 5 * deviation / length**0.5
    shifts = ((0, 1), (0, 2), (0, 16), (1, 1), (1, 2), (2, 1), (2, 2), (2, 16))
    for other in (*(draws.roll(by, dim) for dim, by in shifts), again):
        assert abs((draws * other).mean()) < 5 * deviation**2 / draws.numel() ** 0.5


@NEEDS_AVX512
@pytest.mark.parametrize("dtype", LEARNED)
def test_learning_is_the_same_on_any_number_of_threads_and_once_differentiable(dtype):
    lengths = [1, 33, 64, 7]
    qkv = draw_qkv(lengths, 3, 32, 0).to(dtype)

    def step() -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        x = qkv.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
        found = packed_attention(x, Layout.of(lengths), 0.2)
        return found, torch.autograd.grad(found.square().sum(), x)[0]

    one = step()
    with on_threads(3):
        assert all(torch.equal(x, y) for x, y in zip(step(), one, strict=True))
    x = qkv.clone().requires_grad_()
    squares = packed_attention(x, Layout.of(lengths), 0.0).square().sum()
    (gradient,) = torch.autograd.grad(squares, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@NEEDS_AVX512
@pytest.mark.parametrize("dtype", LEARNED)
@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_a_number_that_is_not_finite_spoils_its_own_gradient_alone(rate, dtype):
    qkv = draw_qkv([20, 20], 1, 16, 0).to(dtype)
    qkv[25, 1, 0, 3] = float("nan")
    qkv.requires_grad_()
    packed_attention(qkv, Layout.of([20, 20]), rate).sum().backward()
    assert qkv.grad[:20].isfinite().all()
    assert not qkv.grad[20:].isfinite().any()
