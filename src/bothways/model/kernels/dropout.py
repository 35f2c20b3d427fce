"""Dropout, and the LayerNorm of a residual sum: PyTorch's results, several times faster on a CPU.

Dropout is made from 16-bit random numbers, four to a draw. On a CPU, PyTorch draws one Bernoulli
number per element, which takes longer than the matrix products of a small encoder; here its
generator gives only the seed of each draw. The rate is rounded to a multiple of 1/65536 below 1;
kept elements are scaled by the exact inverse, so the expectation is the input itself.

| device | elements | gradients | dropout |
|---|---|---|---|
| CPU | ≤ `TUNING.dropout_mask_elements`, or no gradients | any | a mask, kept for backward |
| CPU | more | yes | a mask, drawn again in the backward pass from its seed |
| any other | | | PyTorch's |

`add_norm` computes `norm(x + dropout(y, rate))`, for training and evaluation:

| device | `runs_on` | x | y | norm | by |
|---|---|---|---|---|---|
| CPU | yes | fp32 | fp32 or bf16, of equal shape | LayerNorm of its width, in fp32 | one kernel |
| any other | | | | | PyTorch's operators |

The kernel is one pass over memory forward and one back, and keeps no dropout mask: the dropout is a
hash of seed and position, which the backward pass computes again.

Sources: Srivastava et al. 2014; Ba et al. 2016; Vaswani et al. 2017, section 5.4, "residual
dropout".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bothways.core.runtime.tuning import TUNING
from bothways.model.kernels import abi
from bothways.model.kernels.library import FORMATS, call_kernel, runs_on

STEPS = 2**16


def draw_seed() -> int:
    """Return a seed for a mask, from PyTorch's generator."""
    return int(torch.randint(2**63 - 1, (), device="cpu"))


def _dropped_steps(rate: float) -> int:
    return min(round(rate * STEPS), STEPS - 1)


