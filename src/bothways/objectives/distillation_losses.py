"""Losses between a student and a teacher, as sums, each in one pass that also makes the gradient.

Arrays of vocabulary size, and of one number per pair of tokens, are the peak of memory in
distillation. Here they exist for a few rows at a time: each part goes from its scores to its
gradient while it is in the cache, and only the gradient for the student's vectors is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from bothways.core.layout import Layout, Rectangle
from bothways.core.runtime.tuning import TUNING
from bothways.model.kernels.cross_entropy import row_chunks

Comparison = Callable[
    [
        Float[Tensor, "groups queries keys"],
        Float[Tensor, "groups queries keys"],
        Bool[Tensor, "groups keys"] | None,
    ],
    tuple[Float[Tensor, "groups queries"], Float[Tensor, "groups queries keys"]],
]
"""From scores of a student, those of its teacher and the keys that exist: the loss of each query,
and its derivative by the student's scores. The arrays of scores may be changed."""
PAIR_ARRAYS = 4
"""Arrays of scores that exist at once. One Xeon core with AMX, 48 relation heads, 128 tokens: parts
of a quarter of `loss_chunk_elements_cpu` take 0.6 of the time of whole ones."""


def soft_divergence(
    logits: Float[Tensor, "rows classes"],
    target: Float[Tensor, "rows classes"],
    weight: Float[Tensor, " rows"],
    temperature: float = 1.0,
) -> Float[Tensor, ""]:
    """Return T² · Σ over rows of weight · KL(teacher ‖ student), of softmax(z/T).

    The gradient for the logits is weight · T · (softmax(z/T) − softmax(t/T)): T² keeps its size
    whatever the temperature. In fp32 or finer, also under autocast.

    Source: Hinton et al. 2015, section 2.

    Args:
        logits: z, of the student.
        target: t, of the teacher; it gets no gradient.
    """
    apply: Callable[..., Tensor] = _SoftDivergence.apply
    return apply(logits, target, weight, temperature)


class _SoftDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, weight: Tensor, temperature: float
    ) -> Tensor:
        """Return the sum; compute the gradient for the logits if one is needed."""
        exact = torch.promote_types(logits.dtype, torch.float32)
        total = logits.new_zeros((), dtype=exact)
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        for chunk in row_chunks(logits):
            log_q = torch.log_softmax(logits[chunk].to(exact) / temperature, 1)
            log_p = torch.log_softmax(target[chunk].to(exact) / temperature, 1)
            w, p = weight[chunk, None].to(exact), log_p.exp()
            total += temperature**2 * (w * p * (log_p - log_q)).sum()
            if gradient is not None:
                gradient[chunk] = (log_q.exp_() - p) * (w * temperature)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient for the logits."""
        (gradient,) = ctx.saved_tensors
        return gradient * grad_total, None, None, None


def relation_divergence(
    student: Float[Tensor, "groups queries keys"],
    teacher: Float[Tensor, "groups queries keys"],
    keep: Bool[Tensor, "groups keys"] | None,
) -> tuple[Tensor, Tensor]:
    """Compare softmax over keys: KL(teacher ‖ student) of each query (a `Comparison`)."""
    if keep is not None:
        for scores in (student, teacher):
            scores.masked_fill_(~keep[:, None], torch.finfo(scores.dtype).min)
    log_q, log_p = torch.log_softmax(student, -1), torch.log_softmax(teacher, -1)
    p = log_p.exp()
    return torch.linalg.vecdot(p, log_p.sub_(log_q)), log_q.exp_().sub_(p)


def squared_difference(
    student: Float[Tensor, "groups queries keys"],
    teacher: Float[Tensor, "groups queries keys"],
    keep: Bool[Tensor, "groups keys"] | None,
) -> tuple[Tensor, Tensor]:
    """Compare each score by its squared difference (a `Comparison`)."""
    difference = student.sub_(teacher)
    if keep is not None:
        difference.mul_(keep[:, None])
    return torch.linalg.vecdot(difference, difference), difference.mul(2)


def compare_pairs(
    compare: Comparison,
    layout: Layout,
    weight: Float[Tensor, " tokens"],
    student: tuple[Float[Tensor, "tokens groups d"], Float[Tensor, "tokens groups d"]],
    teacher: tuple[Float[Tensor, "tokens groups e"], Float[Tensor, "tokens groups e"]],
) -> Float[Tensor, ""]:
    """Return Σ over queries, keys of their sequence and groups of weight[query] · comparison.

    The scores compared are left · rightᵀ / √d. Products are in fp32 or finer, also under autocast.

    Args:
        weight: weight of each token as a query.
        student: left and right vectors.
        teacher: the same, of any width d; they get no gradient.
    """
    apply: Callable[..., Tensor] = _PairLoss.apply
    return apply(compare, layout, weight, *student, *teacher)


class _PairLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        compare: Comparison,
        layout: Layout,
        weight: Tensor,
        left: Tensor,
        right: Tensor,
        *teacher: Tensor,
    ) -> Tensor:
        """Return the sum; compute the gradients for the student's vectors if needed."""
        exact = torch.promote_types(left.dtype, torch.float32)
        total, needed = left.new_zeros((), dtype=exact), any(ctx.needs_input_grad)
        gradients: list[list[Tensor]] = [[], []]
        with torch.autocast(left.device.type, enabled=False):
            for rectangle in layout.rectangles:
                q, k, qt, kt = (_grouped(rectangle, x).to(exact) for x in (left, right, *teacher))
                w = rectangle.pad(weight.to(exact)).repeat_interleave(left.shape[1], 0)
                keep = rectangle.keep
                if keep is not None:
                    keep = keep.repeat_interleave(left.shape[1], 0)
                grads = torch.empty_like(q), torch.empty_like(k)
                for at in _group_chunks(q):
                    scale = q.shape[-1] ** -0.5
                    value, slope = compare(
                        (q[at] * scale) @ k[at].mT,
                        (qt[at] * qt.shape[-1] ** -0.5) @ kt[at].mT,
                        None if keep is None else keep[at],
                    )
                    total += (value * w[at]).sum()
                    if needed:
                        slope.mul_(w[at, :, None] * scale)
                        grads[0][at], grads[1][at] = slope @ k[at], slope.mT @ q[at]
                for pieces, gradient in zip(gradients, grads, strict=True):
                    if needed:
                        pieces.append(_ungrouped(rectangle, gradient).to(left.dtype))
        ctx.save_for_backward(*(torch.cat(pieces) for pieces in gradients if pieces))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Any, ...]:
        """Return the gradients for the student's vectors."""
        left, right = (gradient * grad_total for gradient in ctx.saved_tensors)
        return None, None, None, left, right, None, None


