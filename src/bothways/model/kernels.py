"""Attention over packed tokens: the reference kernel.

Each rectangle of the layout is a batch of near-equal lengths, so hardly anything is computed on padding, and no mask is needed
where lengths are equal. This kernel runs on any device, in any precision, with dropout; faster ones are held to it.

Source: Vaswani et al. 2017, section 3.2.1: softmax(QKᵀ/√d)V.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from bothways.core.layout import Layout
from bothways.model.dropout import dropout


def attend(qkv: Float[Tensor, "tokens 3 heads d"], layout: Layout, rate: float = 0.0) -> Float[Tensor, "tokens heads d"]:
    """Every token attends to all tokens of its own sequence; `rate` is the dropout on the attention probabilities."""
    parts = []
    for rectangle in layout.rectangles:
        q, k, v = rectangle.pad(qkv).permute(2, 0, 3, 1, 4)  # each (rows, heads, longest, d)
        mask = None if rectangle.keep is None else rectangle.keep[:, None, None, :]
        out = _attend_padded(q, k, v, mask, rate)
        parts.append(rectangle.unpad(out.transpose(1, 2)))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_padded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rate: float) -> Tensor:
    """`(rows, heads, longest, d)` each → the same. Written out for dropout, which torch fuses on no CPU."""
    if rate == 0 or q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=rate)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return dropout(scores.softmax(-1), rate) @ v
