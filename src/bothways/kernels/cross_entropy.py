"""Cross-entropy as a sum and a count of hits, in one pass over the logits."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from bothways.core.loss import Loss
from bothways.core.targets import IGNORED
from bothways.kernels.library import INT32, INT64, POINTER, call, serves

CHUNK_ELEMENTS = {"cpu": 2**19, "cuda": 2**26}
"""So many logits are taken at a time: on a CPU so few that their fp32 copy stays in its cache; a GPU, which waits for each
operation to start, takes 256 MiB of them."""


def _chunks(logits: Tensor) -> Iterator[slice]:
    rows = max(1, CHUNK_ELEMENTS["cuda" if logits.is_cuda else "cpu"] // max(1, logits.shape[1]))
    return (slice(at, at + rows) for at in range(0, len(logits), rows))


class _SoftmaxLoss(torch.autograd.Function):
    """Σ over rows of −log softmax(logits)[label], and how many rows are right; labels equal to `IGNORED` count for nothing."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(logits.dtype, torch.float32)
        total, hits = logits.new_zeros((), dtype=exact), logits.new_zeros((), dtype=torch.int64)
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        for part in _chunks(logits):
            z, label = logits[part].to(exact), labels[part, None]
            counted = label != IGNORED
            label = label.masked_fill(~counted, 0)
            top, best = z.max(1, keepdim=True)
            shifted = z.sub(top)
            chosen = shifted.gather(1, label)
            sums = shifted.exp_().sum(1, keepdim=True)
            total += ((sums.log() - chosen) * counted).sum()
            hits += ((best == label) & counted).sum()
            if gradient is not None:
                shifted.mul_(counted / sums).scatter_add_(1, label, -counted.to(exact))
                gradient[part] = shifted
        ctx.mark_non_differentiable(hits)
        ctx.save_for_backward(gradient)
        return total, hits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, total: Tensor, _hits: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        if not gradient.is_cuda or gradient.dtype == total.dtype:
            return (
                gradient * total,
                None,
            )  # a CPU multiplies by a number in fp32, whatever the logits are in
        result = torch.empty_like(gradient)
        for part in _chunks(gradient):
            result[part] = gradient[part].to(total.dtype) * total
        return result, None


class _Classified(ctypes.Structure):
    _fields_ = [
        ("logits", POINTER), ("labels", POINTER), ("rows", INT64), ("classes", INT64), ("ignored", INT64), ("bf16", INT32)
    ]  # fmt: skip


class _KernelLoss(torch.autograd.Function):
    """The same by the library's own kernel: of a row no more is kept than its largest logit and the logarithm of its sum."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits, labels = logits.contiguous(), labels.contiguous()
        sums, losses = (
            logits.new_empty(len(logits), 2, dtype=torch.float32),
            logits.new_empty(len(logits), dtype=torch.float32),
        )
        hits = labels.new_empty(len(labels), dtype=torch.uint8)
        places = (sums.data_ptr(), losses.data_ptr(), hits.data_ptr())
        call("bothways_lose", "a loss", ctypes.byref(_classified(logits, labels)), *places)
        found = hits.sum()
        ctx.mark_non_differentiable(found)
        ctx.save_for_backward(logits, labels, sums)
        return losses.sum(), found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, total: Tensor, _hits: Tensor) -> tuple[Tensor, None]:
        logits, labels, sums = ctx.saved_tensors
        gradient, total = torch.empty_like(logits), total.contiguous()
        places = (sums.data_ptr(), total.data_ptr(), gradient.data_ptr())
        call(
            "bothways_lose_backward",
            "a gradient",
            ctypes.byref(_classified(logits, labels)),
            *places,
        )
        return gradient, None


def _classified(logits: Tensor, labels: Tensor) -> _Classified:
    return _Classified(
        logits.data_ptr(), labels.data_ptr(), *logits.shape, IGNORED, logits.dtype is torch.bfloat16
    )


def cross_entropy(
    logits: Float[Tensor, "targets classes"], labels: Int[Tensor, " targets"]
) -> Loss:
    """−Σ log softmax(logits)[label] over the labels that are not `IGNORED`, summed in fp32 or finer.

    | device | own kernels | logits | by |
    |---|---|---|---|
    | CPU | yes | fp32 or bf16 | one kernel |
    | any other | | | torch's operators |

    Raises:
        IndexError: a label is no class.
        ValueError: there are more labels than rows, or fewer.
    """
    if labels.shape != logits.shape[:1]:
        raise ValueError(
            f"logits of shape {[*logits.shape]} need as many labels as rows, not {[*labels.shape]}"
        )
    own = (
        logits.dtype in {torch.float32, torch.bfloat16}
        and labels.dtype is torch.int64
        and serves(logits.device)
    )
    if own and bool((((labels < 0) | (labels >= logits.shape[1])) & (labels != IGNORED)).any()):
        raise IndexError(
            f"a label is none of {logits.shape[1]} classes: the labels reach from {labels.min()} to {labels.max()}"
        )
    total, hits = (_KernelLoss if own else _SoftmaxLoss).apply(logits, labels)  # type: ignore[no-untyped-call]
    return Loss(total, hits)
