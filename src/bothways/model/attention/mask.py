"""What the tokens of a batch see of each other in a layer: masks, global tokens, positions.

Equal layers share one `AttentionView`, so that masks and angles are computed once per batch, and
only when a kernel asks for them: kernels for packed sequences need neither rectangles nor masks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import assert_never

from bothways.core.batch import Layout, Rectangle
from bothways.model.attention import block_sparse
from bothways.model.attention.bigbird_random import RandomBlocks, random_blocks
from bothways.model.attention.flex import FlexWindow
from bothways.model.attention.patterns import Blocks, Causal, Full, Pattern, Window

EVERYTHING = Full()


def sees_all(pattern: Pattern, length: int) -> bool:
    """Return True if every token of a sequence of this length attends to all of it."""
    match pattern:
        case Full():
            return True
        case Blocks():
            return length <= pattern.dense
        case Window(radius):
            return length <= radius + 1
        case Causal():
            return length <= 1
        case _:
            assert_never(pattern)


@dataclass(frozen=True)
class RotaryTables:
    """The rotation of queries and keys: cosine and sine of each token's angles, in fp32.

    Feature i is paired with feature i + d/2.

    Source: Su et al. 2021, section 3.2.2; the pairing is that of GPT-NeoX.
    """

    cos: Float[Tensor, "tokens 1 1 pairs"]
    sin: Float[Tensor, "tokens 1 1 pairs"]

    @classmethod
    def of(
        cls, positions: Int[Tensor, " tokens"], size: int, base: float, factor: float = 1.0
    ) -> RotaryTables:
        """Return the angles p / (factor · base^(2i/size)) of positions p, for heads of `size`."""
        powers = torch.arange(0, size, 2, dtype=torch.float32, device=positions.device) / size
        angles = (positions[:, None].float() * (1.0 / base**powers / factor))[:, None, None, :]
        return cls(angles.cos(), angles.sin())

    def __call__(self, qkv: Float[Tensor, "tokens 3 heads d"]) -> Float[Tensor, "tokens 3 heads d"]:
        """Rotate queries and keys, in fp32; values stay as they are."""
        left, right = qkv[:, :2].float().chunk(2, -1)  # each (tokens, 2, heads, d/2)
        # A rotation of the plane: (a, b) → (a cos − b sin, b cos + a sin).
        turned = torch.cat(
            [left * self.cos - right * self.sin, right * self.cos + left * self.sin], -1
        )
        return torch.cat([turned.to(qkv.dtype), qkv[:, 2:]], 1)


@dataclass(frozen=True)
class Distances:
    """The rows of a table of relative positions that a batch needs.

    Attributes:
        start, stop: the rows `[start, stop)` of the table.
        rows: for each rectangle of n tokens the row, counted from `start`, of each distance
            query − key from n − 1 down to 1 − n.
    """

    start: int
    stop: int
    rows: tuple[Int[Tensor, " _"], ...]


@dataclass(frozen=True)
class AttentionPart:
    """A rectangle and what its tokens see of each other, computed when it is first asked for.

    Attributes:
        rectangle: sequences of near-equal length; of equal length for block attention.
        pattern: which tokens attend to which.
        device: the batch's.
        global_tokens: the global tokens in the rectangle; None without them.
        random: the key of random blocks; None in evaluation and for other patterns.
        causal: True for sequences in which no token attends to those after it; None if there are
            none in the batch.
    """

    rectangle: Rectangle
    pattern: Pattern
    device: torch.device
    global_tokens: block_sparse.GlobalTokens | None = None
    random: RandomBlocks | None = None
    causal: Bool[Tensor, " rows"] | None = None
    _indices: dict[int, HeadIndex] = field(default_factory=dict, init=False, compare=False)

    def head_index(self, heads: int) -> HeadIndex:
        """Return the storage order of the vectors of this many heads; computed once."""
        if heads not in self._indices:
            self._indices[heads] = HeadIndex.of(self.rectangle, heads)
        return self._indices[heads]

    @functools.cached_property
    def mask(self) -> Bool[Tensor, "rows 1 queries longest"] | None:
        """True where a query attends to a key; None if every query attends to every key.

        Rows and queries have length 1 where all are the same. Padding is attended to by padding
        alone. Example, a window of radius 1 over the lengths 3 and 2:

            1 1 0     1 1 0
            1 1 1     1 1 0
            0 1 1     1 1 1   ← padding, see below
        """
        rectangle, causal = self.rectangle, self.causal
        # (rows, 1, 1, longest)
        keys = None if rectangle.keep is None else rectangle.keep[:, None, None, :]
        position = torch.arange(rectangle.longest, device=self.device)
        if causal is not None:
            # In these rows no query attends to a later key: (rows, 1, queries, keys).
            before = (position[:, None] >= position) | ~causal[:, None, None, None]
            keys = before if keys is None else keys & before
        match self.pattern:
            case Full() | Blocks():  # longer sequences with blocks have a `block_mask`
                return keys
            case _ if sees_all(self.pattern, rectangle.longest):
                return keys
            # For all rows alike: (1, 1, queries, keys).
            case Window(radius):
                near = ((position[:, None] - position).abs() <= radius)[None, None]
            case Causal():
                near = (position[:, None] >= position)[None, None]
            case _:
                assert_never(self.pattern)
        if self.global_tokens is not None:
            # All queries of a row attend to its global tokens: (rows, 1, 1, longest).
            near = near | self.global_tokens.selected(rectangle.longest)[:, None, None]
        if rectangle.keep is None or keys is None:
            return near if keys is None else near & keys
        # A padding query attends to everything: the softmax of an empty row is NaN and would spoil
        # the gradients of real keys.
        return (near & keys) | ~rectangle.keep[:, None, :, None]

    @functools.cached_property
    def block_mask(self) -> block_sparse.BlockSparseMask:
        """The same for block-sparse attention, in space linear in the length."""
        match self.pattern:
            case Window():
                return block_sparse.window_mask(
                    self.rectangle, self.pattern, self.global_tokens, self.device
                )
            case Blocks():
                assert self.global_tokens is not None, "longer than `dense`"
                drawn = random_blocks(self.random, self.rectangle.longest, self.pattern)
                return block_sparse.bigbird_mask(
                    self.rectangle, self.pattern, self.global_tokens, drawn.to(self.device)
                )
            case _:
                raise AssertionError(f"{self.pattern} is not sparse")


@dataclass(frozen=True)
class AttentionView:
    """What the tokens of a batch see in a layer.

    Attributes:
        layout: the geometry of the batch.
        pattern: which tokens attend to which.
        rotary: the rotary positions; None without them.
        distances: the distances of relative positions; None without them.
        global_attention_mask: True for the global tokens of a window; None without them.
        random: the key of random blocks, as in `AttentionPart`.
        causal: True for the tokens of sequences that are read from left to right; None without.
    """

    layout: Layout
    pattern: Pattern = EVERYTHING
    rotary: RotaryTables | None = None
    distances: Distances | None = None
    global_attention_mask: Bool[Tensor, " tokens"] | None = None
    random: RandomBlocks | None = None
    causal: Bool[Tensor, " tokens"] | None = None

    @functools.cached_property
    def has_global_tokens(self) -> bool:
        """True if the batch names global tokens and the pattern attends to them."""
        mask = self.global_attention_mask
        window = isinstance(self.pattern, Window) and self.pattern.global_attention
        return window and mask is not None and bool(mask.any())

    @functools.cached_property
    def parts(self) -> tuple[AttentionPart, ...]:
        """The rectangles of the layout with what their tokens see."""
        layout, pattern, device = self.layout, self.pattern, self.layout.positions.device
        rectangles = layout.rectangles
        # Blocks depend on the length of a sequence: long ones are read with others of their length.
        if isinstance(pattern, Blocks):
            rectangles = layout.even(pattern.dense)
        return tuple(
            AttentionPart(
                rectangle, pattern, device, self._global_tokens(rectangle), self.random,
                None if self.causal is None else rectangle.pad(self.causal)[:, 0],
            )
            for rectangle in rectangles
        )  # fmt: skip

    @functools.cached_property
    def flexible(self) -> FlexWindow:
        """A window with global tokens as a block mask of FlexAttention."""
        assert self.global_attention_mask is not None
        assert isinstance(self.pattern, Window)
        return FlexWindow(self.layout, self.pattern.radius, self.global_attention_mask)

    def _global_tokens(self, rectangle: Rectangle) -> block_sparse.GlobalTokens | None:
        """Return a rectangle's global tokens: the batch's, or the first and last blocks."""
        match self.pattern:
            case Window() if self.has_global_tokens:
                assert self.global_attention_mask is not None
                return block_sparse.GlobalTokens.of(rectangle.pad(self.global_attention_mask))
            case Blocks(size) if rectangle.longest > self.pattern.dense:
                return block_sparse.first_and_last(rectangle, size, self.layout.positions.device)
            case _:
                return None


@dataclass(frozen=True)
class HeadIndex:
    """Indices of the vectors of one head, `d` numbers each.

    A batch has the order `(tokens, 3, heads)` before attention and `(tokens, heads)` after it; a
    rectangle has `(3, rows, heads, longest)` and `(rows, heads, longest)`. "part" counts the tokens
    of the rectangle alone.

    Attributes:
        sources: for each place of `(3, rows, heads, longest)`, its place in `(tokens, 3, heads)`.
        queries: for each place of `(rows, heads, longest)`, its place in `(part, heads)`.
        outputs: for each place of `(part, heads)`, its place in `(rows, heads, longest)`.
        gradients: for each place of `(part, 3, heads)`, its place in `(3, rows, heads, longest)`.
        here: the slice of `(part, heads)` in `(tokens, heads)` of the batch.
    """

    sources: Int[Tensor, " places"]
    queries: Int[Tensor, " slots"]
    outputs: Int[Tensor, " vectors"]
    gradients: Int[Tensor, " all"]
    here: slice

    @classmethod
    def of(cls, rectangle: Rectangle, heads: int) -> HeadIndex:
        """Return the indices of a rectangle.

        Example, lengths 2 and 1 with one head: the slots are 0, 1 and 2 of 2 × 2, so tokens is
        [[0, 1], [2, −1]]; padding repeats the first token of its row: [[0, 1], [2, 2]].
        """
        rows, max_length = rectangle.rows, rectangle.longest
        count = rectangle.stop - rectangle.start
        slots = torch.arange(count) if rectangle.slots is None else rectangle.slots
        tokens = torch.full((rows * max_length,), -1).index_copy_(0, slots, torch.arange(count))
        tokens = tokens.view(rows, 1, max_length)
        tokens = torch.where(tokens < 0, tokens[..., :1], tokens)
        head, three = torch.arange(heads), torch.arange(3)
        # (3, rows, heads, longest): token · 3 · heads + which of q, k, v · heads + head
        which = three[:, None, None, None]
        sources = ((tokens + rectangle.start) * 3 + which) * heads + head[:, None]
        # (part, heads): row · heads · longest + head · longest + column
        row, column = (slots // max_length)[:, None], (slots % max_length)[:, None]
        outputs = row * heads * max_length + head * max_length + column
        gradients = outputs[:, None] + three[:, None] * (rows * heads * max_length)
        queries = tokens * heads + head[:, None]
        here = slice(rectangle.start * heads, rectangle.stop * heads)
        sources, queries = sources.flatten(), queries.flatten()
        return cls(sources, queries, outputs.flatten(), gradients.flatten(), here)
