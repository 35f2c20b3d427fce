"""Attention over packed sequences by a compiled kernel.

| tensors | `library.supports_heads` | gradients, dropout | by |
|---|---|---|---|
| fp32 | yes | any | this kernel |
| bf16, with AMX | yes | any | this kernel |
| bf16, without AMX | yes | neither | this kernel |
| any other | | | `attention.dispatch` chooses PyTorch's operators |

Nothing is padded, and no more scores than those of a few queries are in memory at a time. The
backward pass computes the probabilities again from queries, keys and the log-sum-exp of each row,
and draws the dropout again from its seed: no probability is kept (Dao et al. 2022, algorithm 4).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from bothways.core.batch import Layout
from bothways.model.kernels import abi
from bothways.model.kernels.dropout import NO_DROPOUT, draw_dropout
from bothways.model.kernels.library import FORMATS, call_kernel


def packed_attention(
    qkv: Float[Tensor, "tokens 3 heads d"], layout: Layout, dropout: float = 0.0
) -> Float[Tensor, "tokens heads d"]:
    """Return softmax(QKᵀ/√d)V of each sequence, computed in fp32; in bf16 with AMX, in bf16.

    Differentiable once.

    Args:
        qkv: queries, keys and values, as `library.supports_heads` allows.
        layout: the sequences.
        dropout: rate of the dropout of attention probabilities.

    Raises:
        ValueError: the layout does not fit the tensor.
        RuntimeError: gradients in bf16, without AMX.
    """
    if dropout or qkv.requires_grad:
        apply: Callable[..., Tensor] = _PackedAttention.apply
        return apply(qkv, layout, dropout)
    # (tokens, 3, heads, d) → (tokens, heads, d); the projection's output is read where it is, so
    # that queries, keys and values are never copied apart.
    qkv = qkv.contiguous()
    out = qkv.new_empty(len(qkv), *qkv.shape[2:])
    batch = _batch_of(qkv, layout, NO_DROPOUT)
    call_kernel("bothways_attention", batch, out, None)
    return out


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, layout: Layout, dropout: float) -> Tensor:
        qkv, drop = qkv.contiguous(), draw_dropout(dropout)
        out = qkv.new_empty(len(qkv), *qkv.shape[2:])
        # log Σ exp(score) of each row, (tokens, heads): with it P = exp(score − lse), without a
        # second pass over the row.
        lse = qkv.new_empty(out.shape[:2], dtype=torch.float32)
        call_kernel("bothways_attention", _batch_of(qkv, layout, drop), out, lse)
        # `drop` holds the seed: the backward pass hashes the same dropout from it.
        ctx.layout, ctx.drop = layout, drop
        ctx.save_for_backward(qkv, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None, None]:
        qkv, out, lse = ctx.saved_tensors
        grad_out, grad_qkv = grad_out.to(qkv.dtype).contiguous(), torch.empty_like(qkv)
        # `out` gives D = Σ_f grad_out · out, the correction of the softmax's gradient.
        batch = _batch_of(qkv, ctx.layout, ctx.drop)
        call_kernel("bothways_attention_backward", batch, out, grad_out, lse, grad_qkv)
        return grad_qkv, None, None


def attention_batch(
    layout: Layout, tokens: int, heads: int, head_size: int, dtype: torch.dtype
) -> abi.AttentionBatch:
    """Return a batch for the kernels, without queries, keys and values, and without dropout.

    Args:
        layout: the sequences; it has to outlive the batch.
        tokens: the rows of the tensor, which the kernels compare with the layout.
        dtype: of the attention.

    Raises:
        ValueError: the offsets are not contiguous int64 numbers on the CPU.
    """
    offsets = layout.cu_seqlens
    readable = offsets.dtype is torch.int64 and offsets.is_contiguous() and offsets.is_cpu
    if not readable:
        message = f"{offsets.dtype} on {offsets.device}"
        raise ValueError(f"cu_seqlens has to be contiguous int64 on the CPU, not {message}")
    sizes = (tokens, layout.sequences, heads, head_size)
    return abi.AttentionBatch(None, offsets.data_ptr(), *sizes, NO_DROPOUT, FORMATS[dtype])


def _batch_of(qkv: Tensor, layout: Layout, drop: abi.DropoutStruct) -> abi.AttentionBatch:
    tokens, _, heads, head_size = qkv.shape
    batch = attention_batch(layout, tokens, heads, head_size, qkv.dtype)
    batch.qkv, batch.drop = qkv.data_ptr(), drop
    return batch
