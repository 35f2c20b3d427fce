"""LayerNorm of a residual sum: `norm(x + dropout(y, rate))`, for training and evaluation.

| device | `runs_on` | x | y | norm | by |
|---|---|---|---|---|---|
| CPU | yes | fp32 | fp32 or bf16, of equal shape | LayerNorm of its width, in fp32 | one kernel |
| any other | | | | | PyTorch's operators |

The kernel is one pass over memory forward and one back, and keeps no dropout mask: the dropout is a
hash of seed and position, which the backward pass computes again.

Sources: Ba et al. 2016; Vaswani et al. 2017, section 5.4, "residual dropout".
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bothways.model.kernels import abi
from bothways.model.kernels.dropout import draw_dropout, dropout
from bothways.model.kernels.library import call, runs_on


def add_norm(
    x: Float[Tensor, "rows width"], y: Float[Tensor, "rows width"], rate: float, norm: nn.Module
) -> Float[Tensor, "rows width"]:
    """Return `norm(x + dropout(y, rate))`."""
    if not _has_kernel(x, y, norm):
        result: Tensor = norm(x + dropout(y, rate))
        return result
    apply: Callable[..., Tensor] = _AddNorm.apply
    return apply(x, y, norm.weight, norm.bias, norm.eps, rate)


def _has_kernel(x: Tensor, y: Tensor, norm: nn.Module) -> bool:
    if not isinstance(norm, nn.LayerNorm) or norm.weight is None:
        return False
    # A norm over several dimensions, or of other rows, is PyTorch's.
    fits = norm.normalized_shape == x.shape[1:] == y.shape[1:] and len(x) == len(y)
    exact = x.dtype is norm.weight.dtype is torch.float32
    exact = exact and (norm.bias is None or norm.bias.dtype is torch.float32)
    return fits and exact and y.dtype in {torch.float32, torch.bfloat16} and runs_on(x.device)


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
        """Return `norm(x + dropout(y))`."""
        x, y, weight = x.contiguous(), y.contiguous(), weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        out, drop = torch.empty_like(x), draw_dropout(rate)
        # Without a backward pass the sums may be overwritten by the output.
        sums = torch.empty_like(x) if any(ctx.needs_input_grad) else out
        # Mean and 1/√(variance + ε) of each row: the backward pass reads them instead of summing
        # over the row again.
        moments = x.new_empty(len(x), 2)
        call(
            "bothways_add_norm",
            ctypes.byref(_norm_struct(weight, bias, epsilon)),
            ctypes.byref(drop),
            x.data_ptr(),
            y.data_ptr(),
            abi.FORMATS[y.dtype],
            len(x),
            sums.data_ptr(),
            moments.data_ptr(),
            out.data_ptr(),
        )
        ctx.drop, ctx.epsilon, ctx.dtype = drop, epsilon, y.dtype
        ctx.save_for_backward(sums, moments, weight, bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients for `x`, `y` and the parameters of the norm."""
        sums, moments, weight, bias = ctx.saved_tensors
        grad_out = grad_out.contiguous()
        # With z = x + dropout(y), n = (z − mean) / deviation and g = grad_out · weight:
        #     grad_x = (g − mean(g) − n · mean(g · n)) / deviation
        #     grad_y = grad_x · (the factors of the dropout)
        grad_x, grad_y = torch.empty_like(sums), torch.empty_like(sums, dtype=ctx.dtype)
        grad_weight = torch.empty_like(weight)
        grad_bias = None if bias is None else torch.empty_like(bias)
        call(
            "bothways_add_norm_backward",
            ctypes.byref(_norm_struct(weight, bias, ctx.epsilon)),
            ctypes.byref(ctx.drop),
            sums.data_ptr(),
            moments.data_ptr(),
            grad_out.data_ptr(),
            len(sums),
            grad_x.data_ptr(),
            grad_y.data_ptr(),
            abi.FORMATS[ctx.dtype],
            grad_weight.data_ptr(),
            None if grad_bias is None else grad_bias.data_ptr(),
        )
        return grad_x, grad_y, grad_weight, grad_bias, None, None


def _norm_struct(weight: Tensor, bias: Tensor | None, epsilon: float) -> abi.LayerNorm:
    bias_address = None if bias is None else bias.data_ptr()
    return abi.LayerNorm(weight.data_ptr(), bias_address, len(weight), epsilon)
