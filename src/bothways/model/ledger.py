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

from bothways.model.config import Blocks, Causal, EncoderConfig, FromPooler, Full, Gated, Own, Pattern, PreNorm, Window
from bothways.model.heads import BiLM, Choice, Head, Labels, Masked, NextToken, Pair, Pooled, Replaced, Span, Tags, completed
from bothways.model.placeledger import (
    absolute_rows,
    convolution_flops,
    decoder_rows,
    relative_flops,
    relative_parts,
    rows_flops,
)
from bothways.model.recurrentconfig import ModelConfig, RecurrentConfig

BACKWARD = 2
"""The backward pass multiplies twice for each matrix of the forward one: gradients of the input and of the weights."""


@dataclass(frozen=True)
class Entry:
    """Attributes:
    part: of the model.
    formula: in V, H, L (blocks with weights of their own), I (inner), P (positions), S (segments), C (labels), E (embedding),
        M (memory cells of an LSTM), R (distances to each side, or buckets of them).
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


def ledger(config: ModelConfig, heads: Iterable[Head] = ()) -> Ledger:
    """Every parameter of the encoder and of these heads, with the pooler if they read it."""
    encoder = _recurrent(config) if isinstance(config, RecurrentConfig) else _transformer(config)
    return Ledger((*encoder, *(_entry(config, head) for head in completed(config, heads))))


def _recurrent(config: RecurrentConfig) -> list[Entry]:
    """Four gates and perhaps a projection, for each direction and layer; two biases a gate, as torch has them."""
    v, e, m, n = config.vocab, config.projection, config.cells, 2 * config.depth
    projected = [Entry("LSTMs: projections", "2·L·E·M", n * e * m)] if m > e else []
    return [
        Entry("token embedding", "V·E", v * e),
        Entry("LSTMs: gates", "2·L·4·M·(E + E)", n * 4 * m * (e + e)),
        *projected,
        Entry("LSTMs: biases", "2·L·8·M", n * 8 * m),
    ]


def _transformer(config: EncoderConfig) -> list[Entry]:
    v, h, n, i, e = config.vocab, config.width, config.blocks, config.inner, config.embedding_width
    letter = _embedded(config)
    late = config.norm_after_projection
    gated = isinstance(config.mlp, Gated)
    names, first = ("up, gate, down", "2·I") if gated else ("up, down", "I")
    matrices = 3 if gated else 2
    return [
        Entry("token embedding", f"V·{letter}", v * e, textbook=True),
        Entry("attention: query, key, value, output", "4·L·H²", 4 * n * h * h, textbook=True),
        *([Entry("attention of global tokens", "3·L·H²", 3 * n * h * h)] if config.everywhere else []),
        Entry(f"feed-forward: {names}", f"{matrices}·L·H·I", matrices * n * h * i, textbook=True),
        Entry("position embedding", f"P·{letter}", absolute_rows(config) * e),
        *(Entry(*part) for part in relative_parts(config)),
        Entry("segment embedding", f"S·{letter}", config.segments * e),
        *(
            []
            if config.embedding is None
            else [Entry("embedding to width", *(("E·H", e * h) if late else ("E·H + H", e * h + h)))]
        ),
        *_attention_biases(config),
        *([Entry("feed-forward biases", f"L·({first} + H)", n * ((matrices - 1) * i + h))] if config.bias.mlp else []),
        _norms(config),
    ]


def _attention_biases(config: EncoderConfig) -> list[Entry]:
    """One for the output, three or two for queries, keys and values, three for those of global tokens."""
    bias = config.bias
    if not bias.attention:
        return []
    times = 1 + (2 + bias.key + 3 * config.everywhere if bias.projections else 0)
    return [Entry("attention biases", f"{times}·L·H", times * config.blocks * config.width)]


def _embedded(config: ModelConfig) -> str:
    """The letter of the embedding's width."""
    return "H" if isinstance(config, EncoderConfig) and config.embedding is None else "E"


def _norms(config: EncoderConfig) -> Entry:
    """Two in a block, but for a first without; one after the embeddings, one after the last block, as the order has it."""
    h, e, n, final = config.width, config.embedding_width, config.blocks, isinstance(config.order, PreNorm)
    each, times = _scale(config), 2 if config.bias.norm else 1
    missing = 0 if config.first_norm else 1
    terms = [f"2·L·{each}H" if not missing else f"(2·L − 1)·{each}H"]
    late = config.norm_after_projection
    terms += [f"{each}{'H' if late else _embedded(config)}"] if config.order.embedding else []
    terms += [f"{each}H"] if final else []
    count = (2 * n - missing) * h + ((h if late else e) if config.order.embedding else 0) + (h if final else 0)
    return Entry("LayerNorms", " + ".join(terms), times * count)


