"""Token vectors and the table that heads multiply by: one gradient of both."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from bothways.model.embedding import look_up


def gradients(
    table: nn.Embedding, ids: Tensor, factors: list[Tensor], by_hand: bool
) -> Tensor | None:
    """Of Σ rows·a + Σ (b·tableᵀ)·c, where there is b; twice, added up."""
    table.zero_grad()
    for _ in range(2):
        rows, whole = (table(ids), table.weight) if by_hand else look_up(table, ids)
        a, *product = factors
        loss = (rows * a).sum()
        if product:
            b, c = product
            loss = loss + (nn.functional.linear(b, whole) * c).sum()
        loss.backward()
    return table.weight.grad


@given(
    st.integers(0, 40),
    st.booleans(),
    st.sampled_from([torch.float64, torch.float32]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_the_gradient_is_torchs(tokens, whole, dtype, autocast, seed):
    torch.manual_seed(seed)
    table, ids = nn.Embedding(9, 5, dtype=dtype), torch.randint(0, 9, (tokens,))
    factors = [torch.randn(tokens, 5, dtype=dtype)]
    if whole:
        factors += [torch.randn(3, 5, dtype=dtype), torch.randn(3, 9, dtype=dtype)]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast and dtype is torch.float32):
        wanted = gradients(table, ids, factors, by_hand=True).clone()
        found = gradients(table, ids, factors, by_hand=False)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("read", "wanted"),
    [([0], [0, 1, 0, 2, 0, 0, 0, 0, 0]), ([1], [1] * 9), ([0, 1], [1, 2, 1, 3, 1, 1, 1, 1, 1])],
    ids=["rows", "whole", "both"],
)
def test_gradients_may_be_missing_or_without_memory_of_their_own(read, wanted):
    table, ids = nn.Embedding(9, 5), torch.tensor([3, 3, 1])
    outputs = look_up(table, ids)
    sum(outputs[index].sum() for index in read).backward()
    assert table.weight.grad.tolist() == [[count] * 5 for count in wanted]


@pytest.mark.parametrize(
    "changes", [{"padding_idx": 3}, {"scale_grad_by_freq": True}, {"max_norm": 0.5}, {"sparse": True}], ids=str
)  # fmt: skip
def test_a_table_with_rules_of_its_own_keeps_them(changes):
    tables = [nn.Embedding(9, 5, **changes) for _ in range(2)]
    tables[1].load_state_dict(tables[0].state_dict())
    ids = torch.tensor([3, 3, 1])
    for table, rows in zip(tables, (look_up(tables[0], ids)[0], tables[1](ids)), strict=True):
        rows.square().sum().backward()
        assert table.weight.grad.is_sparse == table.sparse
    torch.testing.assert_close(*(table.weight.grad.to_dense() for table in tables))


def test_a_frozen_table_has_no_gradient():
    table = nn.Embedding(9, 5).requires_grad_(False)
    rows, whole = look_up(table, torch.tensor([3, 3, 1]))
    assert not rows.requires_grad
    assert whole is table.weight


def test_a_module_that_is_more_than_a_table_is_called():
    class Doubled(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    table, ids = Doubled(9, 5), torch.tensor([3, 1])
    assert torch.equal(look_up(table, ids)[0], 2 * table.weight[ids])


@pytest.mark.parametrize(
    "more", [lambda whole: whole * 2, lambda whole: whole.tanh(), lambda whole: whole]
)
def test_the_gradient_of_a_lookup_is_its_own(more):
    """What adds something of its own to the table gets the same gradient, and keeps it."""
    torch.manual_seed(0)
    table, ids, factor = nn.Embedding(9, 5), torch.tensor([3, 3, 1]), torch.randn(9, 5)
    other = torch.randn(9, 5, requires_grad=True)
    found, wanted = (
        torch.autograd.grad(
            rows.sum() + ((whole + more(other)) * factor).sum(), [table.weight, other]
        )
        for rows, whole in (look_up(table, ids), (table(ids), table.weight))
    )
    torch.testing.assert_close(found, wanted)
    above = torch.ones(9, 5)
    torch.autograd.backward([*look_up(table, ids)], [torch.ones(3, 5), above])
    assert torch.equal(above, torch.ones(9, 5))
