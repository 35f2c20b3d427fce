"""Which keys each block of queries reads in block-sparse attention, in time linear in the length.

A sequence is cut into blocks of equal size. A block of queries reads the keys of its own block, of
both neighbours, of random blocks and the global tokens; a mask hides the keys among them that a
query does not attend to. Windows of tokens (Beltagy et al. 2020, section 3.1) and of blocks (Zaheer
et al. 2020, appendix D) differ in this mask alone.

    blocks of 2, sequence of 7 tokens:   0 1 | 2 3 | 4 5 | 6 ·
    block 1 (queries 2, 3) reads the keys 0 1 2 3 4 5
    block 0 (queries 0, 1) reads block 0 twice, the first time masked, then block 1
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from bothways.core.batch import Rectangle
from bothways.core.runtime.tuning import TUNING
from bothways.model.attention.patterns import Blocks, Window


@dataclass(frozen=True)
class GlobalTokens:
    """The global tokens of a rectangle, which attend to all and to which all attend.

    Attributes:
        slots: their positions in each row.
        exists: False for the fillers of rows with fewer global tokens than others.
    """

    slots: Int[Tensor, "rows globals"]
    exists: Bool[Tensor, "rows globals"]

    @classmethod
    def of(cls, selected: Bool[Tensor, "rows longest"]) -> GlobalTokens | None:
        """Select the tokens at the True positions; None if there are none.

        Example: rows [[1, 0, 1], [0, 1, 0]] give slots [[0, 2], [1, 0]] and exists
        [[True, True], [True, False]].
        """
        count = int(selected.sum(1).max())
        if not count:
            return None
        # A stable sort of "not chosen" moves the chosen positions to the front, in order.
        slots = torch.argsort(~selected, dim=1, stable=True)[:, :count]
        return cls(slots, selected.gather(1, slots))

    def selected(self, longest: int) -> Bool[Tensor, "rows longest"]:
        """Return True at their positions."""
        nothing = self.exists.new_zeros(len(self.slots), longest)
        return nothing.scatter(1, self.slots, self.exists)


@dataclass(frozen=True)
class BlockSparseMask:
    """The keys that each block of queries reads, and which of them each query attends to.

    Attributes:
        size: tokens per block.
        blocks: for each block of queries, the blocks of keys that it reads; heads is 1 where all
            heads read the same.
        mask: True where a query attends to a key: the global tokens come first, then the keys of
            `blocks` in their order. An axis along which nothing changes has length 1.
    """

    size: int
    blocks: Int[Tensor, "heads blocks read"]
    mask: Bool[Tensor, "rows heads blocks queries keys"]


def window_mask(
    rectangle: Rectangle, window: Window, global_tokens: GlobalTokens | None, device: torch.device
) -> BlockSparseMask:
    """Return the mask of a window, with blocks as long as its radius."""
    size = max(window.radius, TUNING.smallest_block)
    count = -(-rectangle.longest // size)
    real = rectangle.keep
    if real is None:  # nothing is padded
        real = torch.ones(1, rectangle.longest, dtype=torch.bool, device=device)
    # A block of queries and its three blocks of keys: query i has the position size + i among them.
    query, key = torch.arange(size, device=device) + size, torch.arange(3 * size, device=device)
    band = (query[:, None] - key).abs() <= window.radius
    # Global tokens are read once, in front of the blocks.
    near = real if global_tokens is None else real & ~global_tokens.selected(rectangle.longest)
    visible = _neighbour_keys(near, count, size)
    visible = visible[:, None, :, None] & band  # (rows, 1, blocks, size, 3 · size)
    # A padding query attends to everything: the softmax of an empty row is NaN and would spoil the
    # gradients of real keys. Nothing reads its output.
    padding = ~torch.nn.functional.pad(real, (0, count * size - rectangle.longest))
    visible = visible | padding.view(-1, 1, count, size, 1)
    return BlockSparseMask(size, _neighbours(count, device), _with_globals(visible, global_tokens))


def bigbird_mask(
    rectangle: Rectangle,
    pattern: Blocks,
    global_tokens: GlobalTokens,
    drawn: Int[Tensor, "heads blocks random"],
) -> BlockSparseMask:
    """Return the mask of whole blocks; rows have equal lengths.

    A random block that is also a neighbour is read and counted twice, as in the reference code.
    """
    device, size, count = drawn.device, pattern.size, drawn.shape[1]
    near = _neighbour_keys(~global_tokens.selected(rectangle.longest), count, size)
    near = near[:, None, :, None].expand(-1, len(drawn), -1, -1, -1)
    # Positions of the keys of random blocks; the last block may reach beyond the sequence.
    positions = drawn[..., None] * size + torch.arange(size, device=device)
    far = (positions < rectangle.longest).flatten(2)[None, :, :, None]
    visible = torch.cat([near, far.expand(len(near), -1, -1, -1, -1)], -1)
    blocks = torch.cat([_neighbours(count, device).expand(len(drawn), -1, -1), drawn], -1)
    return BlockSparseMask(size, blocks, _with_globals(visible, global_tokens))


def first_and_last(rectangle: Rectangle, size: int, device: torch.device) -> GlobalTokens:
    """Return the tokens of the first and the last block, for rows of equal length."""
    tail = max(size, (rectangle.longest - 1) // size * size)
    position = torch.arange(rectangle.longest, device=device)
    slots = torch.cat([position[:size], position[tail:]]).expand(rectangle.rows, -1)
    return GlobalTokens(slots, torch.ones_like(slots, dtype=torch.bool))


def _neighbours(count: int, device: torch.device) -> Int[Tensor, "1 blocks 3"]:
    """Return each block's predecessor, itself and its successor.

    At an end the missing neighbour is replaced by the block itself, which the mask hides:
    3 blocks give [[0, 0, 1], [0, 1, 2], [1, 2, 2]].
    """
    near = torch.arange(count, device=device)[:, None] + torch.arange(-1, 2, device=device)
    return near.clamp(0, count - 1)[None]


def _neighbour_keys(
    visible: Bool[Tensor, "rows longest"], count: int, size: int
) -> Bool[Tensor, "rows blocks keys"]:
    """Return the visible keys of each block's three neighbours; none outside the row."""
    # One block of False in front and after the end, then windows of three blocks, one block apart.
    padded = torch.nn.functional.pad(visible, (size, (count + 1) * size - visible.shape[1]))
    return padded.unfold(1, 3 * size, size)


def _with_globals(
    visible: Bool[Tensor, "rows heads blocks queries keys"], global_tokens: GlobalTokens | None
) -> Bool[Tensor, "others heads blocks queries more"]:
    """Add columns for the global tokens in front."""
    if global_tokens is None:
        return visible
    rows = max(len(visible), len(global_tokens.exists))
    front = global_tokens.exists[:, None, None, None].expand(rows, *visible.shape[1:4], -1)
    return torch.cat([front, visible.expand(rows, -1, -1, -1, -1)], -1)
