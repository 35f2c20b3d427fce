"""Attention on a GPU by torch's own kernels: packed sequences as they lie, or rectangles.

Both leave out cuDNN's, which torch prefers on some GPUs: with a mask its gradients are not finite for some lengths, and for
packed sequences it is several times slower than flash attention. None of this has been run on a GPU yet: on a CPU it is held to
the reference with a stand-in for the kernel, and to the kernel's shapes and types.

Source: Dao 2023 (FlashAttention-2).
"""

from __future__ import annotations

import contextlib
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from typing_extensions import assert_never

from bothways.attention.mask import AttentionView
from bothways.attention.patterns import Blocks, Causal, Full, Pattern, Window
from bothways.runtime.devices import has_varlen

BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""All of torch's but cuDNN's."""

WIDEST = 256
"""Features of a head, at most, and in steps of 8: what flash attention computes."""


def is_packed(
    device: torch.device, dtype: torch.dtype, size: int, rate: float, view: AttentionView
) -> bool:
    """Whether a layer reads packed sequences as they lie (`attend_packed`), without rectangles and padding.

    | device | dtype | features of a head | dropout | pattern | packed |
    |---|---|---|---|---|---|
    | CUDA, as `has_varlen` says | bf16 or fp16 | 8, 16 … 256 | 0 | full, causal, window | yes |
    | the same | the same | the same | 0 | blocks, or a window with global tokens | no |
    | any other device, dtype, number of features or rate | | | | | no |
    """
    if (
        rate > 0
        or dtype not in {torch.bfloat16, torch.float16}
        or size % 8
        or size > WIDEST
        or not has_varlen(device)
    ):
        return False
    return all(
        part.global_tokens is None and not isinstance(part.pattern, Blocks) for part in view.parts
    )


def attend_packed(
    qkv: Float[Tensor, "tokens 3 heads d"], view: AttentionView
) -> Float[Tensor, "tokens heads d"]:
    """As `kernels.attend`, for what `is_packed` allows."""
    from torch.nn.attention.varlen import varlen_attn

    (q, k, v), cu_seqlens, max_seqlen = (
        qkv.unbind(1),
        view.layout.cu_seqlens_int32,
        view.layout.max_seqlen,
    )
    with sdpa_kernel(BACKENDS):
        found = varlen_attn(
            q,
            k,
            v,
            cu_seqlens,
            cu_seqlens,
            max_seqlen,
            max_seqlen,
            window_size=_reach(view.pattern),
        )
    return cast(Tensor, found)


def _reach(pattern: Pattern) -> tuple[int, int]:
    """How many tokens a query sees to its left and right; −1 for all."""
    match pattern:
        case Full():
            return (-1, -1)
        case Causal():
            return (-1, 0)
        case Window(radius):
            return (radius, radius)
        case Blocks():
            raise AssertionError("blocks are read in rectangles")
        case _:
            assert_never(pattern)


def attend_fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rate: float, scale: float | None = None
) -> Tensor:
    """`(rows, heads, longest, d)` each → as q; on any device.

    Args:
        mask: as in `View`, or numbers that are added to the scores.
        scale: of the scores; none for 1/√d.
    """
    with sdpa_kernel(BACKENDS) if q.is_cuda else contextlib.nullcontext():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=rate, scale=scale)
