"""Attention for training on a CPU, with a backward pass of its own: softmax(QKᵀ/√d)V.

Queries, keys and values go from packed tokens into rectangles, by rows and heads, in a single pass;
outputs and gradients go back in another. Left to autograd, each of these is a chain of padding,
views, copies and sums, which takes as long as the matrix products for sequences of 30 tokens.

Padding repeats the first token of its sequence, so that no other sequence can spoil it: as a key it
is masked, as a query its output is not read, and its gradients are set to 0.

Source: Vaswani et al. 2017, section 3.2.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from bothways.model.attention.head_index import HeadIndex
from bothways.model.attention.mask import AttentionPart
from bothways.model.kernels.dropout import Mask, drop


def attend_gathered(
    qkv: Float[Tensor, "tokens 3 heads d"], segments: Sequence[AttentionPart], rate: float
) -> Float[Tensor, "tokens heads d"]:
    """Compute `dispatch.attend` for the calls that are `Gathered`; differentiable once."""
    result: Tensor = _Attention.apply(qkv, segments, rate)  # type: ignore[no-untyped-call]
    return result


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, segments: Sequence[AttentionPart], rate: float) -> Tensor:
        """Compute attention over padded rectangles."""
        tokens, _, heads, size = qkv.shape
        saved, masks = list[Tensor | None](), list[Mask]()
        vectors, result = qkv.reshape(-1, size), qkv.new_empty(tokens * heads, size)
        for segment, index, here in _indexed(segments, heads):
            # (3, rows · heads, longest, d)
            q, k, v = vectors.index_select(0, index.sources).view(
                3, -1, segment.rectangle.longest, size
            )
            # beta=0 ignores the first argument: this is alpha · q @ kᵀ in one operation.
            scores = torch.baddbmm(q.new_empty(1, 1, 1), q, k.mT, beta=0, alpha=size**-0.5)
            if segment.mask is not None:
                # Adding the least number hides a key: e to its power is 0.
                least = torch.finfo(scores.dtype).min
                hidden = torch.zeros(segment.mask.shape, dtype=scores.dtype)
                _by_rows(scores, segment).add_(hidden.masked_fill_(~segment.mask, least))
            exact = torch.promote_types(scores.dtype, torch.float32)
            probabilities = scores.softmax(-1, dtype=exact)
            # A large mask is not kept: its seed is enough to draw it again.
            dropped, mask = drop(probabilities, rate)
            outputs = dropped.to(v.dtype) @ v
            torch.index_select(outputs.view(-1, size), 0, index.outputs, out=result[here])
            saved += [q, k, v, probabilities, mask.factors]
            masks.append(mask._replace(factors=None))
        ctx.parts, ctx.masks = segments, masks
        ctx.save_for_backward(*saved)
        return result.view(tokens, heads, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient for queries, keys and values."""
        tokens, heads, size = gradient.shape
        saved, scale = iter(ctx.saved_tensors), size**-0.5
        vectors, result = gradient.reshape(-1, size), gradient.new_empty(tokens * 3 * heads, size)
        indexed = zip(_indexed(ctx.parts, heads), ctx.masks, strict=True)
        for (segment, index, here), seeded in indexed:
            q, k, v, probabilities, factors = (next(saved) for _ in range(5))
            mask, rectangle = (
                seeded._replace(factors=factors).like(probabilities),
                segment.rectangle,
            )
            # The gradient of O = dropout(P) V with P = softmax(S), S = scale · Q Kᵀ:
            # dV = dropout(P)ᵀ dO, dP = dropout(dO Vᵀ), dS = P ∘ (dP − Σ P ∘ dP),
            # dQ = scale · dS K, dK = scale · dSᵀ Q.
            above = vectors[here].index_select(0, index.queries).view(q.shape)  # dO
            if rectangle.keep is not None:  # padding has read a copied query: it gives no gradient
                _by_rows(above, segment).mul_(rectangle.keep[:, None, :, None])
            of_qkv = torch.empty(3, *q.shape, dtype=q.dtype)  # written in place, gathered once
            torch.bmm(mask.times(probabilities).to(v.dtype).mT, above, out=of_qkv[2])
            of_probabilities = mask.times_(torch.bmm(above, v.mT).to(probabilities.dtype))
            of_scores = torch._softmax_backward_data(
                of_probabilities, probabilities, -1, probabilities.dtype
            ).to(q.dtype)
            torch.baddbmm(of_qkv[0], of_scores, k, beta=0, alpha=scale, out=of_qkv[0])
            torch.baddbmm(of_qkv[1], of_scores.mT, q, beta=0, alpha=scale, out=of_qkv[1])
            rows = slice(here.start * 3, here.stop * 3)
            torch.index_select(of_qkv.view(-1, size), 0, index.gradients, out=result[rows])
        return result.view(tokens, 3, heads, size), None, None


def _by_rows(
    x: Float[Tensor, "places longest n"], segment: AttentionPart
) -> Float[Tensor, "rows heads longest n"]:
    """Return a view with rows and heads apart."""
    return x.view(segment.rectangle.rows, -1, *x.shape[1:])


def _indexed(
    segments: Sequence[AttentionPart], heads: int
) -> Iterator[tuple[AttentionPart, HeadIndex, slice]]:
    """Yield each part with its indices and its slice of the batch's `(tokens · heads)`."""
    for segment in segments:
        rectangle = segment.rectangle
        yield (
            segment,
            segment.head_index(heads),
            slice(rectangle.start * heads, rectangle.stop * heads),
        )
