"""Attention probabilities, for inspection: computed sequence by sequence, without dropout."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from bothways.core.errors import ConfigError
from bothways.model.attention.mask import AttentionPart, AttentionView
from bothways.model.attention.patterns import Blocks
from bothways.model.attention.relative import PositionTerms, position_scores


def attention_probabilities(
    qkv: Float[Tensor, "tokens 3 heads d"],
    view: AttentionView,
    terms: PositionTerms | None = None,
    global_qkv: Float[Tensor, "tokens 3 heads d"] | None = None,
) -> list[Float[Tensor, "heads _ _"]]:
    """Return `(heads, queries, keys)` for each sequence, in its own length.

    Arguments are those of `dispatch.attend` and `relative.attend_relative`.

    Raises:
        ConfigError: the pattern reads random blocks, whose probabilities are not one per pair.
    """
    if isinstance(view.pattern, Blocks) and view.layout.max_seqlen > view.pattern.dense:
        message = f"attentions of block-sparse sequences longer than {view.pattern.dense} tokens "
        message += "are not available: some pairs of tokens are read twice"
        raise ConfigError(message, where="encoder.patterns")
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
        keep = segment.rectangle.keep
        max_length = segment.rectangle.longest
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
