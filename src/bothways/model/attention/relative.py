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

from bothways.core.errors import ConfigError
from bothways.model.attention.dispatch import AttentionCall, padded_kernel
from bothways.model.attention.mask import AttentionPart, AttentionView
from bothways.model.attention.patterns import Blocks
from bothways.model.attention.reference import attend_padded


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
        q, k, v = segment.rectangle.pad(qkv).permute(2, 0, 3, 1, 4)  # (rows, heads, longest, d)
        size, length = qkv.shape[-1], segment.rectangle.longest
        call = AttentionCall(qkv.device, qkv.dtype, size, length, dropout=rate, learning=True)
        q = (q * scale).contiguous()
        bias = position_scores(q, k, terms, rows, scale)
        result = attend_padded(q, k, v, segment.mask, rate, padded_kernel(call), bias)
        outputs.append(segment.rectangle.unpad(result.transpose(1, 2)))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


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


def attention_probabilities(
    qkv: Float[Tensor, "tokens 3 heads d"],
    view: AttentionView,
    terms: PositionTerms | None = None,
    global_qkv: Float[Tensor, "tokens 3 heads d"] | None = None,
) -> list[Float[Tensor, "heads _ _"]]:
    """Return `(heads, queries, keys)` for each sequence, in its own length, without dropout.

    Arguments are those of `dispatch.attend` and `attend_relative`.

    Raises:
        ConfigError: the pattern reads random blocks, whose probabilities are not one per pair.
    """
    if isinstance(view.pattern, Blocks) and view.layout.max_seqlen > view.pattern.dense:
        raise ConfigError(
            f"attentions of block-sparse sequences longer than {view.pattern.dense} tokens are "
            "not available: some pairs of tokens are read twice",
            where="encoder.patterns",
        )
    if view.rotary is not None:
        qkv = view.rotary(qkv)
        global_qkv = None if global_qkv is None else view.rotary(global_qkv)
    result = []
    for at, segment in enumerate(view.parts):
        rows = None if view.distances is None else view.distances.rows[at]
        shares = _shares(qkv, segment, terms, rows)
        if segment.global_tokens is not None and global_qkv is not None:
            # The rows of global tokens come from their own queries and keys.
            slots, exists = segment.global_tokens.slots, segment.global_tokens.exists
            global_rows = _shares(global_qkv, segment, None, None, full=True)
            row, column = exists.nonzero(as_tuple=True)
            shares = shares.clone()  # the backward pass of softmax reads its output
            shares[row, :, slots[row, column]] = global_rows[row, :, slots[row, column]]
        # Cut each row of the rectangle to the length of its sequence.
        keep, max_length = segment.rectangle.keep, segment.rectangle.longest
        lengths = [max_length] * len(shares) if keep is None else keep.sum(1).tolist()
        result += [share[:, :n, :n] for share, n in zip(shares, lengths, strict=True)]
    return result


def _shares(
    qkv: Tensor,
    segment: AttentionPart,
    terms: PositionTerms | None,
    rows: Tensor | None,
    full: bool = False,
) -> Float[Tensor, "rows heads longest longest"]:
    """Return the softmax of a rectangle's scores; `full` lets every query see all keys."""
    q, k, _ = segment.rectangle.pad(qkv).permute(2, 0, 3, 1, 4)
    # Each term adds a score of the same variance: √(d · terms) keeps the sum at 1.
    count = 1 if terms is None else terms.count
    scale = (q.shape[-1] * count) ** -0.5
    scores = (q * scale) @ k.mT
    if terms is not None and rows is not None:
        scores = scores + position_scores(q * scale, k, terms, rows, scale)
    keep = segment.rectangle.keep
    mask = (None if keep is None else keep[:, None, None]) if full else segment.mask
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    result: Tensor = scores.softmax(-1)
    return result
