"""Attention from the words of the papers, sequence by sequence in double precision, for tests to compare with."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bothways.model.attention.bigbird_random import RandomBlocks, random_blocks
from bothways.model.attention.mask import EVERYTHING
from bothways.model.attention.patterns import Blocks, Causal, Pattern, Window

HEADS, SIZE = 2, 4


class OnGpu(Tensor):
    """A tensor that claims to be on a GPU."""

    is_cuda = True


def counts(
    pattern: Pattern, length: int, chosen: Tensor | None = None, random: RandomBlocks | None = None
) -> Tensor:
    """How often each query reads each key, of all heads or `(heads, length, length)`."""
    place = torch.arange(length)
    match pattern:
        case Causal():
            return (place <= place[:, None]).double()
        case Window(radius):
            near = (place[:, None] - place).abs() <= radius
            return (near if chosen is None else near | chosen | chosen[:, None]).double()
        case Blocks(size) if length > pattern.dense:
            block, last = place // size, (length - 1) // size
            ends = (block == 0) | (block == last)
            near = ((block[:, None] - block).abs() <= 1) | ends | ends[:, None]
            read = near.double().repeat(HEADS, 1, 1)
            drawn = random_blocks(random, length, pattern).expand(HEADS, -1, -1)
            for head in range(HEADS):
                for number in range(1, last):
                    for other in drawn[head, number].tolist():
                        read[head][(block == number)[:, None] & (block == other)] += 1
            return read
        case _:
            return torch.ones(length, length, dtype=torch.float64)


def softmax(qkv: Tensor, read: Tensor) -> Tensor:
    """softmax(QKᵀ/√d)V of a sequence `(length, 3, heads, d)`, a key counted as often as it is read."""
    q, k, v = qkv.double().unbind(1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("hqk,khd->qhd", (scores + read.log()).softmax(-1), v)


def formula(qkv: Tensor, lengths: list[int], pattern: Pattern = EVERYTHING) -> Tensor:
    """Attention of each sequence by itself."""
    return torch.cat([softmax(part, counts(pattern, len(part))) for part in qkv.split(lengths)])


def sparse_formula(
    qkv: Tensor,
    global_qkv: Tensor,
    lengths: list[int],
    pattern: Pattern,
    is_global: Tensor,
    random: RandomBlocks | None,
) -> Tensor:
    """Attention in windows with global tokens, and in blocks."""
    parts = []
    for part, far, chosen in zip(
        qkv.split(lengths), global_qkv.split(lengths), is_global.split(lengths), strict=True
    ):
        outputs = softmax(part, counts(pattern, len(part), chosen, random))
        if isinstance(pattern, Window):
            everything = softmax(far, counts(EVERYTHING, len(part)))
            outputs = torch.where(chosen[:, None, None], everything, outputs)
        parts.append(outputs)
    return torch.cat(parts)


def assert_same_with_gradients(
    found: Tensor, wanted: Tensor, mine: Sequence[Tensor], reference: Sequence[Tensor], near: float
) -> None:
    """Outputs, and the gradients of a random sum of them for inputs and their copies in double precision."""
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=near)
    above = torch.randn(wanted.shape, dtype=wanted.dtype)
    slopes = (
        torch.autograd.grad((x * above).sum(), inputs, allow_unused=True, materialize_grads=True)
        for x, inputs in ((found, mine), (wanted, reference))
    )
    for slope, other in zip(*slopes, strict=True):
        torch.testing.assert_close(slope.double(), other, rtol=1e-5, atol=4 * near)
