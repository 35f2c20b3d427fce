"""What a token costs: operations of a forward pass, and the numbers that a backward pass needs of it.

Source: the count as in Kaplan et al. 2020, section 2.1, with the heads and the attention over the sequence added.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from typing_extensions import assert_never

from bothways.attention.dispatch import AttentionCall, Compiled, choose
from bothways.attention.patterns import Blocks, Causal, Full, Pattern, Window, sees_all
from bothways.model.config import EncoderConfig, Gated
from bothways.model.head_config import (
    BiLMHead,
    ChoiceHead,
    FromPooler,
    Head,
    LabelHead,
    MaskedHead,
    NextTokenHead,
    Own,
    PairHead,
    PoolerHead,
    ReplacedHead,
    SpanHead,
    TagHead,
)
from bothways.model.lstm_config import LSTMConfig, ModelConfig
from bothways.model.model import with_pooler
from bothways.model.position_parameters import convolution_flops, decoder_rows, relative_flops
from bothways.model.positions import Disentangled
from bothways.runtime.devices import resolve_precision

BACKWARD = 2
"""The backward pass multiplies twice for each matrix of the forward one: gradients of the input and of the weights."""


def _read_flops(reads: FromPooler | Own | None, width: int, outputs: int) -> int:
    return 2 * width * (outputs + (width if isinstance(reads, Own) else 0))


def seen(pattern: Pattern, length: int) -> float:
    """How many tokens of a sequence a token sees, on average."""
    match pattern:
        case Full():
            return float(length)
        case Blocks():
            return _seen_in_blocks(pattern, length)
        case Window(radius):
            near = min(radius, length - 1)
            return 2 * near + 1 - near * (near + 1) / length
        case Causal():
            return (length + 1) / 2
        case _:
            assert_never(pattern)


def _seen_in_blocks(pattern: Blocks, length: int) -> float:
    """A block that is read twice counts twice: so it is computed."""
    if length <= pattern.dense:
        return float(length)
    size, count = pattern.size, -(-length // pattern.size)
    last = length - (count - 1) * size
    outer, inner = size + last, (count - 2) * size
    near = (
        3 * inner - 2 * size
    )  # the first and the last of these have a global neighbour, which is counted already
    return (outer * length + inner * (outer + pattern.random * size) + size * near) / length


def forward_flops(
    config: ModelConfig, heads: Iterable[Head], length: int, predicted: float = 0.15
) -> float:
    """Floating-point operations per token of a forward pass: 2 for each multiply-add of a matrix product, nothing else.

    Args:
        config: the encoder.
        heads: what reads it.
        length: tokens of a sequence; attention costs 4·L·H·length per token for scores and sums, in a window, in blocks or
            left to right only what is seen: what the reference kernel computes and masks is more. Global tokens that a batch
            names cost what they are made by; what they see is not counted, nor what is made of relative positions once a batch.
        predicted: share of tokens that the masked LM head predicts.

    The last block's part after attention is counted for the tokens that a head reads; without heads, for all.
    """
    wanted = with_pooler(config, heads)
    of_heads = sum(_head_flops(config, head, length, predicted) for head in wanted)
    if isinstance(config, LSTMConfig):
        return _recurrent_flops(config) + of_heads
    return _transformer_flops(config, length, _asked(config, wanted, length, predicted)) + of_heads


def _recurrent_flops(config: LSTMConfig) -> float:
    e, m = config.projection, config.cells
    return 2.0 * config.depth * 2 * (4 * m * (e + e) + (e * m if m > e else 0))


def _transformer_flops(config: EncoderConfig, length: int, read: float) -> float:
    blocks = sum(_block_flops(config, layer, length) for layer in range(config.depth)) * (
        config.steps // config.depth
    )
    projection = 0 if config.embedding is None else 2 * config.embedding * config.width
    return projection + blocks + convolution_flops(config) - (1 - read) * _tail_flops(config)


def _block_flops(config: EncoderConfig, layer: int, length: int) -> float:
    h, projections = config.width, 6 if config.has_global_attention else 3
    scores = 4 * h * seen(config.pattern(layer), length) + relative_flops(config, length)
    return 2 * projections * h * h + scores + _tail_flops(config)


def _tail_flops(config: EncoderConfig) -> float:
    """What a block does after attention: its output and the feed-forward layer."""
    h, matrices = config.width, 3 if isinstance(config.mlp, Gated) else 2
    return 2.0 * (h * h + matrices * h * config.intermediate_size)


def _asked(config: EncoderConfig, heads: Iterable[Head], length: int, predicted: float) -> float:
    """The share of tokens whose last vectors the heads read; 1 for a pooler alone or none: all vectors are the result."""
    wanted = set(heads)
    if wanted <= {PoolerHead()} or (config.depth == 1 and convolution_flops(config)):
        return 1.0
    masked = predicted if MaskedHead() in wanted else 0.0
    return min(1.0, masked + max(_asked_by(config, head, length) for head in wanted))


def _asked_by(config: EncoderConfig, head: Head, length: int) -> float:
    """The share that a head reads beside what it predicts."""
    match head:
        case MaskedHead():
            return 0.0
        case LabelHead():
            reads: FromPooler | Own = config.readout.labels
        case ChoiceHead():
            reads = config.readout.choice
        case PoolerHead() | PairHead():
            reads = FromPooler()
        case TagHead() | SpanHead() | ReplacedHead() | NextTokenHead() | BiLMHead():
            return 1.0
        case _:
            assert_never(head)
    return 1.0 if isinstance(reads, Own) and reads.reads == "mean" else 1 / length


def _decoder_flops(config: ModelConfig, length: int, predicted: float) -> float:
    """The last block twice more, with queries of its own, in an enhanced mask decoder; the second time where it predicts."""
    if not isinstance(config, EncoderConfig) or not decoder_rows(config):
        return 0.0
    twice = 2 * (_block_flops(config, config.depth - 1, length) + 2 * config.width**2)
    return twice - (1 - predicted) * _tail_flops(config)


def _head_flops(config: ModelConfig, head: Head, length: int, predicted: float) -> float:
    h = config.width
    match head:
        case MaskedHead():
            return _decoder_flops(
                config, length, predicted
            ) + predicted * 2 * config.embedding_width * (h + config.vocab)
        case PoolerHead():
            return 2 * h * h / length
        case PairHead():
            return 2 * 2 * h / length
        case LabelHead(count):
            return _read_flops(config.readout.labels, h, count) / length
        case TagHead(count):
            return float(_read_flops(config.readout.tokens, h, count))
        case SpanHead() if isinstance(config, EncoderConfig) and config.readout.span is not None:
            return 4.0 * h * (config.intermediate_size + 1)
        case SpanHead():
            return float(_read_flops(config.readout.tokens, h, 2))
        case ReplacedHead():
            return 2.0 * h * (h + 1)
        case ChoiceHead():
            return _read_flops(config.readout.choice, h, 1) / length
        case NextTokenHead() | BiLMHead():
            return 2.0 * h * config.vocab
        case _:
            assert_never(head)


def kept_floats(
    config: ModelConfig, length: int, device: torch.device, recompute: bool = False
) -> float:
    """Numbers that the backward pass needs of each token in sequences of this length, by estimate.

    Where blocks are computed again, that is the input of each, and all that one of them keeps. The library's own attention
    (`kernels.is_compiled`) keeps no probabilities where all see all; nor do a GPU's kernels, without disentangled positions.
    """
    if isinstance(config, LSTMConfig):
        # Per layer and direction: gates, cells before and after their activation, what was read, dropped and given.
        layer = 2.0 * (7 * config.cells + 4 * config.projection)
        return layer + (config.depth - 1) * (2 * config.projection if recompute else layer)
    # Per block: inputs of the norms, of the matrix products and of the dropouts; the probabilities and their mask, and queries,
    # keys and values once more in their rectangles, unless attention is the library's own.
    shape = (device, resolve_precision("auto", device), config.width // config.heads, length)
    plain = not isinstance(config.position, Disentangled)
    call = AttentionCall(*shape, dropout=config.dropout.attention, learning=True)
    own = plain and choose(call) == Compiled()
    fused = plain and device.type != "cpu"
    attention = []
    for pattern in (config.pattern(layer) for layer in range(config.depth)):
        whole = sees_all(pattern, length)
        shares = 0.0 if fused and whole else 2 * config.heads * seen(pattern, length)
        attention.append(0.0 if own and whole else 4.0 * config.width + shares)
    blocks = [12.0 * config.width + 2 * config.intermediate_size + each for each in attention]
    return (
        (config.steps - 1) * config.width + max(blocks)
        if recompute
        else sum(blocks) * (config.steps // config.depth)
    )
