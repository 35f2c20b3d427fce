"""Attention by torch's own kernels: packed sequences on a GPU, and rectangles on any device.

cuDNN's kernel, which torch prefers on some GPUs, is not used: with a mask its gradients are not
finite for some lengths, and for packed sequences it is several times slower than FlashAttention.

Source: Dao 2023 (FlashAttention-2).
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from typing_extensions import assert_never

from bothways.model.attention.mask import AttentionView, RotaryTables
from bothways.model.attention.patterns import Blocks, Causal, Full, Window

BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""All of torch's but cuDNN's."""


class PackedView(NamedTuple):
    """What the kernel for packed sequences reads of a view: so little that torch can compile it.

    Attributes:
        starts: sequence i is the tokens `[starts[i], starts[i + 1])`, in 32 bits.
        max_seqlen: the longest sequence, in tokens.
        window: the tokens that a query sees on its left and on its right; -1 for all.
        rotary: the rotary positions; None without them.
    """

    starts: Int[Tensor, " starts"]
    max_seqlen: int
    window: tuple[int, int]
    rotary: RotaryTables | None

    @property
    def has_global_tokens(self) -> bool:
        """False, see `AttentionView.has_global_tokens`."""
        return False

    @classmethod
    def of(cls, view: AttentionView) -> PackedView:
        """Return this of a view without global tokens."""
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
        return cls(view.layout.cu_seqlens_int32, view.layout.max_seqlen, window, view.rotary)


def attend_packed(
    qkv: Float[Tensor, "tokens 3 heads d"], view: PackedView, rate: float = 0.0
) -> Float[Tensor, "tokens heads d"]:
    """Compute `dispatch.attend` for the calls that are "packed", but for the rotation."""
    q, k, v = qkv.unbind(1)
    window_left, window_right = view.window
    # torch's `varlen_attn` is this operator without dropout.
    outputs: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, view.starts, view.starts, view.max_seqlen, view.max_seqlen, rate,
        view.window == (-1, 0), False, window_size_left=window_left, window_size_right=window_right,
    )[0]  # fmt: skip
    return outputs


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
