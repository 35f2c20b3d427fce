"""Where the vectors of attention heads are stored: by tokens in a batch, by rows in a rectangle.

With these indices vectors go from one order to the other in a single pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from bothways.core.layout import Rectangle


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
    """

    sources: Int[Tensor, " places"]
    queries: Int[Tensor, " slots"]
    outputs: Int[Tensor, " vectors"]
    gradients: Int[Tensor, " all"]

    @classmethod
    def of(cls, rectangle: Rectangle, heads: int) -> HeadIndex:
        """Return the indices of a rectangle.

        Example, lengths 2 and 1 with one head: the slots are 0, 1 and 2 of 2 × 2, so tokens is
        [[0, 1], [2, −1]]; padding repeats the first token of its row: [[0, 1], [2, 2]].
        """
        rows, max_length, count = (
            rectangle.rows,
            rectangle.longest,
            rectangle.stop - rectangle.start,
        )
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
        return cls(sources.flatten(), queries.flatten(), outputs.flatten(), gradients.flatten())
