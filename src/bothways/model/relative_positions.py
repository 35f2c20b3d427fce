"""Relative positions for disentangled attention: which row of the table each distance has, and the table itself.

What a query sees of a key's place is query − key alone, so a sequence of n tokens needs 2n − 1 rows and no matrix of them.

Source: He et al. 2020, section 3.1 and, for the buckets, appendix A.5.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bothways.attention.mask import Distances
from bothways.core.layout import Layout
from bothways.model.config import EncoderConfig
from bothways.model.norm import layer_norm
from bothways.model.positions import Disentangled


def distances_of(position: Disentangled, layout: Layout) -> Distances:
    """Return the rows of the table of relative positions that the sequences of a layout need.

    Rows of shorter sequences lie in the middle of those of longer ones.
    """
    rows = [
        row_of(position, torch.arange(part.longest - 1, -part.longest, -1))
        for part in layout.rectangles
    ]
    start, stop = min(int(row[-1]) for row in rows), max(int(row[0]) for row in rows) + 1
    device = layout.positions.device
    return Distances(start, stop, tuple((row - start).to(device) for row in rows))


def row_of(position: Disentangled, distances: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """The row of the table for each distance query − key, `span` for 0; what is farther than the table has the last row."""
    places = (
        distances
        if position.buckets is None
        else _bucket(distances, position.buckets, position.farthest)
    )
    return (places + position.span).clamp(0, 2 * position.span - 1)


def _bucket(distances: Int[Tensor, " n"], buckets: int, farthest: int) -> Int[Tensor, " n"]:
    """Up to m = buckets / 2 as it is; beyond, m + ⌈(m − 1) · log(distance / m) / log((farthest − 1) / m)⌉, with its sign.

    All are as they are where none that is told apart lies beyond.
    """
    middle = buckets // 2
    if farthest - 1 <= middle:
        return distances
    size = distances.abs()
    share = torch.log(size.clamp(min=1) / middle) / torch.log(torch.tensor((farthest - 1) / middle))
    far = (torch.ceil(share * (middle - 1)) + middle).long()
    return torch.where(size <= middle, distances, far * distances.sign())


class RelativePositions(nn.Module):
    """A vector for each relative position, normed where the configuration says so; the same in all layers."""

    def __init__(self, config: EncoderConfig, position: Disentangled) -> None:
        super().__init__()
        self.table = nn.Embedding(2 * position.span, config.width)
        self.norm = layer_norm(config) if position.norm else nn.Identity()

    def forward(self, distances: Distances) -> Float[Tensor, "rows width"]:
        """The rows that the batch needs."""
        result: Tensor = self.norm(self.table.weight[distances.start : distances.stop])
        return result
