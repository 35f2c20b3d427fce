"""Losses of weighed classes, choices, scores, several labels and spans against torch's, in double precision."""

import dataclasses

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.nn import functional as F

from bothways.core.batch import IGNORED, Layout, SpanTargets
from bothways.core.runtime.tuning import TUNING
from bothways.objectives import losses
from bothways.objectives.losses import (
    binary_cross_entropy,
    choice_cross_entropy,
    span_loss,
    squared_error,
    weighted_cross_entropy,
    z_loss,
)

SEEDS = st.integers(0, 999)


def check_equal(found: Tensor, expected: Tensor, x: Tensor) -> None:
    """Two values and their gradients for `x` are equal."""
    torch.testing.assert_close(found, expected)
    slopes = [torch.autograd.grad(y, x, materialize_grads=True)[0] for y in (found, expected)]
    torch.testing.assert_close(*slopes)


@given(
    rows=st.integers(1, 30),
    classes=st.integers(1, 9),
    smoothing=st.sampled_from([0.0, 0.1, 0.7]),
    seed=SEEDS,
)
def test_weighed_and_smoothed_cross_entropy_is_torchs(rows, classes, smoothing, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, classes, dtype=torch.float64, generator=generator) * 5
    logits.requires_grad_()
    labels = torch.randint(classes, (rows,), generator=generator)
    labels[1:][torch.rand(rows - 1, generator=generator) < 0.3] = IGNORED
    weights = torch.rand(classes, dtype=torch.float64, generator=generator) + 0.1
    factors = torch.rand(rows, dtype=torch.float64, generator=generator)
    found = weighted_cross_entropy(logits, labels, weights, smoothing, factors)
    each = F.cross_entropy(
        logits, labels, weights, ignore_index=IGNORED, label_smoothing=smoothing, reduction="none"
    )
    check_equal(found.total, (each * factors).sum(), logits)
    assert int(found.hits) == int((logits.argmax(1) == labels).sum())


@given(counts=st.lists(st.integers(1, 6), min_size=1, max_size=8), seed=SEEDS)
def test_choices_are_a_softmax_over_each_question(counts, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(sum(counts), dtype=torch.float64, generator=generator) * 8
    labels = torch.tensor([int(torch.randint(count, (), generator=generator)) for count in counts])
    labels[torch.rand(len(counts), generator=generator) < 0.2] = IGNORED
    found = choice_cross_entropy(scores.requires_grad_(), torch.tensor(counts), labels)
    wanted, hits = scores.sum() * 0, 0
    for part, label in zip(scores.split(counts), labels, strict=True):
        if label != IGNORED:
            wanted = wanted + F.cross_entropy(part[None], label[None])
            hits += int(part.argmax() == label)
    check_equal(found.total, wanted, scores)
    assert int(found.hits) == hits


@given(rows=st.integers(1, 20), seed=SEEDS)
def test_squared_error_is_torchs(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    outputs, scores = (torch.randn(2, rows, dtype=torch.float64, generator=generator) * 3).unbind()
    scores[torch.rand(rows, generator=generator) < 0.3] = torch.nan
    factors, known = torch.rand(rows, dtype=torch.float64, generator=generator), ~scores.isnan()
    found = squared_error(outputs.requires_grad_(), scores, factors)
    each = F.mse_loss(outputs[known], scores[known], reduction="none")
    check_equal(found.total, (each * factors[known]).sum(), outputs)
    assert found.hits is None


@given(
    rows=st.integers(1, 20),
    labels=st.integers(1, 6),
    scale=st.sampled_from([1.0, 200.0]),
    seed=SEEDS,
)
def test_binary_cross_entropy_is_the_formula(rows, labels, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, labels, dtype=torch.float64, generator=generator) * scale
    truth = torch.randint(2, (rows, labels), generator=generator).double()
    truth[torch.rand(rows, generator=generator) < 0.3] = torch.nan
    factors = torch.rand(rows, 1, dtype=torch.float64, generator=generator)
    found, known = binary_cross_entropy(logits.requires_grad_(), truth, factors), ~truth.isnan()
    z, y = logits[known], truth[known]
    each = -(y * F.logsigmoid(z) + (1 - y) * F.logsigmoid(-z))
    check_equal(found.total, (each * factors.expand_as(truth)[known]).sum(), logits)
    assert int(found.hits) == int(((logits > 0) == (truth == 1))[known].sum())


SPAN = SpanTargets(torch.tensor([1, 4]), torch.tensor([2, 5]), torch.ones(2))


@pytest.mark.parametrize("loss", [
    lambda x: squared_error(x[:, 0], torch.ones(6)),
    lambda x: binary_cross_entropy(x, torch.ones(6, 2)),
    lambda x: weighted_cross_entropy(x, torch.zeros(6, dtype=torch.int64), torch.ones(2), 0.1),
    lambda x: span_loss(x, Layout.of([3, 3]), SPAN),
])  # fmt: skip
def test_half_precision_is_summed_in_single(loss):
    x = torch.randn(6, 2).bfloat16()
    found = loss(x).total
    assert found.dtype == torch.float32
    assert torch.equal(found, loss(x.float()).total)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 50])
def test_the_z_loss_is_its_formula_and_its_gradient_2_log_z_softmax(rows, dtype, monkeypatch):
    """In chunks of 16 rows; in the sum with a cross-entropy, times a coefficient."""
    monkeypatch.setattr(losses, "TUNING", dataclasses.replace(TUNING, loss_chunk_elements_cpu=320))
    torch.manual_seed(0)
    logits = (torch.randn(rows, 20, dtype=torch.float64) * 5).to(dtype).requires_grad_()
    exact = logits.detach().double()
    log_z = exact.logsumexp(1)
    loss = z_loss(logits)
    assert loss.hits is None
    assert loss.total.dtype == torch.promote_types(dtype, torch.float32)
    near = (
        {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    )
    torch.testing.assert_close(loss.total.double(), log_z.square().sum(), **near)
    (1e-4 * loss.total).backward()
    expected = 2e-4 * log_z[:, None] * exact.softmax(1)
    near = {"rtol": 1e-2, "atol": 1e-6} if dtype == torch.bfloat16 else near
    torch.testing.assert_close(logits.grad.double(), expected, **near)
    with torch.no_grad():
        assert torch.equal(z_loss(logits).total, loss.total)


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    scale=st.sampled_from([1.0, 30.0, 1e4]),
    learned=st.floats(0, 1),
    seed=st.integers(0, 999),
)
def test_a_span_is_two_softmaxes_over_its_sequence(lengths, scale, learned, seed):
    generator = torch.Generator().manual_seed(seed)
    layout = Layout.of(lengths)
    scores = torch.randn(layout.tokens, 2, dtype=torch.float64, generator=generator) * scale
    places = [torch.randint(length, (2,), generator=generator) for length in lengths]
    weight = (torch.rand(len(lengths), generator=generator) < learned).float()
    start, end = (
        torch.stack([place[side] for place in places]) + layout.cu_seqlens[:-1] for side in (0, 1)
    )
    found = span_loss(scores.requires_grad_(), layout, SpanTargets(start, end, weight))
    wanted, hits = scores.sum() * 0, 0
    for part, place, counts in zip(scores.split(lengths), places, weight.tolist(), strict=True):
        loss = (F.cross_entropy(part[:, 0], place[0]) + F.cross_entropy(part[:, 1], place[1])) / 2
        wanted = wanted + counts * loss
        hits += int(counts) * int(bool((part.argmax(0) == place).all()))
    check_equal(found.total, wanted, scores)
    assert int(found.hits) == hits
