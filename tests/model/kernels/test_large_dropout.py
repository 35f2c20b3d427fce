"""Masks drawn again for the backward pass: bit for bit what masks that are kept give, in less memory."""

import contextlib
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bothways.core.batch import Batch, Layout
from bothways.core.runtime.tuning import TUNING
from bothways.model.config import Dropouts, EncoderConfig
from bothways.model.kernels import dropout as module
from bothways.model.kernels.dropout import dropout, dropped_product
from bothways.model.model import Model
from bothways.model.positions import Disentangled, Learned

Found = tuple[Tensor, ...]


def product(kept: int, x: Tensor, y: Tensor, mixed: bool, monkeypatch: pytest.MonkeyPatch) -> Found:
    """The output and both gradients, where masks up to so many elements are kept as they are."""
    monkeypatch.setattr(module, "TUNING", replace(TUNING, dropout_mask_elements=kept))
    torch.manual_seed(1)
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16) if mixed else contextlib.nullcontext():
        found = dropped_product(x, y, 0.3)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(2)).to(found.dtype)
    return (found.detach(), *torch.autograd.grad((found * weights).sum(), (x, y)))


@pytest.mark.parametrize(
    ("dtype", "mixed"),
    [
        (torch.float32, False),
        (torch.float64, False),
        (torch.bfloat16, False),
        (torch.float32, True),
        (torch.bfloat16, True),
    ],
)
def test_products_with_dropped_ones(dtype, mixed, monkeypatch):
    x = torch.randn(2, 3, 7, 7).softmax(-1).to(torch.float32 if mixed else dtype)
    y = torch.randn(2, 3, 7, 5).to(dtype)
    small, large = (product(kept, x, y, mixed, monkeypatch) for kept in (2**20, 0))
    for one, other in zip(small, large, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert not torch.equal(small[0], product(0, x, 2 * y, mixed, monkeypatch)[0])


def test_a_rate_of_nearly_1_keeps_next_to_nothing():
    torch.manual_seed(3)
    x = dropout(torch.ones(2**18), 1 - 2**-20)
    assert set(x.tolist()) == {0.0, 2.0**16}
    assert 0 < int(x.count_nonzero()) < 20  # 4 are expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rate", [0.1, 0.7])
def test_dropout(dtype, rate, monkeypatch):
    results = []
    for kept in (2**20, 0):
        monkeypatch.setattr(module, "TUNING", replace(TUNING, dropout_mask_elements=kept))
        torch.manual_seed(4)
        x = torch.randn(50, 30, dtype=dtype, requires_grad=True)
        y = dropout(x, rate)
        weights = torch.randn(50, 30, dtype=dtype)
        results.append((y.detach(), *torch.autograd.grad((y * weights).sum(), x)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert 0 < int((results[0][0] == 0).sum()) < 1500


def held(model: Model, batch: Batch) -> int:
    """Bytes for the backward pass, weights left out."""
    weights, sizes = (
        {p.untyped_storage().data_ptr() for p in model.parameters()},
        dict[int, tuple[int, Tensor]](),
    )

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        sizes[storage.data_ptr()] = (0 if storage.data_ptr() in weights else storage.nbytes(), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model.encoder(batch)
    return sum(size for size, _ in sizes.values())


@pytest.mark.parametrize("position", [Learned(), Disentangled(32)], ids=["learned", "disentangled"])
def test_attention_keeps_its_probabilities_once(position, monkeypatch):
    monkeypatch.setattr(module, "runs_on", lambda device: False)  # the kernel never keeps a mask
    config = EncoderConfig(50, 32, 2, 4, 64, position=position, dropout=Dropouts(0.1, 0.1))
    model, layout = Model(config, ()).train(), Layout.of([32] * 3)
    batch = Batch(torch.randint(50, (96,)), torch.zeros(96, dtype=torch.int64), layout)
    sizes = []
    for kept in (2**20, 0):
        monkeypatch.setattr(module, "TUNING", replace(TUNING, dropout_mask_elements=kept))
        sizes.append(held(model, batch))
    attended, hidden, layers = 4 * 32 * 96, 32 * 96, 2
    if isinstance(position, Disentangled):
        # Of three of the probabilities' size one is left; of each other mask nothing.
        assert sizes[0] - sizes[1] == 4 * (layers * 2 * attended + 5 * hidden + 2 * 32 * 63)
    else:
        # Of the probabilities and their mask, the mask is not kept; nor any other.
        assert sizes[0] - sizes[1] == 4 * (layers * attended + 5 * hidden)
