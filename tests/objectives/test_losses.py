"""Cross-entropy in one pass against torch's, in double precision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from bothways.core.batch import IGNORED
from bothways.objectives import losses
from bothways.objectives.losses import cross_entropy


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 40),
    classes=st.integers(1, 30),
    chunk=st.integers(1, 300),
    ignored=st.floats(0, 1),
    scale=st.sampled_from([1.0, 30.0, 1e4]),
    seed=st.integers(0, 999),
)
def test_sum_gradient_and_hits_equal_torch(
    rows: int, classes: int, chunk: int, ignored: float, scale: float, seed: int
) -> None:
    """Chunks of any size, down to one row; large logits must not overflow."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, classes, dtype=torch.float64, generator=generator) * scale
    labels = torch.randint(classes, (rows,), generator=generator)
    labels[torch.rand(rows, generator=generator) < ignored] = IGNORED
    mine, reference = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "CHUNK_ELEMENTS", {"cpu": chunk})
        found = cross_entropy(mine, labels)
    wanted = F.cross_entropy(reference, labels, reduction="sum", ignore_index=IGNORED)
    torch.testing.assert_close(found.total, wanted)
    assert int(found.hits) == int(((logits.argmax(1) == labels) & (labels != IGNORED)).sum()) if rows else int(found.hits) == 0
    # Scaled, since a loss is one term of a sum.
    (found.total * 3).backward()
    (wanted * 3).backward()
    torch.testing.assert_close(mine.grad, reference.grad)


def test_single_precision_is_as_near_as_torch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(500, 3000) * 4
    labels = torch.randint(3000, (500,))
    exact = F.cross_entropy(logits.double(), labels, reduction="sum")
    assert abs(float(cross_entropy(logits, labels).total) - float(exact)) < 1e-6 * float(exact)


def test_half_precision_logits_are_summed_in_single() -> None:
    torch.manual_seed(0)
    logits = torch.randn(300, 50).bfloat16().requires_grad_()
    labels = torch.randint(50, (300,))
    loss = cross_entropy(logits, labels)
    assert loss.total.dtype == torch.float32
    torch.testing.assert_close(loss.total, F.cross_entropy(logits.detach().float(), labels, reduction="sum"))
    loss.total.backward()
    assert logits.grad.dtype == torch.bfloat16


def test_no_gradient_is_made_where_none_is_needed() -> None:
    loss = cross_entropy(torch.randn(4, 5), torch.tensor([0, 1, 2, IGNORED]))
    assert not loss.total.requires_grad


def test_targets_of_no_weight_leave_the_gradient_at_zero() -> None:
    logits = torch.randn(3, 4, requires_grad=True)
    cross_entropy(logits, torch.full((3,), IGNORED)).total.backward()
    assert not logits.grad.any()


def test_the_factor_of_a_gradient_in_bf16_is_not_rounded_before() -> None:
    """1/307 in bf16 is 0.3 % off, for each element alike."""
    logits, labels = torch.randn(40, 50).bfloat16().requires_grad_(), torch.randint(50, (40,))
    cross_entropy(logits, labels).total.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    whole, logits.grad = logits.grad, None
    (cross_entropy(logits, labels).total / 307).backward()
    assert torch.equal(logits.grad, (whole.float() * torch.tensor(1 / 307)).bfloat16())
