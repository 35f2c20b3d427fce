"""Attention with a backward pass of its own against autograd's through the formula, with the same dropout."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention_formulas import assert_same_with_gradients, formula
from bothways.core.batch import LOOSE, Layout, RectanglePolicy
from bothways.core.runtime.tuning import TUNING
from bothways.model.attention.dispatch import attend, attend_gathered
from bothways.model.attention.mask import AttentionView
from bothways.model.attention.patterns import Causal, Full, Window
from bothways.model.kernels import dropout as dropouts
from bothways.model.kernels.dropout import draw_seed, keep_mask

HEADS, SIZE = 3, 4
LENGTHS = [7, 5, 6, 9]
RATE = 0.4


def dropped(qkv: Tensor, view: AttentionView) -> Tensor:
    """Rectangle by rectangle, with masks drawn as they are there; all in the precision of `qkv`."""
    found = []
    for part in view.parts:
        q, k, v = part.rectangle.pad(qkv).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / SIZE**0.5
        if part.mask is not None:
            scores = scores.masked_fill(~part.mask, -1e30)
        shape = (len(q) * HEADS, *scores.shape[2:])
        keep = keep_mask(torch.empty(shape), RATE, draw_seed()).view(scores.shape).to(qkv.dtype)
        found.append(part.rectangle.unpad((keep * scores.softmax(-1) @ v).transpose(1, 2)))
    return torch.cat(found)


@pytest.mark.parametrize("pattern", [Full(), Causal(), Window(2)], ids=["full", "causal", "window"])
@pytest.mark.parametrize("kept", [2**20, 0], ids=["kept", "drawn again"])
@pytest.mark.parametrize(
    ("lengths", "cut", "parts"),
    [
        (LENGTHS, LOOSE, 1),
        ([6, 6], LOOSE, 1),
        ([1], LOOSE, 1),
        ([7, 7, 2, 3, 3], RectanglePolicy(0.6, 0), 2),
    ],
    ids=["mixed", "equal", "one", "two rectangles"],
)
def test_output_and_gradient_with_dropout_are_the_formula_s(
    lengths, cut, parts, kept, pattern, monkeypatch
):
    monkeypatch.setattr(dropouts, "TUNING", replace(TUNING, dropout_mask_elements=kept))
    torch.manual_seed(3)
    qkv = torch.randn(sum(lengths), 3, HEADS, SIZE)
    mine, reference = qkv.clone().requires_grad_(), qkv.double().requires_grad_()
    view = AttentionView(Layout.of(lengths, cut), pattern)
    assert len(view.parts) == parts
    torch.manual_seed(5)
    found = attend_gathered(mine, view.parts, RATE)
    torch.manual_seed(5)
    wanted = dropped(reference, view)
    assert_same_with_gradients(found, wanted, [mine], [reference], near=2e-6)


@pytest.mark.parametrize("autocast", [False, True])
def test_in_bf16_within_its_rounding(autocast):
    """Weights of a layer in front of it get their gradient in fp32 under autocast, in bf16 without."""
    torch.manual_seed(0)
    x, weight = torch.randn(sum(LENGTHS), 8), torch.randn(3 * HEADS * SIZE, 8) / 3
    shape, view = (sum(LENGTHS), 3, HEADS, SIZE), AttentionView(Layout.of(LENGTHS))
    dtype = torch.float32 if autocast else torch.bfloat16
    reference, mine = weight.double().requires_grad_(), weight.to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = attend(torch.nn.functional.linear(x.to(dtype), mine).view(shape), view, 0.0)
    assert found.dtype == torch.bfloat16
    wanted = formula((x.double() @ reference.T).view(shape), LENGTHS)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=0.05)
    found.float().square().sum().backward()
    wanted.square().sum().backward()
    difference = (mine.grad.double() - reference.grad).norm() / reference.grad.norm()
    assert mine.grad.dtype == dtype
    assert float(difference) < 0.02


def test_a_sequence_that_is_not_finite_spoils_no_other():
    torch.manual_seed(0)
    view, first = AttentionView(Layout.of(LENGTHS)), LENGTHS[0]
    assert len(view.parts) == 1
    qkv = torch.randn(sum(LENGTHS), 3, HEADS, SIZE, requires_grad=True)
    with torch.no_grad():
        qkv[:first] = float("nan")
    found = attend_gathered(qkv, view.parts, RATE)
    found[first:].sum().backward()
    assert found[:first].isnan().all()
    assert found[first:].isfinite().all()
    assert qkv.grad[first:].isfinite().all()
    assert qkv.grad[first:].abs().sum() > 0


@pytest.mark.parametrize("learning", [True, False])
def test_attention_takes_it_where_something_is_learned(learning, monkeypatch):
    calls = []

    def record(qkv: Tensor, *_: object) -> Tensor:
        calls.append(1)
        return qkv[:, 0]

    monkeypatch.setattr("bothways.model.attention.dispatch.attend_gathered", record)
    attend(torch.randn(5, 3, HEADS, SIZE, requires_grad=learning), AttentionView(Layout.of([5])))
    assert bool(calls) == learning
