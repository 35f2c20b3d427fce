"""Attention written out for training on a CPU, with a backward pass of its own: softmax(QKᵀ/√d)V (Vaswani et al. 2017).

Queries, keys and values go from packed tokens into rectangles, by rows and heads, in a single pass, and what is found goes back
in another; so do gradients. Left to autograd, each of these is a chain of padding, views, copies and sums, which takes as long
as the products themselves for sequences of some 30 tokens.

Padding repeats the first token of its sequence, so that no other sequence can spoil it: as a key it is masked, what it finds as
a query is not read, and its gradients are set to 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from bothways.attention.head_index import HeadIndex
from bothways.attention.mask import AttentionPart
from bothways.kernels.dropout import Mask, drop


def attend_gathered(
    qkv: Float[Tensor, "tokens 3 heads d"], parts: Sequence[AttentionPart], rate: float
) -> Float[Tensor, "tokens heads d"]:
    """As `kernels.attend`, on a CPU and for patterns that are a mask on all; differentiable once."""
    result: Tensor = _Attention.apply(qkv, parts, rate)  # type: ignore[no-untyped-call]
    return result


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, parts: Sequence[AttentionPart], rate: float) -> Tensor:
        tokens, _, heads, size = qkv.shape
        saved, masks = list[Tensor | None](), list[Mask]()
        vectors, result = qkv.reshape(-1, size), qkv.new_empty(tokens * heads, size)
        for part, places, here in _placed(parts, heads):
            q, k, v = vectors.index_select(0, places.sources).view(
                3, -1, part.rectangle.longest, size
            )
            scores = torch.baddbmm(q.new_empty(1, 1, 1), q, k.mT, beta=0, alpha=size**-0.5)
            if part.mask is not None:
                least = torch.finfo(scores.dtype).min
                hidden = torch.zeros(part.mask.shape, dtype=scores.dtype).masked_fill_(
                    ~part.mask, least
                )
                _by_rows(scores, part).add_(hidden)
            probabilities = scores.softmax(
                -1, dtype=torch.promote_types(scores.dtype, torch.float32)
            )
            dropped, mask = drop(probabilities, rate)
            found = dropped.to(v.dtype) @ v
            torch.index_select(found.view(-1, size), 0, places.found, out=result[here])
            saved += [q, k, v, probabilities, mask.factors]
            masks.append(mask._replace(factors=None))
        ctx.parts, ctx.masks = parts, masks
        ctx.save_for_backward(*saved)
        return result.view(tokens, heads, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        tokens, heads, size = gradient.shape
        saved, scale = iter(ctx.saved_tensors), size**-0.5
        of_found, result = gradient.reshape(-1, size), gradient.new_empty(tokens * 3 * heads, size)
        for (part, places, here), seeded in zip(_placed(ctx.parts, heads), ctx.masks, strict=True):
            q, k, v, probabilities, factors = (next(saved) for _ in range(5))
            mask, rectangle = seeded._replace(factors=factors).like(probabilities), part.rectangle
            above = of_found[here].index_select(0, places.queries).view(q.shape)
            if rectangle.keep is not None:
                _by_rows(above, part).mul_(rectangle.keep[:, None, :, None])
            of_qkv = torch.empty(3, *q.shape, dtype=q.dtype)
            torch.bmm(mask.times(probabilities).to(v.dtype).mT, above, out=of_qkv[2])
            of_probabilities = mask.times_(torch.bmm(above, v.mT).to(probabilities.dtype))
            of_scores = torch._softmax_backward_data(
                of_probabilities, probabilities, -1, probabilities.dtype
            ).to(q.dtype)
            torch.baddbmm(of_qkv[0], of_scores, k, beta=0, alpha=scale, out=of_qkv[0])
            torch.baddbmm(of_qkv[1], of_scores.mT, q, beta=0, alpha=scale, out=of_qkv[1])
            vectors = slice(here.start * 3, here.stop * 3)
            torch.index_select(of_qkv.view(-1, size), 0, places.gradients, out=result[vectors])
        return result.view(tokens, 3, heads, size), None, None


def _by_rows(
    x: Float[Tensor, "places longest n"], part: AttentionPart
) -> Float[Tensor, "rows heads longest n"]:
    """Rows and heads apart; a view."""
    return x.view(part.rectangle.rows, -1, *x.shape[1:])


def _placed(
    parts: Sequence[AttentionPart], heads: int
) -> Iterator[tuple[AttentionPart, HeadIndex, slice]]:
    """Each part, where its vectors lie, and which `(tokens · heads)` of the batch they are."""
    for part in parts:
        rectangle = part.rectangle
        yield part, part.places(heads), slice(rectangle.start * heads, rectangle.stop * heads)
