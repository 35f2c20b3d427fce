"""AdamW on the rows of a table: the kernel against the formula in double precision."""

import pytest
import torch
from torch import nn

from bothways.training.optimizers import update_rows
from kernel_cases import NEEDS_AVX512

pytestmark = [NEEDS_AVX512, pytest.mark.usefixtures("processor")]


@pytest.mark.parametrize("width", [1, 16, 37])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.3, 0.95)])
@pytest.mark.parametrize(("decay", "scale"), [(0.0, None), (0.3, 1.7)])
@pytest.mark.parametrize("rows", [[], [0, 5, 6, 300, 599], [*range(600)]])
def test_a_step_is_the_formula(width, betas, decay, scale, rows):
    """Rows with a gradient, rows that had one before, and rows that never had any."""
    torch.manual_seed(0)
    count, (first, second), rate = 600, betas, 0.02
    weight = nn.Parameter(torch.randn(count, width))
    seen = torch.rand(count) < 0.5
    average, squares = torch.randn(count, width), torch.rand(count, width)
    state = {"step": torch.tensor(3.0)}
    state |= {"exp_avg": average * seen[:, None], "exp_avg_sq": squares * seen[:, None]}
    dense = torch.zeros(count, width)
    dense[rows] = torch.randn(len(rows), width)
    weight.grad = dense.to_sparse(1)  # torch 2.11 warns at sparse_coo_tensor, however it is called

    g = dense.double() / (scale or 1.0)
    m = state["exp_avg"].double() * first + (1 - first) * g
    v = state["exp_avg_sq"].double() * second + (1 - second) * g.square()
    before = weight.detach().double()
    change = m / (1 - first**4) / ((v / (1 - second**4)).sqrt() + 1e-6)
    expected = before * (1 - rate * decay) - rate * change
    had = seen.clone()
    had[rows] = True

    group = {"lr": rate, "betas": betas, "eps": 1e-6, "weight_decay": decay}
    update_rows(group, weight, state, seen, None if scale is None else torch.tensor(scale))
    pairs = (weight.detach(), expected), (state["exp_avg"], m), (state["exp_avg_sq"], v)
    for mine, formula in pairs:
        torch.testing.assert_close(mine.double(), formula, rtol=2e-6, atol=2e-7)
    assert torch.equal(seen, had)
    assert float(state["step"]) == 4
    assert decay or torch.equal(weight[~had].double(), before[~had])
