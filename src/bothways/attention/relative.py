"""Disentangled attention over packed tokens: scores of content and of relative position apart (He et al. 2020, section 3.1).

    score(i, j) = (q_i·k_j + q_i·K_{i−j} + k_j·Q_{i−j}) / √(d · terms)

with K and Q the keys and queries made of relative positions. Their products with all 2n − 1 distances of a sequence of n
tokens are one matrix product for all of a rectangle; `along_diagonals` reads distance i − j off it as a view. So there
is no tensor of (n × n × d), and no gather, whose backward pass adds up one element at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import assert_never

from bothways.attention.dispatch import Kernel, choose
from bothways.attention.flash import attend_fused
from bothways.attention.mask import AttentionView
from bothways.kernels.dropout import dropped_product


@dataclass(frozen=True)
class PositionTerms:
    """Attributes:
    keys: of relative positions, which queries meet: content to position; none without that term.
    queries: of relative positions, which keys meet: position to content; none without that term.
    """

    keys: Float[Tensor, "rows heads d"] | None
    queries: Float[Tensor, "rows heads d"] | None


def attend_disentangled(
    qkv: Float[Tensor, "tokens 3 heads d"],
    terms: PositionTerms,
    view: AttentionView,
    rate: float = 0.0,
) -> Float[Tensor, "tokens heads d"]:
    """As `kernels.attend`, with the terms of relative positions; the view must have distances."""
    assert view.distances is not None
    parts = []
    count = 1 + (terms.keys is not None) + (terms.queries is not None)
    scale = (qkv.shape[-1] * count) ** -0.5
    for rectangle, mask, rows in zip(
        view.layout.rectangles, view.masks, view.distances.rows, strict=True
    ):
        q, k, v = rectangle.pad(qkv).permute(2, 0, 3, 1, 4)  # each (rows, heads, longest, d)
        kernel = choose(qkv.device, qkv.dtype, rectangle.longest, rate)
        q = (q * scale).contiguous()
        near = _position_scores(q, k, terms, rows, scale)
        parts.append(
            rectangle.unpad(_attend_padded(q, k, v, near, mask, rate, kernel).transpose(1, 2))
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_padded(
    q: Tensor, k: Tensor, v: Tensor, near: Tensor, mask: Tensor | None, rate: float, kernel: Kernel
) -> Tensor:
    """`(rows, heads, n, d)` each, the queries scaled; scores to add `(rows, heads, n, n)`; a mask as in `View`."""
    lowest = torch.finfo(near.dtype).min
    match kernel:
        case "fused":
            bias = near if mask is None else near.masked_fill(~mask, lowest)
            return attend_fused(q, k, v, bias.to(q.dtype), rate, scale=1.0)
        case "written_out" | "in_place":
            scores = q @ k.contiguous().transpose(-2, -1) + near
            if mask is not None:
                scores = scores.masked_fill(~mask, lowest)
            return dropped_product(scores.softmax(-1), v.contiguous(), rate)
        case _:
            assert_never(kernel)


def _position_scores(
    q: Tensor, k: Tensor, terms: PositionTerms, rows: Int[Tensor, " distances"], scale: float
) -> Tensor:
    """q, scaled, and k `(rows, heads, n, d)` → what relative positions add to the scores `(rows, heads, n, n)`."""
    parts = []
    if terms.keys is not None:
        parts.append(along_diagonals(_products(q, terms.keys[rows])))
    if terms.queries is not None:
        # By key, then by query: its distance grows with the query's place, so the order of distances is turned round.
        parts.append(
            along_diagonals(_products(k, terms.queries[rows.flip(0)] * scale)).transpose(-2, -1)
        )
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _products(
    x: Float[Tensor, "rows heads n d"], y: Float[Tensor, "distances heads d"]
) -> Float[Tensor, "rows heads n distances"]:
    """All with all, head by head: one product each, so that what is the same for all rows is not copied for each."""
    rows, heads, n, d = x.shape
    flat = x.transpose(0, 1).reshape(heads, rows * n, d) @ y.permute(1, 2, 0)
    return flat.view(heads, rows, n, -1).transpose(0, 1)


def along_diagonals(x: Float[Tensor, "*rows n distances"]) -> Float[Tensor, "*rows n n"]:
    """Element (i, j) is (i, n − 1 − i + j) of `x`, which has 2n − 1 columns: each row begins one place further left."""
    n = x.shape[-2]
    if n == 1:
        return x
    # Rows of 2n − 2 places in place of 2n − 1, from the place of the first row's diagonal on.
    width = 2 * n - 2
    return x.flatten(-2)[..., n - 1 : n - 1 + n * width].view(*x.shape[:-2], n, width)[..., :n]
