"""Cross-entropy as a sum over rows and a count of hits.

| device | `runs_on` | logits | by |
|---|---|---|---|
| CPU | yes | fp32 or bf16 | one kernel |
| any other | | | PyTorch's operators, some rows at a time |

At a vocabulary of 30,000 the loss moves more memory than a small encoder does. torch's own makes
five fp32 arrays of the size of the logits; here a few rows at a time are taken from logits to
gradient, softmax − one-hot, while they are in the cache.

The kernel keeps, of each row, the largest logit and the log of the sum of exponentials; the
gradient is computed once, already multiplied by the loss's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from bothways.core.batch import IGNORED
from bothways.core.runtime.tuning import TUNING
from bothways.core.training_module import Loss
from bothways.model.kernels import abi
from bothways.model.kernels.library import FORMATS, LabelError, call_kernel, runs_on


def cross_entropy(
    logits: Float[Tensor, "targets classes"], labels: Int[Tensor, " targets"]
) -> Loss:
    """Return −Σ log softmax(logits)[label] over the labels that are not `IGNORED`.

    The sum is in fp32 or finer. A hit is a row whose label has the first of the largest logits.

    Raises:
        IndexError: a label is not the number of a class.
        ValueError: the numbers of labels and rows differ.
    """
    if labels.shape != logits.shape[:1]:
        shapes = f"{[*logits.shape]} and {[*labels.shape]}"
        raise ValueError(f"logits and labels need equal numbers of rows, not shapes {shapes}")
    readable = logits.dtype in {torch.float32, torch.bfloat16} and labels.dtype is torch.int64
    function = _CompiledLoss if readable and runs_on(logits.device) else _ChunkedLoss
    total, hits = function.apply(logits, labels)  # type: ignore[no-untyped-call]
    return Loss(total, hits)


class _CompiledLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits, labels = logits.contiguous(), labels.contiguous()
        # log softmax(z)[label] = z[label] − largest − log Σ exp(z − largest): two numbers a row
        # are all that the backward pass needs beyond the logits.
        normalizers = logits.new_empty(len(logits), 2, dtype=torch.float32)
        losses = logits.new_empty(len(logits), dtype=torch.float32)
        hits = labels.new_empty(len(labels), dtype=torch.uint8)
        batch = _struct(logits, labels)
        try:
            call_kernel("bothways_cross_entropy", batch, normalizers, losses, hits)
        except LabelError:
            # The kernel has compared the labels anyway; only the message needs them here.
            counted = labels[labels != IGNORED]
            reach = f"{counted.min()} to {counted.max()}"
            message = f"labels reach from {reach}, but there are {logits.shape[1]} classes"
            raise IndexError(message) from None
        count = hits.sum()
        ctx.mark_non_differentiable(count)
        ctx.save_for_backward(logits, labels, normalizers)
        # PyTorch sums in blocks: the rounding error does not grow with the number of rows.
        return losses.sum(), count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _hits: Tensor) -> tuple[Tensor, None]:
        logits, labels, normalizers = ctx.saved_tensors
        # (softmax(z) − one_hot(label)) · grad_total in one pass over the logits. The kernel reads
        # the factor through its address.
        grad_logits, grad_total = torch.empty_like(logits), grad_total.contiguous()
        inputs = _struct(logits, labels), normalizers, grad_total
        call_kernel("bothways_cross_entropy_backward", *inputs, grad_logits)
        return grad_logits, None


def _struct(logits: Tensor, labels: Tensor) -> abi.Classification:
    sizes = (*logits.shape, IGNORED, FORMATS[logits.dtype])
    return abi.Classification(logits.data_ptr(), labels.data_ptr(), *sizes)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(logits.dtype, torch.float32)
        total, hits = logits.new_zeros((), dtype=exact), logits.new_zeros((), dtype=torch.int64)
        grad_logits = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        for rows in row_chunks(logits):
            z, label = logits[rows], labels[rows, None]
            counted = label != IGNORED
            label = label.masked_fill(~counted, 0)  # any class: its loss is multiplied by 0
            largest, best = z.max(1, keepdim=True)
            shifted = z - largest.to(exact)  # the only part in fp32, used in place
            targets = shifted.gather(1, label)
            sums = shifted.exp_().sum(1, keepdim=True)
            total += ((sums.log() - targets) * counted).sum()
            hits += ((best == label) & counted).sum()
            if grad_logits is not None:
                # softmax = exp(shifted) / sums; then −1 at the label, before it is rounded.
                torch.mul(shifted, counted / sums, out=grad_logits[rows])
                of_label = (targets.exp() / sums - 1) * counted
                grad_logits[rows].scatter_(1, label, of_label.to(grad_logits.dtype))
            del shifted  # before the next rows take as much
        ctx.save_for_backward(grad_logits)
        return total, hits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _hits: Tensor) -> tuple[Tensor, None]:
        (grad_logits,) = ctx.saved_tensors
        if not grad_logits.is_cuda or grad_logits.dtype == grad_total.dtype:
            # A CPU multiplies by a scalar in fp32, whatever the dtype of the logits.
            return grad_logits * grad_total, None
        # A GPU would round the scalar to the dtype of the logits, but not a vector of one element.
        return torch.mul(grad_logits, grad_total[None], out=torch.empty_like(grad_logits)), None


def row_chunks(logits: Tensor) -> Iterator[slice]:
    """Yield parts of the rows, so that one part in fp32 exists at a time."""
    cuda, cpu = TUNING.loss_chunk_elements_cuda, TUNING.loss_chunk_elements_cpu
    rows = max(1, (cuda if logits.is_cuda else cpu) // max(1, logits.shape[1]))
    return (slice(at, at + rows) for at in range(0, len(logits), rows))
