"""Attention from the words of the papers, sequence by sequence in double precision, for tests to compare with."""

import torch
from torch import Tensor

from bothways.model.attention.bigbird_random import RandomBlocks, random_blocks
from bothways.model.attention.mask import EVERYTHING
from bothways.model.attention.patterns import Blocks, Causal, Full, Pattern, Window

HEADS, SIZE = 2, 4


class OnGpu(Tensor):
    """A tensor that claims to be on a GPU."""

    is_cuda = True


def visible(pattern: Pattern, length: int) -> Tensor:
    """Which keys each query reads `(length, length)`."""
    place = torch.arange(length)
    match pattern:
        case Full():
            return torch.ones(length, length, dtype=torch.bool)
        case Window(radius):
            return (place[:, None] - place).abs() <= radius
        case Causal():
            return place <= place[:, None]
        case Blocks():
            raise NotImplementedError


def formula(qkv: Tensor, lengths: list[int], pattern: Pattern = EVERYTHING) -> Tensor:
    """softmax(QKᵀ/√d)V of each sequence."""
    parts = []
    for part in qkv.double().split(lengths):
        q, k, v = part.permute(1, 2, 0, 3)
        scores = q @ k.mT / qkv.shape[-1] ** 0.5
        scores = scores.masked_fill(~visible(pattern, len(part)), float("-inf"))
        parts.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(parts)


def counts(pattern: Pattern, length: int, chosen: Tensor, random: RandomBlocks | None) -> Tensor:
    """How often each query reads each key `(heads, length, length)`."""
    place = torch.arange(length)
    match pattern:
        case Window(radius):
            near = ((place[:, None] - place).abs() <= radius) | chosen | chosen[:, None]
            return near.double().expand(HEADS, -1, -1)
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
            return torch.ones(HEADS, length, length, dtype=torch.float64)


def softmax(q: Tensor, k: Tensor, v: Tensor, read: Tensor) -> Tensor:
    """`(length, heads, d)` each, and how often each key is read."""
    scores = torch.einsum("qhd,khd->hqk", q, k) / SIZE**0.5
    shares = read * torch.exp(scores - scores.amax(-1, keepdim=True))
    return torch.einsum("hqk,khd->qhd", shares / shares.sum(-1, keepdim=True), v)


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
        outputs = softmax(*part.unbind(1), counts(pattern, len(part), chosen, random))
        if isinstance(pattern, Window):
            all_seen = torch.ones(HEADS, len(part), len(part), dtype=torch.float64)
            outputs = torch.where(chosen[:, None, None], softmax(*far.unbind(1), all_seen), outputs)
        parts.append(outputs)
    return torch.cat(parts)
