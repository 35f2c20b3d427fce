"""LayerNorm of a sum with dropout: the kernel against torch's LayerNorm in double precision, forward and backward."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from bothways.model.kernels import library
from bothways.model.kernels.dropout import add_norm
from bothways.model.kernels.library import Feature
from kernel_cases import on_threads

CPU, TYPES = torch.device("cpu"), [torch.float32, torch.bfloat16]
compiled = pytest.mark.skipif(not library.runs_on(CPU), reason="no compiled kernels here")


def drawn(
    rows: int, width: int, dtype: torch.dtype, bias: bool, seed: int
) -> tuple[Tensor, Tensor, nn.LayerNorm, Tensor]:
    torch.manual_seed(seed)
    norm = nn.LayerNorm(width, 1e-5, bias=bias)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    x, y, above = torch.randn(3, rows, width)
    return x.requires_grad_(), y.to(dtype).requires_grad_(), norm, above


@compiled
@given(
    st.integers(0, 90),
    st.integers(3, 100),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_it_is_the_formula_and_so_are_its_gradients(rows, width, dtype, bias, seed):
    x, y, norm, above = drawn(rows, width, dtype, bias, seed)
    found = add_norm(x, y, 0.0, norm)
    assert found.grad_fn is not None
    assert type(found.grad_fn).__name__ == "_AddNormBackward"
    found.backward(above)
    wide = nn.LayerNorm(width, 1e-5, bias=bias).double()
    wide.load_state_dict(norm.state_dict())
    a, b = (part.detach().double().requires_grad_() for part in (x, y))
    wanted = wide(a + b)
    wanted.backward(above.double())
    parameters = [
        (p.grad, q.grad) for p, q in zip(norm.parameters(), wide.parameters(), strict=True)
    ]
    for mine, theirs in [(found, wanted), (x.grad, a.grad), *parameters]:
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=2e-4 if rows else 0)
    rounding = 2**-8 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(y.grad.double(), b.grad, rtol=rounding, atol=2e-4)


@compiled
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_is_the_same_in_both_directions(rate, dtype):
    """What was dropped is found by the gradient of y, and the formula holds with it."""
    x, y, norm, above = drawn(400, 70, dtype, True, 0)
    found = add_norm(x, y, rate, norm)
    found.backward(above)
    kept = y.grad.double() != 0
    scale = 1 / (1 - round(rate * 2**16) / 2**16)
    torch.testing.assert_close(y.grad, (x.grad.double() * kept * scale).to(dtype))
    assert abs((~kept).double().mean() - rate) < 5 * (rate * (1 - rate) / kept.numel()) ** 0.5
    sums, parameters = x.double() + y.double() * kept * scale, (norm.weight, norm.bias)
    expected = nn.functional.layer_norm(sums, (70,), *(p.double() for p in parameters), 1e-5)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(add_norm(x, y, rate, norm), found)
    torch.manual_seed(3)
    first = add_norm(x, y, rate, norm)
    torch.manual_seed(3)
    assert torch.equal(add_norm(x, y, rate, norm), first)


@compiled
def test_it_is_the_same_on_any_number_of_threads_but_for_the_order_of_sums():
    x, y, norm, above = drawn(100, 48, torch.float32, True, 0)

    def step() -> list[Tensor]:
        torch.manual_seed(0)
        found = add_norm(x, y, 0.1, norm)
        return [found, *torch.autograd.grad(found, [x, y, *norm.parameters()], above)]

    one = step()
    with on_threads(3):
        three = step()
    assert all(torch.equal(a, b) for a, b in zip(one[:3], three[:3], strict=True))
    for a, b in zip(one[3:], three[3:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["no kernels", "no LayerNorm", "in bf16", "in double precision"])
def test_all_else_is_left_to_torch(case, monkeypatch):
    x, y, norm, _ = drawn(5, 8, torch.float32, True, 0)
    chosen: nn.Module = norm
    if case == "no kernels":
        monkeypatch.setattr(library, "_limited", Feature(0))
    elif case == "no LayerNorm":
        chosen = nn.Identity()
    else:
        dtype = torch.bfloat16 if case == "in bf16" else torch.float64
        x, y, chosen = x.to(dtype), y.to(dtype), norm.to(dtype)
    found = add_norm(x, y, 0.0, chosen)
    assert type(found.grad_fn).__name__ != "_AddNormBackward"
    torch.testing.assert_close(found, chosen(x + y))
