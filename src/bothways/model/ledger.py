"""The parameters of a model, part by part, by formula; and what a token costs.

The textbook says a BERT has V·H + 12·L·H² parameters. That leaves out positions, segments, biases, LayerNorms and heads: about
one in a hundred for the base size. The ledger lists both to the last one.

Source: Devlin et al. 2018, section 3; the count of operations as in Kaplan et al. 2020, section 2.1, with the heads and the
attention over the sequence added.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from typing_extensions import assert_never

from bothways.model.config import EncoderConfig
from bothways.model.heads import Choice, Head, Labels, Masked, Pair, Pooled, Span, Tags

BACKWARD = 2
"""The backward pass multiplies twice for each matrix of the forward one: gradients of the input and of the weights."""


@dataclass(frozen=True)
class Entry:
    """Attributes:
    part: of the model.
    formula: in V, H, L, I (inner), P (positions), S (segments), C (labels).
    count: of parameters.
    textbook: whether V·H + 12·L·H² counts it.
    """

    part: str
    formula: str
    count: int
    textbook: bool = False


@dataclass(frozen=True)
class Ledger:
    """All parts of a model; a tensor that two parts share stands in the first."""

    entries: tuple[Entry, ...]

    @property
    def textbook(self) -> int:
        return sum(entry.count for entry in self.entries if entry.textbook)

    @property
    def total(self) -> int:
        return sum(entry.count for entry in self.entries)


def ledger(config: EncoderConfig, heads: Iterable[Head] = ()) -> Ledger:
    """Every parameter of the encoder and of these heads."""
    v, h, n, i = config.vocab, config.width, config.depth, config.inner
    encoder = (
        Entry("token embedding", "V·H", v * h, textbook=True),
        Entry("attention: query, key, value, output", "4·L·H²", 4 * n * h * h, textbook=True),
        Entry("feed-forward: up, down", "2·L·H·I", 2 * n * h * i, textbook=True),
        Entry("position embedding", "P·H", config.position.most * h),
        Entry("segment embedding", "S·H", config.segments * h),
        Entry("attention biases", "4·L·H", 4 * n * h),
        Entry("feed-forward biases", "L·(I + H)", n * (i + h)),
        # Post-norm has one after the embedding, pre-norm one after the last block.
        Entry("LayerNorms", "(2·L + 1)·2·H", (2 * n + 1) * 2 * h),
    )
    return Ledger((*encoder, *(_entry(config, head) for head in heads)))


def _entry(config: EncoderConfig, head: Head) -> Entry:
    v, h = config.vocab, config.width
    match head:
        case Pooled():
            return Entry("pooler", "H² + H", h * h + h)
        case Masked():
            return Entry("masked LM head", "H² + H + 2·H + V", h * h + 3 * h + v)
        case Pair():
            return Entry("next sentence head", "2·H + 2", 2 * h + 2)
        case Labels(count):
            return Entry("label head", "C·H + C", count * h + count)
        case Tags(count):
            return Entry("tag head", "C·H + C", count * h + count)
        case Span():
            return Entry("span head", "2·H + 2", 2 * h + 2)
        case Choice():
            return Entry("choice head", "H + 1", h + 1)
        case _:
            assert_never(head)


def forward_flops(config: EncoderConfig, heads: Iterable[Head], length: int, predicted: float = 0.15) -> float:
    """Floating-point operations per token of a forward pass: 2 for each multiply-add of a matrix product, nothing else.

    Args:
        config: the encoder.
        heads: what reads it.
        length: tokens of a sequence; attention costs 4·L·H·length per token for scores and sums.
        predicted: share of tokens that the masked LM head predicts.
    """
    h, n = config.width, config.depth
    blocks = n * (2 * (4 * h * h + 2 * h * config.inner) + 4 * h * length)
    return blocks + sum(_head_flops(config, head, length, predicted) for head in heads)


def _head_flops(config: EncoderConfig, head: Head, length: int, predicted: float) -> float:
    h = config.width
    match head:
        case Masked():
            return predicted * 2 * (h * h + h * config.vocab)
        case Pooled():
            return 2 * h * h / length
        case Pair():
            return 2 * 2 * h / length
        case Labels(count):
            return 2 * count * h / length
        case Tags(count):
            return 2.0 * count * h
        case Span():
            return 2.0 * 2 * h
        case Choice():
            return 2 * h / length
        case _:
            assert_never(head)
