"""DeBERTa's relative positions and its convolution; MPNet's bias of distances.

A query sees the distance query − key alone, so a sequence of n tokens needs 2n − 1 rows of the
table of relative positions, and no matrix of them.

Source: He et al. 2020, section 3.1 and appendix A.5; Raffel et al. 2020, section 2.1.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bothways.core.layout import Layout
from bothways.model import positions
from bothways.model.attention.mask import Distances
from bothways.model.block import activate
from bothways.model.config import EncoderConfig
from bothways.model.init import layer_norm
from bothways.model.kernels.dropout import Dropout


def distances_of(position: positions.Position, layout: Layout) -> Distances | None:
    """Return the rows of the table that the sequences of a layout need; None without a table."""
    device = layout.positions.device
    distances = [
        torch.arange(rectangle.longest - 1, -rectangle.longest, -1)
        for rectangle in layout.rectangles
    ]
    match position:
        case positions.Disentangled():
            # Rows of shorter sequences are in the middle of those of longer ones.
            rows = [row_of(position, values) for values in distances]
            start, stop = min(int(row[-1]) for row in rows), max(int(row[0]) for row in rows) + 1
            return Distances(start, stop, tuple((row - start).to(device) for row in rows))
        case positions.Learned(bias=positions.DistanceBias() as bias):
            rows = [bucket_of(bias, values) for values in distances]
            return Distances(0, bias.buckets, tuple(row.to(device) for row in rows))
        case _:
            return None


def bucket_of(bias: positions.DistanceBias, distances: Int[Tensor, " *n"]) -> Int[Tensor, " *n"]:
    """Return the bucket of each distance query − key.

    Example with 8 buckets and max_distance = 8: the distances 0 1 2 3 4 5 … have the buckets
    0 1 2 2 3 3 …, and −1 −2 −3 −4 … have 5 6 6 7 ….
    """
    half = bias.buckets // 2
    single = half // 2
    size = distances.abs()
    # transformers' order of operations in fp32, which decides at the bounds of buckets.
    share = torch.log(size.float() / single) / math.log(bias.max_distance / single)
    far = single + (share * (half - single)).clamp(min=0).long()
    rows = torch.where(size < single, size, far.clamp(max=half - 1))
    return rows + half * (distances < 0)


class ScoreBias(nn.Module):
    """A number for each bucket of distances and each head, shared by all layers."""

    def __init__(self, config: EncoderConfig, bias: positions.DistanceBias) -> None:
        super().__init__()
        self.table = nn.Embedding(bias.buckets, config.heads)

    def forward(self, distances: Distances) -> Float[Tensor, "rows heads"]:
        """Return the rows that the batch needs."""
        return self.table.weight[distances.start : distances.stop]


def build_relative(config: EncoderConfig) -> RelativePositions | ScoreBias | None:
    """Return the module with the table of distances; None without one."""
    match config.position:
        case positions.Disentangled() as position:
            return RelativePositions(config, position)
        case positions.Learned(bias=positions.DistanceBias() as bias):
            return ScoreBias(config, bias)
        case _:
            return None


def row_of(position: positions.Disentangled, distances: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Return the row of the table for each distance query − key.

    Distance 0 has the row `span`; distances beyond the table have the first or the last row.
    """
    rows = distances
    if position.buckets is not None:
        rows = _bucket(distances, position.buckets, position.farthest)
    return (rows + position.span).clamp(0, 2 * position.span - 1)


def _bucket(distances: Int[Tensor, " n"], buckets: int, farthest: int) -> Int[Tensor, " n"]:
    """Return signed buckets: with m = buckets / 2, a distance up to m is its own bucket; beyond,

        m + ⌈(m − 1) · log(distance / m) / log((farthest − 1) / m)⌉.

    Example with m = 2 and farthest = 9: distances 1 2 3 4 5 8 have the buckets 1 2 3 3 3 3.
    """
    middle = buckets // 2
    if farthest - 1 <= middle:  # no distance is beyond
        return distances
    size = distances.abs()
    share = torch.log(size.clamp(min=1) / middle) / torch.log(torch.tensor((farthest - 1) / middle))
    far = (torch.ceil(share * (middle - 1)) + middle).long()
    return torch.where(size <= middle, distances, far * distances.sign())


class RelativePositions(nn.Module):
    """A vector for each relative position, with LayerNorm if configured; shared by all layers."""

    def __init__(self, config: EncoderConfig, position: positions.Disentangled) -> None:
        super().__init__()
        self.table = nn.Embedding(2 * position.span, config.width)
        self.norm = layer_norm(config) if position.norm else nn.Identity()

    def forward(self, distances: Distances) -> Float[Tensor, "rows width"]:
        """Return the rows that the batch needs."""
        result: Tensor = self.norm(self.table.weight[distances.start : distances.stop])
        return result


class NgramConvolution(nn.Module):
    """y ← LayerNorm(y + f(convolution of x)), with embeddings x and the first layer's output y.

    Sequences are padded with zeros at both ends.
    """

    def __init__(self, config: EncoderConfig, convolution: positions.Convolution) -> None:
        super().__init__()
        self.activation = convolution.activation
        size, groups = convolution.size, convolution.groups
        self.conv = nn.Conv1d(config.width, config.width, size, padding=size // 2, groups=groups)
        self.dropout = Dropout(config.dropout_at("mlp"))
        self.norm = layer_norm(config)

    def forward(
        self, x: Float[Tensor, "tokens width"], y: Float[Tensor, "tokens width"], layout: Layout
    ) -> Float[Tensor, "tokens width"]:
        """Add the convolution of the embeddings `x` to the first layer's output `y`."""
        outputs = [
            rectangle.unpad(self.conv(rectangle.pad(x).transpose(1, 2)).transpose(1, 2))
            for rectangle in layout.rectangles
        ]
        result: Tensor = self.norm(y + activate(self.activation, self.dropout(torch.cat(outputs))))
        return result