def _scale(config: ModelConfig) -> str:
    """What a LayerNorm's width is multiplied by: it has a scale and perhaps a bias."""
    return "2·" if config.bias.norm else ""


def _entry(config: ModelConfig, head: Head) -> Entry:
    h = config.width
    match head:
        case Pooled():
            return Entry("pooler", "H² + H", h * h + h)
        case Masked():
            return _masked(config)
        case Pair():
            return Entry("next sentence head", "2·H + 2", 2 * h + 2)
        case Labels(count):
            return _read("label head", config, config.readout.labels, "C", count)
        case Tags(count):
            return _read("tag head", config, config.readout.tokens, "C", count)
        case Span():
            return _span(config)
        case Replaced():
            norm = (f" + {_scale(config)}H", (2 if config.bias.norm else 1) * h) if _sums(config) else ("", 0)
            return Entry("replaced-token head", "H² + 2·H + 1" + norm[0], h * h + 2 * h + 1 + norm[1])
        case Choice():
            return _read("choice head", config, config.readout.choice, "C", 1)
        case NextToken():
            own = _own_output(config)
            return Entry("next-token head", "V·H" if own else "0", config.vocab * h if own else 0)
        case BiLM():
            return Entry("LM head of both directions", "V", config.vocab)
        case _:
            assert_never(head)


def _sums(config: ModelConfig) -> bool:
    """Whether the replaced-token head reads a normed sum."""
    return isinstance(config, EncoderConfig) and config.readout.replaced == "with_first"


def _own_output(config: ModelConfig) -> bool:
    """Whether heads that predict tokens have a matrix of their own to do so."""
    return config.readout.output == "own"


def _masked(config: ModelConfig) -> Entry:
    v, h, e, bias = config.vocab, config.width, config.embedding_width, config.bias
    letter = _embedded(config)
    terms = ["H²" if letter == "H" else "H·E", *([letter] if bias.head else []), f"{_scale(config)}{letter}"]
    count = h * e + (e if bias.head else 0) + (2 if bias.norm else 1) * e + (v if bias.output else 0)
    rows = decoder_rows(config) if isinstance(config, EncoderConfig) else 0
    own = _own_output(config)
    terms += [*([f"V·{letter}"] if own else []), *(["V"] if bias.output else []), *(["P·H"] if rows else [])]
    return Entry("masked LM head", " + ".join(terms), count + rows * h + (v * e if own else 0))


def _read(part: str, config: ModelConfig, reads: FromPooler | Own | None, letter: str, outputs: int) -> Entry:
    """A dense layer to the outputs, perhaps after one of its own."""
    h, terms, count = config.width, [f"{letter}·H", letter], outputs * config.width + outputs
    if isinstance(reads, Own):
        own = ["H²", *(["H"] if config.bias.head else []), *([f"{_scale(config)}H"] if reads.norm else [])]
        norm = (2 if config.bias.norm else 1) * h if reads.norm else 0
        terms, count = own + terms, count + h * h + (h if config.bias.head else 0) + norm
    return Entry(part, " + ".join(terms), count)


def _span(config: ModelConfig) -> Entry:
    if not isinstance(config, EncoderConfig) or config.readout.span is None:
        return _read("span head", config, config.readout.tokens, "2", 2)
    h, i = config.width, config.inner
    count = 2 * h * i + i + h + (2 if config.bias.norm else 1) * h + 2 * h + 2
    return Entry("span head", f"2·H·I + I + H + {_scale(config)}H + 2·H + 2", count)


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
    everywhere, inner = size + last, (count - 2) * size
    near = 3 * inner - 2 * size  # the first and the last of these have a global neighbour, which is counted already
    return (everywhere * length + inner * (everywhere + pattern.random * size) + size * near) / length


def forward_flops(config: ModelConfig, heads: Iterable[Head], length: int, predicted: float = 0.15) -> float:
    """Floating-point operations per token of a forward pass: 2 for each multiply-add of a matrix product, nothing else.

    Args:
        config: the encoder.
        heads: what reads it.
        length: tokens of a sequence; attention costs 4·L·H·length per token for scores and sums, in a window, in blocks or
            left to right only what is seen: what the reference kernel computes and masks is more. Global tokens that a batch
            names cost what they are made by; what they see is not counted, nor what `batch_flops` counts.
        predicted: share of tokens that the masked LM head predicts.

    The last block's part after attention is counted for the tokens that a head reads; without heads, for all.
    """
    wanted = completed(config, heads)
    of_heads = sum(_head_flops(config, head, length, predicted) for head in wanted)
    if isinstance(config, RecurrentConfig):
        return _recurrent_flops(config) + of_heads
    return _transformer_flops(config, length, _asked(config, wanted, length, predicted)) + of_heads


