"""Cross-entropy in one pass against torch's, in double precision."""

import inspect
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from bothways.core.batch import IGNORED
from bothways.core.runtime.tuning import TUNING
from bothways.model.kernels import cross_entropy as losses, library
from bothways.model.kernels.cross_entropy import cross_entropy
from bothways.model.kernels.linear import to_vocabulary

compiled = pytest.mark.skipif(
    not library.runs_on(torch.device("cpu")), reason="no compiled kernels here"
)


@pytest.fixture(params=["torch", pytest.param("compiled", marks=compiled)], autouse=True)
def either_way(request, monkeypatch) -> None:
    """By torch's operators, and by the library's own kernel."""
    if request.param == "torch":
        monkeypatch.setattr(losses, "runs_on", lambda device: False)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(0, 40),
    classes=st.integers(1, 70),
    chunk=st.integers(1, 300),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    ignored=st.floats(0, 1),
    scale=st.sampled_from([1.0, 30.0, 1e4]),
    seed=st.integers(0, 999),
)
def test_in_every_type_it_is_the_formula(rows, classes, chunk, dtype, ignored, scale, seed):
    """In chunks down to one row, with many equal logits, of which the first one counts."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, classes, generator=generator).round(decimals=1) * scale).to(dtype)
    labels = torch.randint(classes, (rows,), generator=generator)
    labels[torch.rand(rows, generator=generator) < ignored] = IGNORED
    mine, reference = logits.clone().requires_grad_(), logits.double().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "TUNING", replace(TUNING, loss_chunk_elements_cpu=chunk))
        found = cross_entropy(mine, labels)
    assert torch.equal(mine.detach(), logits)
    wanted = F.cross_entropy(reference, labels, reduction="sum", ignore_index=IGNORED)
    exact = dtype == torch.float64
    near = {"rtol": 1e-7, "atol": 1e-7} if exact else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found.total.double(), wanted, **near)
    assert found.total.dtype == torch.promote_types(dtype, torch.float32)
    assert int(found.hits) == (
        int(((logits.argmax(1) == labels) & (labels != IGNORED)).sum()) if rows else 0
    )
    (found.total * 3).backward()
    (wanted * 3).backward()
    assert mine.grad.dtype == dtype
    # torch's operators round twice
    rounding = {torch.float64: 1e-7, torch.float32: 3e-5, torch.bfloat16: 2**-7}[dtype]
    near = {"rtol": rounding, "atol": 1e-7 if exact else 3e-6}
    torch.testing.assert_close(mine.grad.double(), reference.grad, **near)


@pytest.mark.parametrize("label", [5, -1, -99])
def test_a_label_that_is_no_class_is_refused(label):
    with pytest.raises((IndexError, RuntimeError)):
        cross_entropy(torch.randn(2, 5), torch.tensor([1, label]))


def test_a_number_that_is_not_finite_spoils_its_row_alone():
    logits = torch.randn(2, 40)
    logits[0, 7] = float("nan")
    logits.requires_grad_()
    loss = cross_entropy(logits, torch.tensor([1, 2])).total
    loss.backward()
    assert loss.isnan()
    assert logits.grad[0].isnan().any()
    assert logits.grad[1].isfinite().all()


def test_single_precision_is_as_near_as_torch():
    torch.manual_seed(0)
    logits = torch.randn(500, 3000) * 4
    labels = torch.randint(3000, (500,))
    exact = F.cross_entropy(logits.double(), labels, reduction="sum")
    assert abs(float(cross_entropy(logits, labels).total) - float(exact)) < 1e-6 * float(exact)


def test_no_gradient_is_made_where_none_is_needed():
    loss = cross_entropy(torch.randn(4, 5), torch.tensor([0, 1, 2, IGNORED]))
    assert not loss.total.requires_grad


def test_the_factor_of_a_gradient_in_bf16_is_not_rounded_before():
    """1/307 in bf16 is 0.3 % off, for each element alike."""
    logits, labels = torch.randn(40, 50).bfloat16().requires_grad_(), torch.randint(50, (40,))
    cross_entropy(logits, labels).total.backward()
    logits.grad = None
    (cross_entropy(logits, labels).total / 307).backward()
    exact = (logits.detach().double().softmax(1) - F.one_hot(labels, 50)) / 307
    assert abs(float((logits.grad.double() / exact).mean()) - 1) < 5e-4


def test_one_part_of_the_rows_in_fp32_is_held_at_a_time(monkeypatch):
    """On a GPU it is 256 MiB."""
    rows, classes, held, most = 8, 60, weakref.WeakSet[Any](), []

    class Storages(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.dtype == torch.float32:
                held.add(result.untyped_storage())
            most.append(sum(storage.nbytes() >= 4 * rows * classes for storage in held))
            return result

    parts = replace(TUNING, loss_chunk_elements_cpu=rows * classes)
    monkeypatch.setattr(losses, "TUNING", parts)
    logits = torch.randn(5 * rows, classes).bfloat16().requires_grad_()
    with Storages():
        cross_entropy(logits, torch.randint(classes, (5 * rows,)))
    assert max(most) == 1


def test_a_gpu_computes_a_multiple_of_64_outputs(monkeypatch):
    """Here the processor is taken for a GPU."""
    monkeypatch.setattr(losses, "runs_on", lambda device: False)
    shapes = ((40, 64), (97, 64), (97,))
    x, weight, bias = inputs = [torch.randn(shape).requires_grad_() for shape in shapes]
    labels = torch.randint(97, (40,))
    labels[::5] = IGNORED
    with monkeypatch.context() as patch, torch.autocast("cpu", torch.bfloat16):
        patch.setattr(torch.Tensor, "is_cuda", True)
        patch.setattr(torch, "is_autocast_enabled", lambda kind: True)
        patch.setattr(torch, "get_autocast_dtype", lambda kind: torch.bfloat16)
        logits = to_vocabulary(x, weight, bias)
        logits.retain_grad()
        loss = cross_entropy(logits, labels).total / 307
        loss.backward()
    assert (logits.shape, logits.stride(), logits.dtype) == ((40, 97), (128, 1), torch.bfloat16)
    exact = F.cross_entropy(logits.detach().double(), labels, reduction="sum") / 307
    assert float(loss.detach()) == pytest.approx(float(exact), rel=1e-5)
    slope = logits.detach().double().softmax(1) - F.one_hot(labels.clamp(min=0), 97)
    slope *= (labels != IGNORED)[:, None] / 307
    torch.testing.assert_close(logits.grad.double(), slope, rtol=2**-7, atol=1e-8)
    with torch.no_grad():
        wanted = (slope @ weight.double(), slope.mT @ x.double(), slope.sum(0))
        for each, gradient in zip(inputs, wanted, strict=True):
            difference = each.grad.double() - gradient
            assert float(difference.norm()) < 0.01 * float(gradient.norm())


@pytest.mark.parametrize("labels", [4, 9])
def test_as_many_labels_as_rows_are_needed(labels):
    with pytest.raises(
        ValueError, match=rf"equal numbers of rows, not shapes \[8, 5\] and \[{labels}\]"
    ):
        inspect.unwrap(cross_entropy)(torch.randn(8, 5), torch.zeros(labels, dtype=torch.int64))
