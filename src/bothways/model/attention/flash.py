"""Attention by torch's own kernels: packed sequences on a GPU, and rectangles on any device.

cuDNN's kernel, which torch prefers on some GPUs, is not used: with a mask its gradients are not
finite for some lengths, and for packed sequences it is several times slower than FlashAttention.

Source: Dao 2023 (FlashAttention-2).
"""

from __future__ import annotations

import contextlib
from typing import cast

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from typing_extensions import assert_never

from bothways.model.attention.mask import AttentionView
from bothways.model.attention.patterns import Blocks, Causal, Full, Window

BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""All of torch's but cuDNN's."""


def attend_packed(
    qkv: Float[Tensor, "tokens 3 heads d"], view: AttentionView
) -> Float[Tensor, "tokens heads d"]:
    """Compute `dispatch.attend` for the calls that are `Packed`."""
    from torch.nn.attention.varlen import varlen_attn

    # The number of tokens that a query sees on its left and right; −1 for all.
    match view.pattern:
        case Full():
            window = (-1, -1)
        case Causal():
            window = (-1, 0)
        case Window(radius):
            window = (radius, radius)
        case Blocks():
            raise AssertionError("blocks are read in rectangles")
        case _:
            assert_never(view.pattern)
    q, k, v = qkv.unbind(1)
    starts, max_length = view.layout.cu_seqlens_int32, view.layout.max_seqlen
    # Sequence i is the tokens [starts[i], starts[i+1]), of queries and of keys.
    with sdpa_kernel(BACKENDS):
        outputs = varlen_attn(q, k, v, starts, starts, max_length, max_length, window_size=window)
    return cast(Tensor, outputs)


def attend_fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rate: float, scale: float | None = None
) -> Tensor:
    """Attend in rectangles `(rows, heads, longest, d)` by torch's fused kernel.

    Args:
        q, k, v: queries, keys and values.
        mask: as in `AttentionPart`, or numbers that are added to the scores.
        rate: of the dropout on probabilities.
        scale: of the scores; None for 1/√d.
    """
    # On a CPU the choice of kernels is torch's; the context would cost time for nothing.
    with sdpa_kernel(BACKENDS) if q.is_cuda else contextlib.nullcontext():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=rate, scale=scale)
