"""Where the vectors of attention heads lie, by tokens and in a rectangle, so that they go from one to the other in one pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from bothways.core.layout import Rectangle


@dataclass(frozen=True)
class HeadIndex:
    """Where the vectors of one head lie, `d` numbers each: by tokens in the batch, by rows and heads in a rectangle.

    Attributes:
        sources: for each place of `(3, rows, heads, longest)`, that in `(tokens, 3, heads)` which it is read from.
        queries: for each place of `(rows, heads, longest)`, that in `(part, heads)`: of what is found, and of its gradients.
        found: for each place of `(part, heads)`, that in `(rows, heads, longest)`.
        gradients: for each place of `(part, 3, heads)`, that in `(3, rows, heads, longest)`.
    """

    sources: Int[Tensor, " places"]
    queries: Int[Tensor, " slots"]
    found: Int[Tensor, " vectors"]
    gradients: Int[Tensor, " all"]

    @classmethod
    def of(cls, rectangle: Rectangle, heads: int) -> HeadIndex:
        """Those of a rectangle."""
        rows, longest, part = rectangle.rows, rectangle.longest, rectangle.stop - rectangle.start
        slots = torch.arange(part) if rectangle.slots is None else rectangle.slots
        tokens = (
            torch.full((rows * longest,), -1)
            .index_copy_(0, slots, torch.arange(part))
            .view(rows, 1, longest)
        )
        tokens = torch.where(
            tokens < 0, tokens[..., :1], tokens
        )  # a sequence begins where its row does
        head, three = torch.arange(heads), torch.arange(3)
        sources = ((tokens + rectangle.start) * 3 + three[:, None, None, None]) * heads + head[
            :, None
        ]
        found = (
            (slots // longest * heads)[:, None] * longest
            + head * longest
            + (slots % longest)[:, None]
        )
        gradients = found[:, None] + three[:, None] * (rows * heads * longest)
        return cls(
            sources.flatten(),
            (tokens * heads + head[:, None]).flatten(),
            found.flatten(),
            gradients.flatten(),
        )
