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
    st.integers(0, 2**31),
)
def test_the_gradient_is_torchs(tokens, whole, dtype, seed):
    torch.manual_seed(seed)
    table, ids = nn.Embedding(9, 5, dtype=dtype), torch.randint(0, 9, (tokens,))
    factors = [torch.randn(tokens, 5, dtype=dtype)]
    if whole:
        factors += [torch.randn(3, 5, dtype=dtype), torch.randn(3, 9, dtype=dtype)]
    wanted = gradients(table, ids, factors, by_hand=True)
    torch.testing.assert_close(gradients(table, ids, factors, by_hand=False), wanted.clone())


def test_it_is_torchs_under_autocast():
    torch.manual_seed(0)
    table, ids = nn.Embedding(9, 5), torch.randint(0, 9, (20,))
    factors = [torch.randn(20, 5), torch.randn(3, 5), torch.randn(3, 9)]
    with torch.autocast("cpu", torch.bfloat16):
        wanted = gradients(table, ids, factors, by_hand=True)
        wanted = wanted.clone()
        found = gradients(table, ids, factors, by_hand=False)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("reads", ["rows", "whole"])
def test_either_may_be_left(reads):
    table, ids = nn.Embedding(9, 5), torch.tensor([3, 3, 1])
    rows, whole = look_up(table, ids)
    (rows if reads == "rows" else whole).sum().backward()
    wanted = torch.zeros(9, 5) if reads == "rows" else torch.ones(9, 5)
    if reads == "rows":
        wanted[3], wanted[1] = 2, 1
    assert table.weight.grad is not None
    torch.testing.assert_close(table.weight.grad, wanted)


def test_frozen_and_sparse_tables_are_torchs():
    table, ids = nn.Embedding(9, 5, sparse=True), torch.tensor([3, 3, 1])
    look_up(table, ids)[0].sum().backward()
    assert table.weight.grad.is_sparse
    table.weight.requires_grad_(False)
    rows, whole = look_up(table, ids)
    assert not rows.requires_grad
    assert whole is table.weight


def test_a_module_that_is_more_than_a_table_is_called():
    class Doubled(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    table, ids = Doubled(9, 5), torch.tensor([3, 1])
    assert torch.equal(look_up(table, ids)[0], 2 * table.weight[ids])


def test_a_gradient_without_memory_of_its_own_is_added_to_as_well():
    table, ids = nn.Embedding(9, 5), torch.tensor([3, 3, 1])
    rows, whole = look_up(table, ids)
    (rows.sum() + whole.sum()).backward()
    assert table.weight.grad[:, 0].tolist() == [1, 2, 1, 3, 1, 1, 1, 1, 1]
