"""Attention over packed tokens with scores of relative positions.

    score(i, j) = (q_i·k_j + q_i·K_{i−j} + k_j·Q_{i−j}) / √(d · terms) + b_{i−j}

K and Q are keys and queries made from relative positions. Their products with all 2n − 1 distances
of a sequence of n tokens are one matrix product per rectangle; `along_diagonals` reads distance i
− j from it as a view. So there is no tensor of (n × n × d) and no gather, whose backward pass adds
one element at a time.

Source: He et al. 2020, section 3.1; for b, Raffel et al. 2020, section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bothways.model.attention.dispatch import AttentionCall, padded_kernel
from bothways.model.attention.flash import attend_fused
from bothways.model.attention.mask import AttentionView
from bothways.model.attention.reference import PaddedKernel
from bothways.model.kernels.dropout import dropped_product


@dataclass(frozen=True)
class PositionTerms:
    """What relative positions add to scores.

    Attributes:
        keys: keys that the queries of tokens meet, content to position; None without that term.
        queries: queries that the keys of tokens meet, position to content; None without it.
        bias: a number for each head; None without it.
    """

    keys: Float[Tensor, "rows heads d"] | None = None
    queries: Float[Tensor, "rows heads d"] | None = None
    bias: Float[Tensor, "rows heads"] | None = None

    @property
    def count(self) -> int:
        """The products that a score is the sum of, with that of content."""
        return 1 + (self.keys is not None) + (self.queries is not None)


def attend_relative(
    qkv: Float[Tensor, "tokens 3 heads d"],
    terms: PositionTerms,
    view: AttentionView,
    rate: float = 0.0,
) -> Float[Tensor, "tokens heads d"]:
    """Compute `dispatch.attend` with scores of relative positions; the view must have distances."""
    assert view.distances is not None
    outputs = []
    scale = (qkv.shape[-1] * terms.count) ** -0.5
    for segment, rows in zip(view.parts, view.distances.rows, strict=True):
        rectangle = segment.rectangle
        q, k, v = rectangle.pad(qkv).permute(2, 0, 3, 1, 4)  # each (rows, heads, longest, d)
        # Queries are scaled below, so no kernel scales in place: the choice is that of training.
        call = AttentionCall(
            qkv.device, qkv.dtype, qkv.shape[-1], rectangle.longest, dropout=rate, learning=True
        )
        q = (q * scale).contiguous()
        bias = position_scores(q, k, terms, rows, scale)
        result = _attend_padded(q, k, v, bias, segment.mask, rate, padded_kernel(call))
        outputs.append(rectangle.unpad(result.transpose(1, 2)))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_padded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Float[Tensor, "*rows heads n n"],
    mask: Tensor | None,
    rate: float,
    kernel: PaddedKernel,
) -> Float[Tensor, "rows heads n d"]:
    """Attend with scaled queries and a bias on the scores."""
    lowest = torch.finfo(bias.dtype).min
    if kernel == "fused":
        bias = bias if mask is None else bias.masked_fill(~mask, lowest)
        return attend_fused(q, k, v, bias.to(q.dtype), rate, scale=1.0)
    scores = q @ k.contiguous().transpose(-2, -1) + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, lowest)
    return dropped_product(scores.softmax(-1), v.contiguous(), rate)


def position_scores(
    q: Float[Tensor, "rows heads n d"],
    k: Float[Tensor, "rows heads n d"],
    terms: PositionTerms,
    rows: Int[Tensor, " distances"],
    scale: float,
) -> Float[Tensor, "*rows heads n n"]:
    """Compute the terms that relative positions add to the scores of scaled queries.

    A bias alone is the same for all rows of the rectangle, and has one.
    """
    scores = []
    if terms.keys is not None:
        scores.append(along_diagonals(_products(q, terms.keys[rows])))
    if terms.queries is not None:
        # Rows of this product are keys. The distance query − key grows with the query, so the order
        # of the distances is reversed, and the result transposed to queries by keys.
        products = _products(k, terms.queries[rows.flip(0)] * scale)
        scores.append(along_diagonals(products).transpose(-2, -1))
    if terms.bias is not None:
        heads, n = terms.bias.shape[1], q.shape[2]
        biases = terms.bias[rows].to(q.dtype).T[None, :, None].expand(1, heads, n, len(rows))
        scores.append(along_diagonals(biases))
    return scores[0] if len(scores) == 1 else scores[0] + scores[1]


def _products(
    x: Float[Tensor, "rows heads n d"], y: Float[Tensor, "distances heads d"]
) -> Float[Tensor, "rows heads n distances"]:
    """Multiply all vectors by all distances, head by head.

    Rows are joined with tokens, so that the vectors of distances are not copied for each row.
    """
    rows, heads, n, d = x.shape
    flat = x.transpose(0, 1).reshape(heads, rows * n, d) @ y.permute(1, 2, 0)
    return flat.view(heads, rows, n, -1).transpose(0, 1)


def along_diagonals(x: Float[Tensor, "*rows n distances"]) -> Float[Tensor, "*rows n n"]:
    """Return element (i, n − 1 − i + j) of `x` at (i, j), as a view; `x` has 2n − 1 columns.

    Example with n = 2, columns for the distances 1, 0, −1:

        a b c        b c
        d e f   →    d e
    """
    n = x.shape[-2]
    if n == 1:
        return x
    # Each row begins one place further left. So read the memory in rows of 2n − 2 places instead of
    # 2n − 1, from the first row's diagonal (place n − 1) on, and keep the first n of each.
    width = 2 * n - 2
    return x.flatten(-2)[..., n - 1 : n - 1 + n * width].view(*x.shape[:-2], n, width)[..., :n]
