"""The reference kernels: attention over rectangles, whole or block by block.

A rectangle holds sequences of near-equal length, so hardly anything is computed on padding, and no
mask is needed where lengths are equal and all tokens attend to each other. These kernels run on any
device, in any precision, with dropout; the faster ones are tested against them.

In all signatures q, k and v are `(rows, heads, longest, d)`.

Source: Vaswani et al. 2017, section 3.2.1: softmax(QKᵀ/√d)V.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from bothways.core.batch import Rectangle
from bothways.model.attention.block_sparse import BlockSparseMask, GlobalTokens
from bothways.model.attention.flash import attend_fused
from bothways.model.kernels.dropout import dropped_product

PaddedKernel = Literal["fused", "products", "in_place"]
"""torch's fused kernel; two matrix products and a softmax; the same with scores scaled in place."""


def attend_padded(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rate: float, kernel: PaddedKernel
) -> Float[Tensor, "rows heads longest d"]:
    """Compute attention with a mask as in `AttentionPart`."""
    scale = q.shape[-1] ** -0.5
    match kernel:
        case "fused":
            return attend_fused(q, k, v, mask, rate)
        case "products":
            # Scaling queries takes (n × d) products, scaling scores (n × n).
            scores = (q * scale).contiguous() @ k.contiguous().transpose(-2, -1)
            if mask is not None:
                scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        case "in_place":
            scores = (q.contiguous() @ k.transpose(-2, -1).contiguous()).mul_(scale)
            if mask is not None:
                scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)
    return dropped_product(scores.softmax(-1), v.contiguous(), rate)


def attend_in_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sparse: BlockSparseMask,
    global_tokens: GlobalTokens | None,
    rate: float,
    kernel: PaddedKernel,
) -> Float[Tensor, "rows heads longest d"]:
    """Let every block of queries attend to the global tokens and to the blocks that it reads."""
    max_length, count = q.shape[2], sparse.blocks.shape[1]
    q, k, v = (_in_blocks(x, count, sparse.size) for x in (q, k, v))
    keys, values = (_read(x, sparse, global_tokens) for x in (k, v))
    # Blocks become the batch of one large rectangle kernel: (blocks, rows · heads, size, d).
    mask = sparse.mask.permute(2, 0, 1, 3, 4)
    if mask.shape[1:3] != (1, 1):
        mask = mask.expand(-1, *q.shape[:2], -1, -1)
    outputs = attend_padded(_blocks_first(q), keys, values, mask.flatten(1, 2), rate, kernel)
    outputs = outputs.reshape(count, *q.shape[:2], sparse.size, -1).permute(1, 2, 0, 3, 4)
    return outputs.flatten(2, 3)[:, :, :max_length]


def attend_from(
    global_tokens: GlobalTokens,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rectangle: Rectangle,
    rate: float,
    kernel: PaddedKernel,
    outputs: Tensor,
) -> Float[Tensor, "rows heads longest d"]:
    """Replace the outputs of global tokens by theirs: they attend to all tokens."""
    keys = None if rectangle.keep is None else rectangle.keep[:, None, None, :]
    global_outputs = attend_padded(_at(q, global_tokens), k, v, keys, rate, kernel).to(
        outputs.dtype
    )
    # Fillers of rows with fewer global tokens are written to an extra column, which is cut off.
    rows = torch.where(global_tokens.exists, global_tokens.slots, rectangle.longest)
    rows = rows[:, None, :, None].expand_as(global_outputs)
    return F.pad(outputs, (0, 0, 0, 1)).scatter(2, rows, global_outputs)[:, :, : rectangle.longest]


def _in_blocks(
    x: Float[Tensor, "rows heads longest d"], count: int, size: int
) -> Float[Tensor, "rows heads blocks size d"]:
    # Zeros fill up the last block: (rows, heads, 7, d) in blocks of 2 → (rows, heads, 4, 2, d).
    padded = F.pad(x, (0, 0, 0, count * size - x.shape[2]))
    return padded.reshape(*x.shape[:2], count, size, x.shape[3])


def _blocks_first(
    x: Float[Tensor, "rows heads blocks size d"],
) -> Float[Tensor, "blocks places size d"]:
    """Move blocks to the front and join rows with heads."""
    return x.permute(2, 0, 1, 3, 4).flatten(1, 2)


def _read(
    x: Float[Tensor, "rows heads blocks size d"],
    sparse: BlockSparseMask,
    global_tokens: GlobalTokens | None,
) -> Float[Tensor, "blocks places keys d"]:
    """Return the keys or values that each block of queries reads."""
    heads, count, count_read = sparse.blocks.shape
    if heads == 1:
        near = x.index_select(2, sparse.blocks.flatten())
    else:
        # Block b of head h has the number h · count + b in (rows, heads · blocks, size, d).
        numbers = sparse.blocks + count * torch.arange(heads, device=x.device)[:, None, None]
        near = x.flatten(1, 2).index_select(1, numbers.flatten())
    # (rows, heads, blocks · read, size, d): the blocks that one block reads are neighbours.
    near = near.reshape(*x.shape[:2], count, count_read * sparse.size, x.shape[-1])
    if global_tokens is None:
        return _blocks_first(near)
    front = _at(x.flatten(2, 3), global_tokens)[:, :, None].expand(-1, -1, count, -1, -1)
    return _blocks_first(torch.cat([front, near], 3))


def _at(
    x: Float[Tensor, "rows heads longest d"], global_tokens: GlobalTokens
) -> Float[Tensor, "rows heads globals d"]:
    """Return the vectors of global tokens; arbitrary ones for fillers."""
    slots = global_tokens.slots[:, None, :, None]
    return x.gather(2, slots.expand(-1, x.shape[1], -1, x.shape[3]))
