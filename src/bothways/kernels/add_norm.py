"""LayerNorm of a residual path and what is added to it, dropped out: one function, for training and evaluation.

On a CPU with the library's own kernels it is one pass over memory forward and one back; no mask is kept, since the dropout is a
hash of its seed and its place, which is drawn again.

Sources: Ba et al. 2016; Vaswani et al. 2017, section 5.4, "residual dropout".
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bothways.kernels.dropout import dropout
from bothways.kernels.library import INT32, INT64, POINTER, DropoutFields, call, dropping, serves


class NormFields(ctypes.Structure):
    """A LayerNorm, as `csrc` has it."""

    _fields_ = [("weight", POINTER), ("bias", POINTER), ("epsilon", ctypes.c_float)]


class _Normed(ctypes.Structure):
    _fields_ = [
        ("sums", POINTER),
        ("found", POINTER),
        ("width", INT64),
        ("drop", DropoutFields),
        ("bf16", INT32),
    ]


def add_norm(
    x: Float[Tensor, "rows width"], y: Float[Tensor, "rows width"], rate: float, norm: nn.Module
) -> Float[Tensor, "rows width"]:
    """`norm(x + dropout(y, rate))`.

    | device | own kernels | x | y | norm | by |
    |---|---|---|---|---|---|
    | CPU | yes | fp32 | fp32 or bf16, of equal shape | LayerNorm of its width, with weights in fp32 | one kernel |
    | any other | | | | | torch's operators |
    """
    fits = (
        isinstance(norm, nn.LayerNorm)
        and norm.weight is not None
        and norm.normalized_shape == x.shape[1:] == y.shape[1:]
    )
    exact = fits and all(
        each.dtype is torch.float32 for each in (x, norm.weight, norm.bias) if each is not None
    )
    if not (
        exact
        and len(x) == len(y)
        and serves(x.device)
        and y.dtype in {torch.float32, torch.bfloat16}
    ):
        result: Tensor = norm(x + dropout(y, rate))
        return result
    return _AddNorm.apply(x, y, norm.weight, norm.bias, norm.eps, rate)  # type: ignore[no-untyped-call, no-any-return]


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        epsilon: float,
        rate: float,
    ) -> Tensor:
        x, y, weight, bias = (
            x.contiguous(),
            y.contiguous(),
            weight.contiguous(),
            None if bias is None else bias.contiguous(),
        )
        found, drop, bf16 = torch.empty_like(x), dropping(rate), y.dtype is torch.bfloat16
        sums, moments = (
            torch.empty_like(x) if any(ctx.needs_input_grad) else found,
            x.new_empty(len(x), 2),
        )
        fields = _fields(weight, bias, epsilon), _Normed(None, None, x.shape[1], drop, bf16)
        places = (
            x.data_ptr(),
            y.data_ptr(),
            len(x),
            sums.data_ptr(),
            moments.data_ptr(),
            found.data_ptr(),
        )
        call("bothways_add_norm", "a LayerNorm", *map(ctypes.byref, fields), *places)
        ctx.drop, ctx.epsilon, ctx.dtype = drop, epsilon, y.dtype
        ctx.save_for_backward(sums, moments, weight, bias)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        sums, moments, weight, bias = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_x, of_y = torch.empty_like(sums), torch.empty_like(sums, dtype=ctx.dtype)
        of_weight, of_bias = (
            torch.empty_like(weight),
            None if bias is None else torch.empty_like(bias),
        )
        normed = _Normed(
            sums.data_ptr(),
            moments.data_ptr(),
            sums.shape[1],
            ctx.drop,
            ctx.dtype is torch.bfloat16,
        )
        fields = _fields(weight, bias, ctx.epsilon), normed
        places = (
            of_x.data_ptr(),
            of_y.data_ptr(),
            of_weight.data_ptr(),
            None if of_bias is None else of_bias.data_ptr(),
        )
        call(
            "bothways_add_norm_backward",
            "a LayerNorm",
            *map(ctypes.byref, fields),
            gradient.data_ptr(),
            len(sums),
            *places,
        )
        return of_x, of_y, of_weight, of_bias, None, None


def _fields(weight: Tensor, bias: Tensor | None, epsilon: float) -> NormFields:
    return NormFields(weight.data_ptr(), None if bias is None else bias.data_ptr(), epsilon)
