"""What each block of queries reads, where a token sees but a few others: attention in time linear in the length.

A sequence is cut into blocks of equal size. A block of queries reads the keys of its own block and of both neighbours, of
others that are drawn, and the global tokens; a mask says which of these a query sees. Windows of tokens (Beltagy et al. 2020,
section 3.1) and of blocks (Zaheer et al. 2020, appendix D) are two such masks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from bothways.attention.patterns import Blocks, Window
from bothways.core.layout import Rectangle

SMALLEST = 16
"""Tokens of a block, at least: a window of few tokens is read in blocks of this size."""


@dataclass(frozen=True)
class GlobalTokens:
    """The global tokens of a rectangle, which see all and are seen by all.

    Attributes:
        slots: their places in each row.
        held: whether there is one: rows may have different numbers of them.
    """

    slots: Int[Tensor, "rows globals"]
    held: Bool[Tensor, "rows globals"]

    @classmethod
    def of(cls, chosen: Bool[Tensor, "rows longest"]) -> GlobalTokens | None:
        """Those at the places that are True; none if there are none."""
        most = int(chosen.sum(1).max())
        if not most:
            return None
        slots = torch.argsort(~chosen, dim=1, stable=True)[:, :most]
        return cls(slots, chosen.gather(1, slots))


@dataclass(frozen=True)
class BlockReach:
    """Attributes:
    size: tokens of a block.
    blocks: for each block of queries the blocks of keys that it reads, by head if heads differ.
    mask: True where a query sees a key: first the global tokens, then those of the blocks, in their order. An axis along which
        all is the same has length 1.
    """

    size: int
    blocks: Int[Tensor, "heads blocks read"]
    mask: Bool[Tensor, "rows heads blocks queries keys"]


def window_reach(
    part: Rectangle, window: Window, global_tokens: GlobalTokens | None, device: torch.device
) -> BlockReach:
    """Blocks as long as the window reaches to one side."""
    size = max(window.radius, SMALLEST)
    count = -(-part.longest // size)
    real = _real(part, device)
    query, key = torch.arange(size, device=device) + size, torch.arange(3 * size, device=device)
    band = (query[:, None] - key).abs() <= window.radius
    seen = _near(_without(real, global_tokens), count, size)[:, None, :, None] & band
    # A query that is padding sees everything: the softmax over nothing is not a number, and would spoil gradients.
    padding = ~torch.nn.functional.pad(real, (0, count * size - part.longest)).view(
        -1, 1, count, size, 1
    )
    return BlockReach(
        size, _neighbours(count, device), _with_globals(seen | padding, global_tokens)
    )


def block_reach(
    part: Rectangle,
    pattern: Blocks,
    global_tokens: GlobalTokens,
    drawn: Int[Tensor, "heads blocks random"],
) -> BlockReach:
    """Whole blocks, among them those that were drawn, even where one is read a second time; rows are of one length."""
    device, size, count = drawn.device, pattern.size, drawn.shape[1]
    near = _near(_without(_real(part, device), global_tokens), count, size)[:, None, :, None]
    places = drawn[..., None] * size + torch.arange(size, device=device)
    far = (places < part.longest).flatten(2)[None, :, :, None]
    seen = torch.cat(
        [near.expand(-1, len(drawn), -1, -1, -1), far.expand(len(near), -1, -1, -1, -1)], -1
    )
    blocks = torch.cat([_neighbours(count, device).expand(len(drawn), -1, -1), drawn], -1)
    return BlockReach(size, blocks, _with_globals(seen, global_tokens))


def ends(part: Rectangle, size: int, device: torch.device) -> GlobalTokens:
    """The tokens of the first and the last block of rows of one length."""
    last = max(size, (part.longest - 1) // size * size)
    place = torch.arange(part.longest, device=device)
    slots = torch.cat([place[:size], place[last:]]).expand(part.rows, -1)
    return GlobalTokens(slots, torch.ones_like(slots, dtype=torch.bool))


def _real(part: Rectangle, device: torch.device) -> Bool[Tensor, "rows longest"]:
    """Where there is a token; one row for all where nothing is padded."""
    return (
        torch.ones(1, part.longest, dtype=torch.bool, device=device)
        if part.keep is None
        else part.keep
    )


def _without(
    real: Bool[Tensor, "rows longest"], global_tokens: GlobalTokens | None
) -> Bool[Tensor, "others longest"]:
    """The tokens that are not global: these are read once, beside the blocks."""
    if global_tokens is None:
        return real
    chosen = torch.zeros(
        len(global_tokens.slots), real.shape[1], dtype=torch.bool, device=real.device
    )
    return real & ~chosen.scatter(1, global_tokens.slots, global_tokens.held)


def _neighbours(count: int, device: torch.device) -> Int[Tensor, "1 blocks 3"]:
    """The block before, itself, the block after; at an end itself again, where the mask hides it."""
    return (torch.arange(count, device=device)[:, None] + torch.arange(-1, 2, device=device)).clamp(
        0, count - 1
    )[None]


def _near(
    shown: Bool[Tensor, "rows longest"], count: int, size: int
) -> Bool[Tensor, "rows blocks keys"]:
    """Of the tokens of three neighbouring blocks, those that are shown; those outside of the row are not."""
    padded = torch.nn.functional.pad(shown, (size, (count + 1) * size - shown.shape[1]))
    return padded.unfold(1, 3 * size, size)


def _with_globals(
    seen: Bool[Tensor, "rows heads blocks queries keys"], global_tokens: GlobalTokens | None
) -> Bool[Tensor, "others heads blocks queries more"]:
    """The mask with columns for the global tokens in front."""
    if global_tokens is None:
        return seen
    rows = max(len(seen), len(global_tokens.held))
    front = global_tokens.held[:, None, None, None].expand(rows, *seen.shape[1:4], -1)
    return torch.cat([front, seen.expand(rows, -1, -1, -1, -1)], -1)
