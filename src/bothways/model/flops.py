"""The cost of a token: operations of a forward pass, and the numbers that a backward pass keeps.

Source: counted as in Kaplan et al. 2020, section 2.1, with heads and attention over the sequence
added.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn
from typing_extensions import assert_never

from bothways.core.runtime.devices import Precision, resolve_precision
from bothways.model.attention.dispatch import AttentionCall, Compiled, choose
from bothways.model.attention.mask import sees_all
from bothways.model.attention.patterns import Blocks, Causal, Full, Pattern, Window
from bothways.model.config import EncoderConfig, Gated
from bothways.model.heads import (
    Head,
    MaskedHead,
    MaskedOutput,
    NextTokenOutput,
    OwnOutput,
    PoolerHead,
    with_pooler,
)
from bothways.model.init import without_weights
from bothways.model.positions import Disentangled

BACKWARD = 2
"""The backward pass has two products for each one of the forward pass: the gradients of the input
and of the weights."""


def seen(pattern: Pattern, length: int) -> float:
    """Return the mean number of tokens of a sequence that a token attends to."""
    match pattern:
        case Full():
            return float(length)
        case Blocks():
            return _seen_in_blocks(pattern, length)
        case Window(radius):
            # 2 · near + 1, less what is cut off at both ends: 2 · (1 + 2 + … + near) / length.
            near = min(radius, length - 1)
            return 2 * near + 1 - near * (near + 1) / length
        case Causal():
            return (length + 1) / 2
        case _:
            assert_never(pattern)


def _seen_in_blocks(pattern: Blocks, length: int) -> float:
    """Return the same for blocks; one that is read twice counts twice, as it is computed."""
    if length <= pattern.dense:
        return float(length)
    size, count = pattern.size, -(-length // pattern.size)
    last_size = length - (count - 1) * size
    outer, inner = size + last_size, (count - 2) * size
    # Of the inner blocks the first and the last have a global neighbour, which counts already.
    near = 3 * inner - 2 * size
    return (outer * length + inner * (outer + pattern.random * size) + size * near) / length


def forward_flops(
    config: EncoderConfig, heads: Iterable[Head], length: int, predicted: float = 0.15
) -> float:
    """Return floating-point operations per token of a forward pass.

    A multiply-add in a matrix product counts as 2; nothing else counts. Attention costs 4·L·H·n
    per token for scores and sums, with n the tokens that it sees: the reference kernel computes
    more and masks it. For global tokens of a batch, and for what is made from relative positions
    once per batch, only projections count. The part of the last block after attention is counted
    for the tokens that a head reads; without heads, for all.

    Args:
        config: the encoder.
        heads: what reads it.
        length: tokens of a sequence.
        predicted: the share of tokens that the masked LM head predicts.
    """
    specification = with_pooler(config, heads)
    of_heads = sum(_head_flops(config, head, length, predicted) for head in specification)
    blocks = sum(_block_flops(config, layer, length) for layer in range(config.depth))
    projection = 0 if config.embedding is None else 2 * config.embedding * config.width
    unread = (1 - _share_read(config, specification, length, predicted)) * _tail_flops(config)
    encoder = projection + blocks * (config.steps // config.depth) + _convolution_flops(config)
    if MaskedHead() in specification:
        of_heads += _decoder_flops(config, length, predicted)
    return encoder - unread + of_heads


def _head_flops(config: EncoderConfig, head: Head, length: int, predicted: float) -> float:
    """Return the operations of a head per token, counted from the matrices of its module."""
    with without_weights():
        module = head.build(config)
    rows = predicted if isinstance(head, MaskedHead) else 1 / length if head.of_sequences else 1.0
    operations = 0.0
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            late = (
                isinstance(module, OwnOutput) and module.reads == "late" and layer is module.inner
            )
            operations += 2.0 * layer.weight.numel() * (1.0 if late else rows)
    if isinstance(module, MaskedOutput | NextTokenOutput) and module.output is None:
        operations += 2.0 * rows * config.embedding_width * config.vocab  # the token embedding
    return operations


def _block_flops(config: EncoderConfig, layer: int, length: int) -> float:
    # Queries are of the full width; keys and values of that of their heads.
    h, groups = config.width, config.key_value_heads or config.heads
    projections = 1 + 2 * groups / config.heads + 3 * config.has_global_attention
    scores = 4 * h * seen(config.pattern(layer), length)
    if isinstance(config.position, Disentangled):  # products with 2n − 1 distances, for each term
        scores += len(config.position.terms) * 2.0 * h * (2 * length - 1)
    return 2 * projections * h * h + scores + _tail_flops(config)


def _tail_flops(config: EncoderConfig) -> float:
    """Return the operations of a block after attention: its output and the feed-forward layer."""
    h, matrices = config.width, 3 if isinstance(config.mlp, Gated) else 2
    return 2.0 * (h * h + matrices * h * config.intermediate_size)


def _convolution_flops(config: EncoderConfig) -> float:
    position = config.position
    if not isinstance(position, Disentangled) or position.convolution is None:
        return 0.0
    return 2.0 * position.convolution.size * config.width**2 / position.convolution.groups


def _decoder_flops(config: EncoderConfig, length: int, predicted: float) -> float:
    """Return the operations of an enhanced mask decoder.

    It is the last block twice more, with queries of its own; the second time at predicted tokens.
    """
    position = config.position
    if not isinstance(position, Disentangled) or position.absolute != "decoder":
        return 0.0
    twice = 2 * (_block_flops(config, config.depth - 1, length) + 2 * config.width**2)
    return twice - (1 - predicted) * _tail_flops(config)


def _share_read(
    config: EncoderConfig, heads: Iterable[Head], length: int, predicted: float
) -> float:
    """Return the share of tokens whose last vectors the heads read.

    It is 1 for a pooler alone or no head: then all vectors are the result.
    """
    specification = set(heads)
    if specification <= {PoolerHead()} or (config.depth == 1 and _convolution_flops(config)):
        return 1.0
    masked = predicted if MaskedHead() in specification else 0.0
    rest_blocks = [
        1 / length if head.reads_one_token(config) else 1.0
        for head in specification - {MaskedHead()}
    ]
    return min(1.0, masked + max(rest_blocks, default=0.0))


def kept_floats(
    config: EncoderConfig,
    length: int,
    device: torch.device,
    recompute: bool = False,
    precision: Precision = "auto",
) -> float:
    """Estimate the numbers that the backward pass keeps of each token, in sequences of this length.

    With `recompute` these are the input of each block, and all that one block keeps. The compiled
    attention kernel keeps no probabilities; nor do a GPU's kernels without scores of relative
    positions. The device may be of another machine.
    """
    # Per block: inputs of norms, products and dropouts. Attention in rectangles also keeps
    # probabilities with their mask, and queries, keys and values once more.
    attention = []
    for pattern in (config.pattern(layer) for layer in range(config.depth)):
        full = sees_all(pattern, length) and not config.has_relative_scores
        fused = full and device.type != "cpu"
        shares = 0.0 if fused else 2 * config.heads * seen(pattern, length)
        compiled = _is_compiled(config, pattern, length, device, precision, learning=True)
        attention.append(0.0 if compiled else 4.0 * config.width + shares)
    blocks = [12.0 * config.width + 2 * config.intermediate_size + value for value in attention]
    if recompute:
        return (config.steps - 1) * config.width + max(blocks)
    return sum(blocks) * (config.steps // config.depth)


def passing_floats(
    config: EncoderConfig, length: int, device: torch.device, precision: Precision = "auto"
) -> float:
    """Estimate the numbers of each token that exist at once in a pass without gradient.

    That is at the widest place of a block: between the matrices of the feed-forward layer, or in
    attention. Kernels that keep no scores need as much at any length.
    """
    relative, attention = config.has_relative_scores, [0.0]
    for pattern in (config.pattern(layer) for layer in range(config.depth)):
        compiled = _is_compiled(config, pattern, length, device, precision)
        if relative or not (compiled or sees_all(pattern, length)):
            # Relative positions have scores of their own, before and after they are gathered.
            attention.append((5 if relative else 2) * config.heads * seen(pattern, length))
    between = (4 if isinstance(config.mlp, Gated) else 2) * config.intermediate_size
    return 6.0 * config.width + max(between, config.width + max(attention))


def _is_compiled(
    config: EncoderConfig,
    pattern: Pattern,
    length: int,
    device: torch.device,
    precision: Precision,
    learning: bool = False,
) -> bool:
    """Return True if the compiled kernel computes attention, which keeps no scores."""
    if device.type != "cpu":
        return False
    call = AttentionCall(
        device, resolve_precision(precision, device), config.width // config.heads, length, pattern,
        config.dropout.attention if learning else 0.0,
        learning=learning, relative=config.has_relative_scores,
    )  # fmt: skip
    return choose(call) == Compiled()


class LossFloats(NamedTuple):
    """The numbers that the losses of a step hold, in addition to the activations of the model.

    Attributes:
        per_token: such as predictions over the vocabulary with their gradient.
        read: of each token, what the pass of a frozen model leaves for the losses.
        fixed: whatever the number of tokens.
    """

    per_token: float = 0.0
    read: float = 0.0
    fixed: float = 0.0
