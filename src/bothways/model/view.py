"""What tokens see of each other in a layer: masks for the layout's rectangles, and rotary positions.

Layers alike share one view, so that masks and angles are computed once a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import assert_never

from bothways.core.layout import Layout, Rectangle
from bothways.model.config import Causal, EncoderConfig, Full, Pattern, Window

EVERYTHING = Full()


@dataclass(frozen=True)
class Turn:
    """The rotation of each token's queries and keys: `cos` and `sin` of its angles, `(tokens, 1, 1, d/2)` in fp32.

    Feature i makes a pair with feature i + d/2.

    Source: Su et al. 2021, section 3.2.2; the pairing is that of GPT-NeoX.
    """

    cos: Float[Tensor, "tokens 1 1 pairs"]
    sin: Float[Tensor, "tokens 1 1 pairs"]

    @classmethod
    def of(cls, positions: Int[Tensor, " tokens"], size: int, base: float) -> Turn:
        """The angles p / base^(2i/size) of positions p, for heads of `size` features."""
        powers = torch.arange(0, size, 2, dtype=torch.float32, device=positions.device) / size
        angles = (positions[:, None].float() * (1.0 / base**powers))[:, None, None, :]
        return cls(angles.cos(), angles.sin())

    def __call__(self, qkv: Float[Tensor, "tokens 3 heads d"]) -> Float[Tensor, "tokens 3 heads d"]:
        """Queries and keys turned, in fp32; values as they are."""
        first, second = qkv[:, :2].float().chunk(2, -1)
        turned = torch.cat([first * self.cos - second * self.sin, second * self.cos + first * self.sin], -1)
        return torch.cat([turned.to(qkv.dtype), qkv[:, 2:]], 1)


@dataclass(frozen=True)
class View:
    """Attributes:
    layout: the geometry of the batch.
    masks: for each rectangle, True where a key is that the query sees `(rows or 1, 1, longest or 1, longest)`; none where
        every query sees every key.
    turn: the rotary positions; none without them.
    """

    layout: Layout
    masks: tuple[Tensor | None, ...]
    turn: Turn | None = None

    @classmethod
    def of(cls, layout: Layout, pattern: Pattern = EVERYTHING, turn: Turn | None = None) -> View:
        """The view of a pattern."""
        return cls(layout, tuple(mask(pattern, part, layout.positions.device) for part in layout.rectangles), turn)


def views(config: EncoderConfig, layout: Layout) -> Sequence[View]:
    """The view of each layer."""
    size = config.width // config.heads
    kinds = [(config.pattern(layer), config.base(layer)) for layer in range(config.depth)]
    turns = {base: None if base is None else Turn.of(layout.positions, size, base) for _, base in kinds}
    made = {(pattern, base): View.of(layout, pattern, turns[base]) for pattern, base in set(kinds)}
    return [made[kind] for kind in kinds]


def mask(pattern: Pattern, part: Rectangle, device: torch.device) -> Tensor | None:
    """What queries see in a rectangle; none if all of it. Padding is seen by nobody but padding."""
    keys = None if part.keep is None else part.keep[:, None, None, :]
    place = torch.arange(part.longest, device=device)
    match pattern:
        case Full():
            return keys
        case Window(radius):
            if part.longest <= radius + 1:
                return keys
            near = (place[:, None] - place).abs() <= radius
        case Causal():
            near = place[:, None] >= place
        case _:
            assert_never(pattern)
    if part.keep is None or keys is None:
        return near[None, None]
    # A query that is padding sees everything: the softmax over nothing is not a number, and would spoil gradients.
    return (near & keys) | ~part.keep[:, None, :, None]
