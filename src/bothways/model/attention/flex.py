"""Windows with global tokens on a GPU, by torch's FlexAttention, over packed sequences.

Only pairs of blocks of tokens in which a query attends to a key are computed. There is no dropout.
On a CPU, where FlexAttention has no gradients, it serves the tests.

Source: Beltagy et al. 2020, section 3.1; Dong et al. 2024 (FlexAttention).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from bothways.core.batch import Layout
from bothways.core.runtime.devices import compiled

BLOCK = 128
"""Tokens of a block."""

Sees = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Row, head, query and key → whether the query attends to the key."""


class FlexWindow:
    """A window over packed sequences, with global tokens.

    Args:
        layout: the geometry of the batch.
        radius: of the window, in tokens.
        is_global: True for the global tokens.
    """

    def __init__(self, layout: Layout, radius: int, is_global: Bool[Tensor, " tokens"]) -> None:
        owner, tokens = layout.sequence_ids, layout.tokens
        starts, ends = layout.cu_seqlens[owner], layout.cu_seqlens[owner + 1] - 1
        position = torch.arange(tokens, device=owner.device)
        self.global_tokens = global_tokens = is_global.nonzero()[:, 0]

        # Blocks of keys within the window of each block of queries …
        needed = _reached(
            torch.maximum(position - radius, starts), torch.minimum(position + radius, ends), tokens
        )
        # … and the block of each global token, for all blocks of queries of its sequence.
        numbers = torch.arange(len(needed), device=owner.device)
        sees = (numbers >= starts[global_tokens, None] // BLOCK) & (
            numbers <= ends[global_tokens, None] // BLOCK
        )
        is_in_block = (global_tokens // BLOCK)[:, None] == numbers
        # Whether any global token is seen from one block and lies in another, as a product: an
        # array of (globals, queries, keys) would take gigabytes for a large batch.
        needed |= sees.mT.float() @ is_in_block.float() > 0
        self.near = _block_mask(
            needed,
            lambda _, head, q, k: (
                (owner[q] == owner[k]) & (((q - k).abs() <= radius) | is_global[k])
            ),
            tokens,
            tokens,
        )
        # The global tokens themselves, as queries of their own, attend to all of their sequence.
        self.far = _block_mask(
            _reached(starts[global_tokens], ends[global_tokens], tokens),
            lambda _, head, q, k: owner[global_tokens[q]] == owner[k],
            len(global_tokens),
            tokens,
        )

    def __call__(
        self,
        qkv: Float[Tensor, "tokens 3 heads d"],
        global_qkv: Float[Tensor, "tokens 3 heads d"] | None,
    ) -> Float[Tensor, "tokens heads d"]:
        """Compute `dispatch.attend` without dropout."""
        q, k, v = qkv.unbind(1)
        outputs = _attend(q, k, v, self.near)
        if not len(self.global_tokens):
            return outputs
        q, k, v = (qkv if global_qkv is None else global_qkv).unbind(1)
        global_outputs = _attend(q[self.global_tokens], k, v, self.far)
        return outputs.index_copy(0, self.global_tokens, global_outputs.to(outputs.dtype))


def _reached(
    low: Int[Tensor, " queries"], high: Int[Tensor, " queries"], tokens: int
) -> Bool[Tensor, "blocks others"]:
    """Return the blocks of keys between the lowest and highest position of each query block."""
    count = -(-len(low) // BLOCK)
    numbers = torch.arange(-(-tokens // BLOCK), device=low.device)
    if not count:
        return torch.zeros(0, len(numbers), dtype=torch.bool, device=low.device)
    # The last block of queries is filled up with copies of the last query.
    filled = torch.arange(count * BLOCK, device=low.device).clamp(max=len(low) - 1)
    lowest, highest = low[filled].view(count, -1).amin(1), high[filled].view(count, -1).amax(1)
    return (numbers >= lowest[:, None] // BLOCK) & (numbers <= highest[:, None] // BLOCK)


def _block_mask(
    needed: Bool[Tensor, "blocks others"], sees: Sees, queries: int, keys: int
) -> BlockMask:
    """Build FlexAttention's mask from the blocks that are read: their count and their numbers."""
    counts = needed.sum(1, dtype=torch.int32)[None, None]
    order = needed.int().argsort(dim=1, descending=True, stable=True).to(torch.int32)[None, None]
    return BlockMask.from_kv_blocks(
        counts, order, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(queries, keys)
    )


def _attend(
    q: Float[Tensor, "queries heads d"],
    k: Float[Tensor, "keys heads d"],
    v: Float[Tensor, "keys heads d"],
    mask: BlockMask,
) -> Float[Tensor, "queries heads d"]:
    kernel: Callable[..., Any] = flex_attention
    if q.is_cuda:
        kernel = compiled(kernel)
    outputs = kernel(*(x.transpose(0, 1)[None] for x in (q, k, v)), block_mask=mask)
    result: Tensor = outputs[0].transpose(0, 1)
    return result