def batch_flops(config: ModelConfig, heads: Iterable[Head], longest: int) -> float:
    """What a forward pass does once a batch whose longest sequence is so long, beside `forward_flops`."""
    if not isinstance(config, EncoderConfig):
        return 0.0
    decoded = 2 if decoder_rows(config) and Masked() in tuple(heads) else 0
    return (config.steps + decoded) * rows_flops(config, longest)


def _recurrent_flops(config: RecurrentConfig) -> float:
    e, m = config.projection, config.cells
    return 2.0 * config.depth * 2 * (4 * m * (e + e) + (e * m if m > e else 0))


def _transformer_flops(config: EncoderConfig, length: int, read: float) -> float:
    blocks = sum(_block_flops(config, layer, length) for layer in range(config.depth)) * (config.steps // config.depth)
    projection = 0 if config.embedding is None else 2 * config.embedding * config.width
    return projection + blocks + convolution_flops(config) - (1 - read) * _tail_flops(config)


def _block_flops(config: EncoderConfig, layer: int, length: int) -> float:
    h, projections = config.width, 6 if config.everywhere else 3
    scores = 4 * h * seen(config.pattern(layer), length) + relative_flops(config, length)
    return 2 * projections * h * h + scores + _tail_flops(config)


def _tail_flops(config: EncoderConfig) -> float:
    """What a block does after attention: its output and the feed-forward layer."""
    h, matrices = config.width, 3 if isinstance(config.mlp, Gated) else 2
    return 2.0 * (h * h + matrices * h * config.inner)


def _asked(config: EncoderConfig, heads: Iterable[Head], length: int, predicted: float) -> float:
    """The share of tokens whose last vectors the heads read; 1 for a pooler alone or none: all vectors are the result."""
    wanted = set(heads)
    if wanted <= {Pooled()} or (config.depth == 1 and convolution_flops(config)):
        return 1.0
    masked = predicted if Masked() in wanted else 0.0
    return min(1.0, masked + max(_asked_by(config, head, length) for head in wanted))


def _asked_by(config: EncoderConfig, head: Head, length: int) -> float:
    """The share that a head reads beside what it predicts."""
    match head:
        case Masked():
            return 0.0
        case Labels():
            reads: FromPooler | Own = config.readout.labels
        case Choice():
            reads = config.readout.choice
        case Pooled() | Pair():
            reads = FromPooler()
        case Tags() | Span() | Replaced() | NextToken() | BiLM():
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
        case Masked():
            return _decoder_flops(config, length, predicted) + predicted * 2 * config.embedding_width * (h + config.vocab)
        case Pooled():
            return 2 * h * h / length
        case Pair():
            return 2 * 2 * h / length
        case Labels(count):
            return _read_flops(config.readout.labels, h, count) / length
        case Tags(count):
            return float(_read_flops(config.readout.tokens, h, count))
        case Span() if isinstance(config, EncoderConfig) and config.readout.span is not None:
            return 4.0 * h * (config.inner + 1)
        case Span():
            return float(_read_flops(config.readout.tokens, h, 2))
        case Replaced():
            return 2.0 * h * (h + 1)
        case Choice():
            return _read_flops(config.readout.choice, h, 1) / length
        case NextToken() | BiLM():
            return 2.0 * h * config.vocab
        case _:
            assert_never(head)


def kept_floats(config: ModelConfig, length: int, recompute: bool = False) -> float:
    """Numbers that the backward pass needs of each token in sequences of this length, by estimate.

    Where blocks are computed again, that is the input of each, and all that one of them keeps.
    """
    if isinstance(config, RecurrentConfig):
        # Per layer and direction: gates, cells before and after their activation, what was read, dropped and given.
        layer = 2.0 * (7 * config.cells + 4 * config.projection)
        return layer + (config.depth - 1) * (2 * config.projection if recompute else layer)
    # Per block: inputs of the norms, of the matrix products and of the dropouts; twice the probabilities.
    seen_by = [seen(config.pattern(layer), length) for layer in range(config.depth)]
    blocks = [16.0 * config.width + 2 * config.inner + 3 * config.heads * attended for attended in seen_by]
    return (config.steps - 1) * config.width + max(blocks) if recompute else sum(blocks) * (config.steps // config.depth)
