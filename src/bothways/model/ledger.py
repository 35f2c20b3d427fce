"""The parameters of a model, part by part, by formula.

The textbook says a BERT has V·H + 12·L·H² parameters. That leaves out positions, segments, biases, LayerNorms and heads: about
one in a hundred for the base size. The ledger lists both to the last one.

Source: Devlin et al. 2018, section 3.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from typing_extensions import assert_never

from bothways.model.config import EncoderConfig, FromPooler, Gated, Own, PreNorm
from bothways.model.heads import BiLM, Choice, Head, Labels, Masked, NextToken, Pair, Pooled, Replaced, Span, Tags, completed
from bothways.model.placeledger import (
    absolute_rows,
    decoder_rows,
    relative_parts,
)
from bothways.model.recurrentconfig import ModelConfig, RecurrentConfig


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
        """Parameters that V·H + 12·L·H² counts."""
        return sum(entry.count for entry in self.entries if entry.textbook)

    @property
    def total(self) -> int:
        """All parameters."""
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