def draw_dropout(rate: float) -> abi.DropoutStruct:
    """Return a dropout for compiled kernels, with a new seed; without one for rate 0."""
    # The kernels compare 32 random bits with a threshold: rate · 2³², in the same 65536 steps as
    # `keep_mask`, so that both have the same distribution.
    dropped = _dropped_steps(rate)
    seed = draw_seed() if dropped else 0
    return abi.DropoutStruct(seed, dropped * (2**32 // STEPS), STEPS / (STEPS - dropped))


NO_DROPOUT = abi.DropoutStruct(0, 0, 1.0)
"""For compiled kernels without dropout. Nobody changes it: structs hold a copy."""


def keep_mask(x: Tensor, rate: float, seed: int) -> Tensor:
    """Return a tensor on the CPU like `x`: 0 with probability `rate`, else 1 / (1 − rate)."""
    dropped = _dropped_steps(rate)
    draws = np.random.SFC64(seed).random_raw(math.ceil(x.numel() / 4)).view(np.int16)
    numbers = torch.from_numpy(draws)[: x.numel()].view(x.shape).float()  # in [−32768, 32767]
    # Positive for kept elements, and at least the scale; comparing integers takes five times as
    # long.
    scale = STEPS / (STEPS - dropped)
    return numbers.add_(STEPS // 2 - dropped + 0.5).mul_(2 * scale).clamp_(0, scale).to(x.dtype)


def dropout(x: Tensor, rate: float) -> Tensor:
    """Return `x` with elements set to 0 with probability `rate`, the others scaled up.

    For rate 0 that is `x` itself.
    """
    if rate == 0:
        return x
    if x.device.type != "cpu":
        return nn.functional.dropout(x, rate)
    if not _is_large(x):
        return x * keep_mask(x, rate, draw_seed())
    result: Tensor = _Dropout.apply(x, rate)  # type: ignore[no-untyped-call]
    return result


def dropped_product(
    x: Float[Tensor, "*rows n m"], y: Float[Tensor, "*rows m d"], rate: float
) -> Float[Tensor, "*rows n d"]:
    """Return `dropout(x, rate) @ y`."""
    if rate == 0 or x.device.type != "cpu" or not _is_large(x):
        return dropout(x, rate) @ y
    result: Tensor = _DroppedProduct.apply(x, y, rate)  # type: ignore[no-untyped-call]
    return result


def _is_large(x: Tensor) -> bool:
    """Return True if drawing the mask again is worth the memory."""
    return x.numel() > TUNING.dropout_mask_elements and x.requires_grad and torch.is_grad_enabled()


class Mask(NamedTuple):
    """A dropout, as a backward pass needs it.

    Attributes:
        factors: of each element; None for rate 0, and if they are drawn again from the seed.
    """

    factors: Tensor | None
    rate: float
    seed: int

    def like(self, x: Tensor) -> Mask:
        """Return the same mask with its factors, for elements like `x`."""
        missing = self.factors is None and self.rate > 0
        return self._replace(factors=keep_mask(x, self.rate, self.seed)) if missing else self

    def times(self, x: Tensor) -> Tensor:
        """Return `x` times the factors."""
        return x if self.factors is None else x * self.factors


def drop(x: Tensor, rate: float) -> tuple[Tensor, Mask]:
    """Return `x` after dropout on a CPU, and what a backward pass has to keep of it."""
    seeded = Mask(None, rate, draw_seed() if rate else 0)
    mask = seeded.like(x)
    return mask.times(x), mask if x.numel() <= TUNING.dropout_mask_elements else seeded


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float) -> Tensor:
        """Return `x` after dropout, with a mask that is not kept."""
        ctx.rate, ctx.seed = rate, draw_seed()
        return keep_mask(x, rate, ctx.seed).mul_(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Draw the mask again and return the gradient for `x`."""
        return keep_mask(grad, ctx.rate, ctx.seed).mul_(grad), None


class _DroppedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, rate: float) -> Tensor:
        ctx.rate, ctx.seed = rate, draw_seed()
        ctx.save_for_backward(x, y)
        return keep_mask(x, rate, ctx.seed).mul_(x) @ y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Draw the mask again and return the gradients for `x` and `y`."""
        x, y = ctx.saved_tensors
        # Autocast multiplies in a smaller dtype than that of x.
        factors, dtype = keep_mask(x, ctx.rate, ctx.seed), grad.dtype
        grad_x = (grad @ y.to(dtype).transpose(-2, -1)).to(x.dtype).mul_(factors)
        grad_y = (factors.mul_(x).to(dtype).transpose(-2, -1) @ grad).to(y.dtype)
        return grad_x, grad_y, None


class Dropout(nn.Module):
    """`dropout` in training, nothing in evaluation."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, in training after dropout."""
        return dropout(x, self.rate if self.training else 0.0)


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
        x, y, weight = x.contiguous(), y.contiguous(), weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        out, drop = torch.empty_like(x), draw_dropout(rate)
        # Without a backward pass the sums may be overwritten by the output.
        sums = torch.empty_like(x) if any(ctx.needs_input_grad) else out
        # Mean and 1/√(variance + ε) of each row: the backward pass reads them instead of summing
        # over the row again.
        moments = x.new_empty(len(x), 2)
        inputs = _norm_struct(weight, bias, epsilon), drop, x, y, FORMATS[y.dtype], len(x)
        call_kernel("bothways_add_norm", *inputs, sums, moments, out)
        ctx.drop, ctx.epsilon, ctx.dtype = drop, epsilon, y.dtype
        ctx.save_for_backward(sums, moments, weight, bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        sums, moments, weight, bias = ctx.saved_tensors
        grad_out = grad_out.contiguous()
        # With z = x + dropout(y), n = (z − mean) / deviation and g = grad_out · weight:
        #     grad_x = (g − mean(g) − n · mean(g · n)) / deviation
        #     grad_y = grad_x · (the factors of the dropout)
        grad_x, grad_y = torch.empty_like(sums), torch.empty_like(sums, dtype=ctx.dtype)
        grad_weight = torch.empty_like(weight)
        grad_bias = None if bias is None else torch.empty_like(bias)
        norm, rows = _norm_struct(weight, bias, ctx.epsilon), len(sums)
        inputs, dtype = (norm, ctx.drop, sums, moments, grad_out, rows), FORMATS[ctx.dtype]
        outputs = grad_x, grad_y, dtype, grad_weight, grad_bias
        call_kernel("bothways_add_norm_backward", *inputs, *outputs)
        return grad_x, grad_y, grad_weight, grad_bias, None, None


def _norm_struct(weight: Tensor, bias: Tensor | None, epsilon: float) -> abi.LayerNorm:
    bias_address = None if bias is None else bias.data_ptr()
    return abi.LayerNorm(weight.data_ptr(), bias_address, len(weight), epsilon)
