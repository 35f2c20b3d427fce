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

from bothways.model.config import EncoderConfig, FromPooler, Learned, Own, PostNorm
from bothways.model.heads import Choice, Head, Labels, Masked, Pair, Pooled, Replaced, Span, Tags, completed

BACKWARD = 2
"""The backward pass multiplies twice for each matrix of the forward one: gradients of the input and of the weights."""


@dataclass(frozen=True)
class Entry:
    """Attributes:
    part: of the model.
    formula: in V, H, L (blocks with weights of their own), I (inner), P (positions), S (segments), C (labels), E (embedding).
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
    """Every parameter of the encoder and of these heads, with the pooler if they read it."""
    v, h, n, i, e = config.vocab, config.width, config.blocks, config.inner, config.embedding_width
    letter = "H" if config.embedding is None else "E"
    # Post-norm has one after the embedding, pre-norm one after the last block.
    other = e if isinstance(config.order, PostNorm) else h
    rows = config.position.most + config.position.offset if isinstance(config.position, Learned) else 0
    encoder = (
        Entry("token embedding", f"V·{letter}", v * e, textbook=True),
        Entry("attention: query, key, value, output", "4·L·H²", 4 * n * h * h, textbook=True),
        Entry("feed-forward: up, down", "2·L·H·I", 2 * n * h * i, textbook=True),
        Entry("position embedding", f"P·{letter}", rows * e),
        Entry("segment embedding", f"S·{letter}", config.segments * e),
        *([] if config.embedding is None else [Entry("embedding to width", "E·H + H", e * h + h)]),
        Entry("attention biases", "4·L·H", 4 * n * h),
        Entry("feed-forward biases", "L·(I + H)", n * (i + h)),
        Entry("LayerNorms", "2·L·2·H + 2·H" if other == h else "2·L·2·H + 2·E", 2 * n * 2 * h + 2 * other),
    )
    return Ledger((*encoder, *(_entry(config, head) for head in completed(config, heads))))


def _entry(config: EncoderConfig, head: Head) -> Entry:
    v, h, e = config.vocab, config.width, config.embedding_width
    match head:
        case Pooled():
            return Entry("pooler", "H² + H", h * h + h)
        case Masked():
            formula = "H² + H + 2·H + V" if config.embedding is None else "H·E + E + 2·E + V"
            return Entry("masked LM head", formula, h * e + 3 * e + v)
        case Pair():
            return Entry("next sentence head", "2·H + 2", 2 * h + 2)
        case Labels(count):
            return _sequence_entry("label head", config.readout.labels, h, count)
        case Tags(count):
            return Entry("tag head", "C·H + C", count * h + count)
        case Span():
            return Entry("span head", "2·H + 2", 2 * h + 2)
        case Replaced():
            return Entry("replaced-token head", "H² + 2·H + 1", h * h + 2 * h + 1)
        case Choice():
            return _sequence_entry("choice head", config.readout.choice, h, 1)
        case _:
            assert_never(head)


def _sequence_entry(part: str, reads: FromPooler | Own, width: int, outputs: int) -> Entry:
    if isinstance(reads, Own):
        return Entry(part, "H² + H + C·H + C", width * width + width + outputs * width + outputs)
    return Entry(part, "C·H + C", outputs * width + outputs)


def _sequence_flops(reads: FromPooler | Own, width: int, outputs: int) -> int:
    return 2 * width * (outputs + (width if isinstance(reads, Own) else 0))


def forward_flops(config: EncoderConfig, heads: Iterable[Head], length: int, predicted: float = 0.15) -> float:
    """Floating-point operations per token of a forward pass: 2 for each multiply-add of a matrix product, nothing else.

    Args:
        config: the encoder.
        heads: what reads it.
        length: tokens of a sequence; attention costs 4·L·H·length per token for scores and sums.
        predicted: share of tokens that the masked LM head predicts.
    """
    h, n = config.width, config.steps
    blocks = n * (2 * (4 * h * h + 2 * h * config.inner) + 4 * h * length)
    projection = 0 if config.embedding is None else 2 * config.embedding * h
    return projection + blocks + sum(_head_flops(config, head, length, predicted) for head in completed(config, heads))


def _head_flops(config: EncoderConfig, head: Head, length: int, predicted: float) -> float:
    h = config.width
    match head:
        case Masked():
            return predicted * 2 * config.embedding_width * (h + config.vocab)
        case Pooled():
            return 2 * h * h / length
        case Pair():
            return 2 * 2 * h / length
        case Labels(count):
            return _sequence_flops(config.readout.labels, h, count) / length
        case Tags(count):
            return 2.0 * count * h
        case Span():
            return 2.0 * 2 * h
        case Replaced():
            return 2.0 * h * (h + 1)
        case Choice():
            return _sequence_flops(config.readout.choice, h, 1) / length
        case _:
            assert_never(head)
