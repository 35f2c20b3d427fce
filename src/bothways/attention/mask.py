"""What tokens see of each other in a layer: masks for the layout's rectangles, rotary positions, distances.

Layers alike share one view, so that masks and angles are computed once a batch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import assert_never

from bothways.attention.bigbird_random import Draw, drawn_blocks
from bothways.attention.block_sparse import (
    BlockReach,
    GlobalTokens,
    block_reach,
    ends,
    window_reach,
)
from bothways.attention.flex import FlexWindow
from bothways.attention.head_index import HeadIndex
from bothways.attention.patterns import Blocks, Causal, Full, Pattern, Window
from bothways.core.layout import Layout, Rectangle
from bothways.model.config import EncoderConfig
from bothways.model.positions import Disentangled
from bothways.model.relative_positions import Distances

EVERYTHING = Full()


@dataclass(frozen=True)
class RotaryTables:
    """The rotation of each token's queries and keys: `cos` and `sin` of its angles, `(tokens, 1, 1, d/2)` in fp32.

    Feature i makes a pair with feature i + d/2.

    Source: Su et al. 2021, section 3.2.2; the pairing is that of GPT-NeoX.
    """

    cos: Float[Tensor, "tokens 1 1 pairs"]
    sin: Float[Tensor, "tokens 1 1 pairs"]

    @classmethod
    def of(cls, positions: Int[Tensor, " tokens"], size: int, base: float) -> RotaryTables:
        """The angles p / base^(2i/size) of positions p, for heads of `size` features."""
        powers = torch.arange(0, size, 2, dtype=torch.float32, device=positions.device) / size
        angles = (positions[:, None].float() * (1.0 / base**powers))[:, None, None, :]
        return cls(angles.cos(), angles.sin())

    def __call__(self, qkv: Float[Tensor, "tokens 3 heads d"]) -> Float[Tensor, "tokens 3 heads d"]:
        """Queries and keys turned, in fp32; values as they are."""
        first, second = qkv[:, :2].float().chunk(2, -1)
        turned = torch.cat(
            [first * self.cos - second * self.sin, second * self.cos + first * self.sin], -1
        )
        return torch.cat([turned.to(qkv.dtype), qkv[:, 2:]], 1)


@dataclass(frozen=True)
class AttentionPart:
    """A rectangle and what its tokens see of each other, worked out when it is first asked for.

    Attributes:
        rectangle: of near-equal lengths; of equal ones where some have block attention.
        pattern: which tokens see which.
        device: that of the layout.
        global_tokens: its global tokens; none without them.
        draw: who draws random blocks; none in evaluation and without them.
        made: what `places` gave.
    """

    rectangle: Rectangle
    pattern: Pattern
    device: torch.device
    global_tokens: GlobalTokens | None = None
    draw: Draw | None = None
    made: dict[int, HeadIndex] = field(default_factory=dict)

    def places(self, heads: int) -> HeadIndex:
        """Where the vectors of so many heads lie; made once."""
        if heads not in self.made:
            self.made[heads] = HeadIndex.of(self.rectangle, heads)
        return self.made[heads]

    @functools.cached_property
    def mask(self) -> Tensor | None:
        """True where a key is that the query sees `(rows or 1, 1, longest or 1, longest)`; none where all see all."""
        return attention_mask(self.pattern, self.rectangle, self.device, self.global_tokens)

    @functools.cached_property
    def reach(self) -> BlockReach | None:
        """The same by blocks of queries, in space linear in the length; none for a pattern that is not so sparse."""
        match self.pattern:
            case Window():
                return window_reach(self.rectangle, self.pattern, self.global_tokens, self.device)
            case Blocks() if self.global_tokens is not None:
                drawn = drawn_blocks(self.draw, self.rectangle.longest, self.pattern).to(
                    self.device
                )
                return block_reach(self.rectangle, self.pattern, self.global_tokens, drawn)
            case Full() | Causal() | Blocks():
                return None
            case _:
                assert_never(self.pattern)


@dataclass(frozen=True)
class AttentionView:
    """Attributes:
    layout: the geometry of the batch.
    pattern: which tokens see which.
    rotary: the rotary positions; none without them.
    distances: those of disentangled positions; none without them.
    named: the global tokens of a window; none where it has none.
    draw: as in `Part`.
    """

    layout: Layout
    pattern: Pattern
    rotary: RotaryTables | None = None
    distances: Distances | None = None
    named: Bool[Tensor, " tokens"] | None = None
    draw: Draw | None = None

    @classmethod
    def of(
        cls,
        layout: Layout,
        pattern: Pattern = EVERYTHING,
        rotary: RotaryTables | None = None,
        distances: Distances | None = None,
        global_attention_mask: Bool[Tensor, " tokens"] | None = None,
        draw: Draw | None = None,
    ) -> AttentionView:
        """The view of a pattern. `global_attention_mask`: the global tokens that the batch names, which only some windows heed."""
        named = (
            global_attention_mask
            if isinstance(pattern, Window) and pattern.global_attention
            else None
        )
        return cls(layout, pattern, rotary, distances, named, draw)

    @functools.cached_property
    def parts(self) -> tuple[AttentionPart, ...]:
        """The rectangles of the layout, and what tokens see in each; made for who needs them."""
        layout, pattern, device = self.layout, self.pattern, self.layout.positions.device
        rectangles = (
            layout.even(pattern.dense) if isinstance(pattern, Blocks) else layout.rectangles
        )
        chosen = [_global_tokens(pattern, part, self.named, device) for part in rectangles]
        return tuple(
            AttentionPart(part, pattern, device, those, self.draw)
            for part, those in zip(rectangles, chosen, strict=True)
        )

    @property
    def has_global_tokens(self) -> bool:
        """Whether there are global tokens that the batch names."""
        return any(
            isinstance(part.pattern, Window) and part.global_tokens is not None
            for part in self.parts
        )

    @functools.cached_property
    def flexible(self) -> FlexWindow:
        """The window with its global tokens as one mask of blocks; made once a batch, for all layers that share this view."""
        assert self.named is not None
        assert isinstance(self.pattern, Window)
        return FlexWindow(self.layout, self.pattern.radius, self.named)

    @functools.cached_property
    def full(self) -> bool:
        """Whether every token sees all of its own sequence."""
        return sees_all(self.pattern, self.layout.max_seqlen)

    @property
    def masks(self) -> tuple[Tensor | None, ...]:
        """That of each part."""
        return tuple(part.mask for part in self.parts)


def attention_views(
    config: EncoderConfig,
    layout: Layout,
    global_attention_mask: Bool[Tensor, " tokens"] | None = None,
    training: bool = False,
) -> Sequence[AttentionView]:
    """The view of each layer; random blocks are drawn in training."""
    size = config.width // config.heads
    draws = [
        Draw(layer, config.heads, config.max_positions)
        if training and isinstance(config.pattern(layer), Blocks)
        else None
        for layer in range(config.depth)
    ]
    kinds = [(config.pattern(layer), config.base(layer), draw) for layer, draw in enumerate(draws)]
    turns = {
        base: None if base is None else RotaryTables.of(layout.positions, size, base)
        for _, base, _ in kinds
    }
    distances = (
        Distances.of(config.position, layout) if isinstance(config.position, Disentangled) else None
    )
    made = {
        (pattern, base, draw): AttentionView.of(
            layout, pattern, turns[base], distances, global_attention_mask, draw
        )
        for pattern, base, draw in set(kinds)
    }
    return [made[kind] for kind in kinds]


def _global_tokens(
    pattern: Pattern, part: Rectangle, named: Bool[Tensor, " tokens"] | None, device: torch.device
) -> GlobalTokens | None:
    """The global tokens of a rectangle: those that the batch names, or of two blocks; where all see all, none is set apart."""
    match pattern:
        case Window() if named is not None:
            return GlobalTokens.of(part.pad(named))
        case Blocks(size) if part.longest > pattern.dense:
            return ends(part, size, device)
        case _:
            return None


def sees_all(pattern: Pattern, longest: int) -> bool:
    """Whether in so long a sequence every token sees every other."""
    match pattern:
        case Full():
            return True
        case Blocks():
            return longest <= pattern.dense
        case Window(radius):
            return longest <= radius + 1
        case Causal():
            return longest <= 1
        case _:
            assert_never(pattern)


def attention_mask(
    pattern: Pattern,
    part: Rectangle,
    device: torch.device,
    global_tokens: GlobalTokens | None = None,
) -> Tensor | None:
    """What queries see in a rectangle; none if all of it. Padding is seen by nobody but padding."""
    keys = None if part.keep is None else part.keep[:, None, None, :]
    place = torch.arange(part.longest, device=device)
    match pattern:
        case Full() | Blocks():  # blocks are masked in `reach`; what comes here is short
            return keys
        case _ if sees_all(pattern, part.longest):
            return keys
        case Window(radius):
            near = ((place[:, None] - place).abs() <= radius)[None, None]
        case Causal():
            near = (place[:, None] >= place)[None, None]
        case _:
            assert_never(pattern)
    if global_tokens is not None:
        chosen = torch.zeros(part.rows, part.longest, dtype=torch.bool, device=device)
        near = near | chosen.scatter(1, global_tokens.slots, global_tokens.held)[:, None, None]
    if part.keep is None or keys is None:
        return near
    # A query that is padding sees everything: the softmax over nothing is not a number, and would spoil gradients.
    return (near & keys) | ~part.keep[:, None, :, None]
