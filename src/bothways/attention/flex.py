"""Windows with global tokens on a GPU, by torch's FlexAttention: packed sequences as they lie, without rectangles.

Of all pairs of blocks of tokens only those are read in which somebody sees somebody, and of dropout there is none. None of this
has been run on a GPU yet: on a CPU, where FlexAttention has no gradients, it is held to the reference kernel.

Source: Beltagy et al. 2020, section 3.1; Dong et al. 2024 (Flex Attention).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from bothways.core.layout import Layout

BLOCK = 128
"""Tokens of a block."""

PROGRAMS = 64
"""So many are compiled, at most, for numbers of tokens that are 1 or alike by chance, for each precision, with and without
gradients: some seven each. By torch's own limit, 8 in all, what comes after would be computed for all pairs of tokens."""

Sees = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of row, head, query and key, whether the query sees the key."""


class FlexWindow:
    """A window over packed sequences, in which some tokens see all of their sequence and are seen by all of it.

    Args:
        layout: the geometry of the batch.
        radius: of the window, in tokens.
        named: the global tokens.
    """

    def __init__(self, layout: Layout, radius: int, named: Bool[Tensor, " tokens"]) -> None:
        owner, tokens = layout.sequence_ids, layout.tokens
        first, last = layout.cu_seqlens[owner], layout.cu_seqlens[owner + 1] - 1
        place = torch.arange(tokens, device=owner.device)
        self.named = places = named.nonzero()[:, 0]

        # Blocks that a window reaches, and those of global tokens for all blocks of their sequence.
        read = _reached(
            torch.maximum(place - radius, first), torch.minimum(place + radius, last), tokens
        )
        numbers = torch.arange(len(read), device=owner.device)
        sees = (numbers >= first[places, None] // BLOCK) & (numbers <= last[places, None] // BLOCK)
        held = (places // BLOCK)[:, None] == numbers
        read |= (sees[:, :, None] & held[:, None]).any(0)
        self.near = _block_mask(
            read,
            lambda _, head, q, k: (owner[q] == owner[k]) & (((q - k).abs() <= radius) | named[k]),
            tokens,
            tokens,
        )
        read = _reached(first[places], last[places], tokens)
        self.far = _block_mask(
            read, lambda _, head, q, k: owner[places[q]] == owner[k], len(places), tokens
        )

    def __call__(
        self,
        qkv: Float[Tensor, "tokens 3 heads d"],
        global_qkv: Float[Tensor, "tokens 3 heads d"] | None,
    ) -> Float[Tensor, "tokens heads d"]:
        """As `kernels.attend`, without dropout."""
        q, k, v = qkv.unbind(1)
        found = _attend(q, k, v, self.near)
        if not len(self.named):
            return found
        q, k, v = (qkv if global_qkv is None else global_qkv).unbind(1)
        return found.index_copy(
            0, self.named, _attend(q[self.named], k, v, self.far).to(found.dtype)
        )


def _reached(
    low: Int[Tensor, " queries"], high: Int[Tensor, " queries"], tokens: int
) -> Bool[Tensor, "blocks others"]:
    """For each block of queries the blocks of tokens from the lowest to the highest place that one of them reaches."""
    count = -(-len(low) // BLOCK)
    filled = torch.arange(count * BLOCK, device=low.device).clamp(max=max(0, len(low) - 1))
    numbers = torch.arange(-(-tokens // BLOCK), device=low.device)
    if not count:
        return torch.zeros(0, len(numbers), dtype=torch.bool, device=low.device)
    lowest, highest = low[filled].view(count, -1).amin(1), high[filled].view(count, -1).amax(1)
    return (numbers >= lowest[:, None] // BLOCK) & (numbers <= highest[:, None] // BLOCK)


def _block_mask(
    read: Bool[Tensor, "blocks others"], sees: Sees, queries: int, keys: int
) -> BlockMask:
    counts = read.sum(1, dtype=torch.int32)[None, None]
    order = read.int().argsort(dim=1, descending=True, stable=True).to(torch.int32)[None, None]
    return BlockMask.from_kv_blocks(
        counts, order, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(queries, keys)
    )


def _attend(
    q: Float[Tensor, "queries heads d"],
    k: Float[Tensor, "keys heads d"],
    v: Float[Tensor, "keys heads d"],
    mask: BlockMask,
) -> Float[Tensor, "queries heads d"]:
    found = _kernel(q.device.type)(*(x.transpose(0, 1)[None] for x in (q, k, v)), block_mask=mask)
    result: Tensor = found[0].transpose(0, 1)
    return result


@functools.cache
def _kernel(device: str) -> Callable[..., Any]:
    """Compiled, but on a CPU, where it is for tests."""
    kernel: Callable[..., Any] = flex_attention
    if device == "cpu":
        return kernel
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, PROGRAMS)
    return torch.compile(kernel, dynamic=True)
