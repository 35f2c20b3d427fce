"""Which attention goes through the compiled kernel."""

import pytest
import torch
from torch import Tensor

from attention_formulas import formula
from bothways.core.batch import EQUAL, LOOSE, Layout
from bothways.model.attention import dispatch
from bothways.model.attention.mask import AttentionView, RotaryTables
from bothways.model.attention.patterns import Blocks, Causal, Full, Window
from bothways.model.kernels import library
from bothways.model.kernels.attention import packed_attention
from bothways.model.kernels.library import ALL_FEATURES, Feature, supports_heads
from kernel_cases import NEEDS_AVX512, draw_qkv
from toy_training import exit_code

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


LONG = [40, 17, 33]


@NEEDS_AVX512
@pytest.mark.parametrize(
    ("pattern", "rate", "gradients", "chosen"),
    [
        (Full(), 0.0, False, True),
        (Window(39), 0.0, False, True),
        (Blocks(8), 0.0, False, True),
        (Full(), 0.1, False, True),
        (Full(), 0.0, True, True),
        (Full(), 0.1, True, True),
        (Window(3), 0.0, False, False),
        (Causal(), 0.0, True, False),
    ],
)
@pytest.mark.parametrize("cut", [LOOSE, EQUAL])
def test_it_is_chosen_where_all_see_all(pattern, rate, gradients, chosen, cut, monkeypatch):
    calls: list[float] = []

    def counted(qkv: Tensor, layout: Layout, dropout: float) -> Tensor:
        calls.append(dropout)
        return packed_attention(qkv, layout, dropout)

    monkeypatch.setattr(dispatch, "packed_attention", counted)
    qkv, layout = draw_qkv(LONG, 2, 16, 0).requires_grad_(gradients), Layout.of(LONG, cut)
    turn = RotaryTables.of(layout.positions, 16, 10_000.0)
    found = dispatch.attend(qkv, AttentionView(layout, pattern, turn), rate)
    assert calls == ([rate] if chosen else [])
    assert found.requires_grad is gradients
    assert ("rectangles" in vars(layout)) is not chosen
    if chosen and rate == 0:
        torch.testing.assert_close(found.double(), formula(turn(qkv), LONG), rtol=2e-5, atol=3e-6)


@NEEDS_AVX512
def test_global_tokens_with_projections_of_their_own_are_left_to_torch(monkeypatch):
    message = "the kernel does not know the projections of global tokens"
    monkeypatch.setattr(dispatch, "packed_attention", lambda *_: pytest.fail(message))
    qkv, layout = draw_qkv([9, 5], 2, 16, 0), Layout.of([9, 5])
    everywhere = torch.zeros(14, dtype=torch.bool)
    everywhere[0] = True
    view = AttentionView(
        layout, Window(20, global_attention=True), global_attention_mask=everywhere
    )
    found = dispatch.attend(qkv, view, global_qkv=draw_qkv([9, 5], 2, 16, 1))
    same = formula(qkv, [9, 5])
    assert not torch.allclose(found[0].double(), same[0], atol=1e-3)
    torch.testing.assert_close(found[1:].double(), same[1:], rtol=1e-5, atol=1e-5)


VIEW = AttentionView(Layout.of([5]))


class Attention(torch.nn.Module):
    def forward(self, qkv: Tensor) -> Tensor:
        return dispatch.attend(qkv, VIEW)


def check_traced_programs() -> None:
    first, other, module = torch.randn(5, 3, 1, 16), torch.randn(5, 3, 1, 16), Attention()
    for program in (torch.jit.trace(module, first), torch.export.export(module, (first,)).module()):
        torch.testing.assert_close(program(other), module(other))


@NEEDS_AVX512
def test_a_program_that_is_traced_gets_torchs_operators():
    """Else what was found for the first input would be part of it. In a process without checks of types, which trace badly."""
    assert exit_code(check_traced_programs) == 0


@pytest.mark.parametrize(
    ("device", "dtype", "size", "has", "chosen"),
    [
        (CPU, torch.float32, 64, Feature.AVX512, True),
        (CPU, torch.bfloat16, 16, Feature.AVX512 | Feature.VNNI, True),
        (CPU, torch.float32, 64, Feature(0), False),
        (CPU, torch.float64, 64, ALL_FEATURES, False),
        (CPU, torch.float16, 64, ALL_FEATURES, False),
        (CPU, torch.float32, 40, ALL_FEATURES, False),
        (CUDA, torch.float32, 64, ALL_FEATURES, False),
    ],
)
def test_the_table(device, dtype, size, has, chosen, monkeypatch):
    monkeypatch.setattr(library, "_limited", has)
    assert supports_heads(device, dtype, size) is chosen
    assert library.multiplies("int8") is (Feature.VNNI in has)
    assert library.multiplies("bf16") is (Feature.BF16 in has)
    assert library.multiplies("fp32") is (Feature.AVX512 in has)