def _grouped(
    rectangle: Rectangle, x: Float[Tensor, "tokens groups d"]
) -> Float[Tensor, "_ longest d"]:
    """Return a rectangle's vectors with a matrix for each sequence and group."""
    return rectangle.pad(x).transpose(1, 2).flatten(0, 1)


def _ungrouped(
    rectangle: Rectangle, x: Float[Tensor, "_ longest d"]
) -> Float[Tensor, "part groups d"]:
    """Undo `_grouped`."""
    return rectangle.unpad(x.reshape(rectangle.rows, -1, *x.shape[1:]).transpose(1, 2))


def _group_chunks(x: Float[Tensor, "groups longest d"]) -> Iterator[slice]:
    """Yield parts of the groups whose scores are as many as the cache holds."""
    elements = TUNING.loss_chunk_elements_cuda if x.is_cuda else TUNING.loss_chunk_elements_cpu
    count = max(1, elements // (PAIR_ARRAYS * x.shape[1] ** 2))
    return (slice(at, at + count) for at in range(0, len(x), count))


def in_parts(
    compute: Callable[[Float[Tensor, "rows width"], slice], Float[Tensor, ""]],
    x: Float[Tensor, "tokens width"],
    parameters: Iterable[Tensor],
    rows: int,
) -> Float[Tensor, ""]:
    """Return Σ over parts of `compute(x[part], part)`, made with its gradient part by part.

    What `compute` makes of a part, such as logits, exists for one part at a time.

    Args:
        parameters: all other tensors that need a gradient of it.
        rows: maximum number of rows of a chunk.
    """
    if not torch.is_grad_enabled():
        chunks = (slice(at, at + rows) for at in range(0, len(x), rows))
        return torch.stack([x.new_zeros(()), *(compute(x[chunk], chunk) for chunk in chunks)]).sum()
    result: Tensor = _InParts.apply(compute, rows, x, *parameters)  # type: ignore[no-untyped-call]
    return result


class _InParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        compute: Callable[[Tensor, slice], Tensor],
        rows: int,
        x: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        """Return the sum, and accumulate the gradients."""
        total: Tensor = x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
        grad_x = torch.zeros_like(x)
        gradients = [torch.zeros_like(p) if p.requires_grad else None for p in parameters]
        learned = [p for p in parameters if p.requires_grad]
        for at in range(0, len(x), rows):
            chunk = slice(at, at + rows)
            with torch.enable_grad():
                inputs = x[chunk].detach().requires_grad_()
                value = compute(inputs, chunk)
            total += value.detach()
            grads = torch.autograd.grad(value, [inputs, *learned], allow_unused=True)
            grad_x[chunk] = grads[0]
            trained_gradients = (g for g in gradients if g is not None)
            for gradient, addition in zip(trained_gradients, grads[1:], strict=True):
                if addition is not None:
                    gradient.add_(addition)
        ctx.save_for_backward(grad_x, *gradients)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Any, ...]:
        """Return the gradients for x and the parameters."""
        grads = (None if g is None else g * grad_total for g in ctx.saved_tensors)
        return None, None, *grads


def cosine_distance(
    student: Float[Tensor, "tokens width"],
    teacher: Float[Tensor, "tokens width"],
    weight: Float[Tensor, " tokens"],
) -> Float[Tensor, ""]:
    """Return Σ over tokens of weight · (1 − cos(student, teacher)), in fp32 or finer."""
    exact = torch.promote_types(student.dtype, torch.float32)
    cosine = F.cosine_similarity(student.to(exact), teacher.to(exact), dim=1)
    return ((1 - cosine) * weight).sum()


def squared_distance(
    student: Float[Tensor, "tokens width"],
    teacher: Float[Tensor, "tokens width"],
    weight: Float[Tensor, " tokens"],
) -> Float[Tensor, ""]:
    """Return Σ over tokens of weight · |student − teacher|², in fp32 or finer."""
    exact = torch.promote_types(student.dtype, torch.float32)
    return ((student.to(exact) - teacher.to(exact)).square().sum(1) * weight).sum()
