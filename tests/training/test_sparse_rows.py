"""Tables whose gradient has few rows are updated as dense ones are, however the run goes: in fp32 by
the compiled kernel, where there is one, in float64 as dense ones.
"""

import copy
import io

import pytest
import torch
from torch import nn

from bothways.training.optimizers import (
    AdamW,
    BertAdam,
    ParameterRule,
    build_optimizer,
    set_rate,
    update,
)

ROWS, WIDTH = 523, 20  # more than a thread takes at once, and no whole number of vectors


def networks(dtype=torch.float32):
    torch.manual_seed(0)
    first = nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 3)).to(dtype)
    return first, copy.deepcopy(first)


def lose(network, step, sparse, factor=1.0):
    """Two microbatches, with tokens that come back after steps without them."""
    generator = torch.Generator().manual_seed(step)
    network[0].sparse = sparse
    for _ in range(2):
        ids = torch.randint(
            min(ROWS - 3, 40 + 20 * step), (60,), generator=generator
        )  # the last three rows are never read
        (network(ids).square().sum() * factor).backward()
    assert network[0].weight.grad.is_sparse == sparse


def assert_equal(first, second):
    for mine, other in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    "config", [AdamW(lr=0.02, decay=0.3), AdamW(lr=0.02, decay=0.0), BertAdam(lr=0.02, decay=0.3)]
)
@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("pull", [0.0, 1.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_by_rows_is_the_dense_update(config, clip_norm, pull, dtype):
    ours, theirs = networks(dtype)
    optimizers = [
        build_optimizer(config, net.named_parameters(), lambda _: ParameterRule(pull=pull))
        for net in (ours, theirs)
    ]
    start = ours[0].weight.detach().clone()
    for step in range(40):
        for net, optimizer in zip((ours, theirs), optimizers, strict=True):
            lose(net, step, sparse=net is ours)
            set_rate(optimizer, 1 - step / 50)
        norms = [update(optimizer, clip_norm) for optimizer in optimizers]
        torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
        assert all(p.grad is None for p in ours.parameters())
    assert_equal(ours, theirs)
    unread, read = (
        ours[0].weight[rows] == start[rows] for rows in (slice(ROWS - 3, None), slice(30))
    )
    assert not read.all(1).any()
    assert unread.all() if config.decay == 0.0 else not unread.any()


@pytest.mark.parametrize("config", [AdamW(lr=0.02), BertAdam(lr=0.02)])
def test_a_gradient_that_is_not_finite_changes_nothing(config):
    network, _ = networks()
    optimizer = build_optimizer(config, network.named_parameters())
    lose(network, 3, sparse=True)
    update(optimizer, 1.0)
    before = copy.deepcopy((network.state_dict(), optimizer.state_dict()["state"]))
    lose(network, 9, sparse=True, factor=float("nan"))
    update(optimizer, 1.0)
    assert all(torch.equal(value, before[0][name]) for name, value in network.state_dict().items())
    for number, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, before[1][number][name]) for name, value in state.items())


@pytest.mark.parametrize("config", [AdamW(lr=0.02), BertAdam(lr=0.02)])
def test_a_run_goes_on_from_its_state(config):
    """Which rows have moments is no part of the state: a restored run finds it out."""
    whole, cut = networks()
    optimizer, early = (
        build_optimizer(config, whole.named_parameters()),
        build_optimizer(config, cut.named_parameters()),
    )
    for step in range(12):
        lose(whole, step, sparse=True)
        update(optimizer, 1.0)
        if step < 5:
            lose(cut, step, sparse=True)
            update(early, 1.0)
    file = io.BytesIO()
    torch.save(early.state_dict(), file)
    file.seek(0)
    again = build_optimizer(config, cut.named_parameters())
    again.seen = {
        cut[0].weight: torch.zeros(ROWS, dtype=torch.bool)
    }  # of a run that is none of this state's
    again.load_state_dict(torch.load(file, weights_only=True))
    for step in range(5, 12):
        lose(cut, step, sparse=True)
        update(again, 1.0)
    assert all(
        torch.equal(mine, other)
        for mine, other in zip(whole.parameters(), cut.parameters(), strict=True)
    )


def test_a_run_may_change_from_dense_to_rows_and_back():
    ours, theirs = networks()
    optimizers = [build_optimizer(AdamW(lr=0.02), net.named_parameters()) for net in (ours, theirs)]
    for step in range(20):
        for net, optimizer in zip((ours, theirs), optimizers, strict=True):
            lose(net, step, sparse=net is ours and step // 5 % 2 == 1)
            update(optimizer, 1.0)
    assert_equal(ours, theirs)
