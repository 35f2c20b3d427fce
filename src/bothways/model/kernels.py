"""Attention over packed tokens: the reference kernel.

Each rectangle of the layout is a batch of near-equal lengths, so hardly anything is computed on padding, and no mask is needed
where lengths are equal and all tokens see each other. This kernel runs on any device, in any precision, with dropout; faster
ones are held to it.

Source: Vaswani et al. 2017, section 3.2.1: softmax(QKᵀ/√d)V.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import assert_never

from bothways.model.dropout import dropout
from bothways.model.view import View

Kernel = Literal["written_out", "fused"]

LONGEST_WRITTEN_OUT = {torch.bfloat16: 512, torch.float32: 256}
"""Up to this length a CPU is faster with two matrix products and a softmax than with torch's fused kernel, which works on small
tiles: on two Zen 5 cores 4 to 9 times faster at 32 to 128 tokens in bf16 with gradients, 1.2 to 3 times at 512."""


def choose(device: torch.device, dtype: torch.dtype, longest: int, rate: float) -> Kernel:
    """The kernel for one rectangle.

    | device | dropout | longest | kernel |
    |---|---|---|---|
    | CUDA | any | any | fused |
    | CPU | > 0 | any | written out: there is no fused one |
    | CPU | 0 | up to `LONGEST_WRITTEN_OUT[dtype]` | written out |
    | CPU | 0 | longer | fused |
    """
    if device.type != "cpu":
        return "fused"
    return "written_out" if rate > 0 or longest <= LONGEST_WRITTEN_OUT.get(dtype, 256) else "fused"


def attend(qkv: Float[Tensor, "tokens 3 heads d"], view: View, rate: float = 0.0) -> Float[Tensor, "tokens heads d"]:
    """Every token attends to those of its own sequence that it sees; `rate` is the dropout on the attention probabilities."""
    parts = []
    if view.turn is not None:
        qkv = view.turn(qkv)
    for rectangle, mask in zip(view.layout.rectangles, view.masks, strict=True):
        q, k, v = rectangle.pad(qkv).permute(2, 0, 3, 1, 4)  # each (rows, heads, longest, d)
        kernel = choose(qkv.device, qkv.dtype, rectangle.longest, rate)
        parts.append(rectangle.unpad(attend_padded(q, k, v, mask, rate, kernel).transpose(1, 2)))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def attend_padded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rate: float, kernel: Kernel) -> Tensor:
    """`(rows, heads, longest, d)` each, and a mask as in `View` → as q."""
    match kernel:
        case "fused":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=rate)
        case "written_out":
            q, k, v = (q * q.shape[-1] ** -0.5).contiguous(), k.contiguous(), v.contiguous()
            scores = q @ k.transpose(-2, -1)
            if mask is not None:
                scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
            return dropout(scores.softmax(-1), rate) @ v
        case _:
            assert_never(kernel)
