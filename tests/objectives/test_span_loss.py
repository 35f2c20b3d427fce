"""The loss of a span on packed sequences against torch's cross-entropy of each sequence alone, in double precision."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from bothways.core.layout import Layout
from bothways.core.targets import SpanTargets
from bothways.objectives.losses import span_loss


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    scale=st.sampled_from([1.0, 30.0, 1e4]),
    learned=st.floats(0, 1),
    seed=st.integers(0, 999),
)
def test_sum_gradient_and_hits_equal_those_of_each_one(
    lengths: list[int], scale: float, learned: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    layout = Layout.of(lengths)
    scores = torch.randn(layout.tokens, 2, dtype=torch.float64, generator=generator) * scale
    places = [torch.randint(length, (2,), generator=generator) for length in lengths]
    weight = (torch.rand(len(lengths), generator=generator) < learned).float()
    start, end = (
        torch.stack([place[side] for place in places]) + layout.cu_seqlens[:-1] for side in (0, 1)
    )
    mine, reference = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    found = span_loss(mine, layout, SpanTargets(start, end, weight))
    wanted, hits = reference.sum() * 0, 0
    for part, place, counts in zip(reference.split(lengths), places, weight.tolist(), strict=True):
        loss = (F.cross_entropy(part[:, 0], place[0]) + F.cross_entropy(part[:, 1], place[1])) / 2
        wanted = wanted + counts * loss
        hits += int(counts) * int(bool((part.argmax(0) == place).all()))
    torch.testing.assert_close(found.total, wanted)
    assert int(found.hits) == hits  # type: ignore[arg-type]
    found.total.backward()
    wanted.backward()
    torch.testing.assert_close(mine.grad, reference.grad)


def test_half_precision_is_summed_in_single() -> None:
    scores = torch.randn(6, 2, dtype=torch.bfloat16)
    targets = SpanTargets(torch.tensor([1, 4]), torch.tensor([2, 5]), torch.ones(2))
    found = span_loss(scores, Layout.of([3, 3]), targets).total
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, span_loss(scores.float(), Layout.of([3, 3]), targets).total)
