"""The parameters of a model, part by part, by formula.

The textbook says a BERT has V·H + 12·L·H² parameters. That leaves out positions, segments, biases, LayerNorms and heads: about
one in a hundred for the base size. The ledger lists both to the last one.

Source: Devlin et al. 2018, section 3.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from typing_extensions import assert_never

from bothways.model.config import EncoderConfig, Gated, PreNorm
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
from bothways.model.position_parameters import absolute_rows, decoder_rows, relative_parts


@dataclass(frozen=True)
class ParameterEntry:
    """Attributes:
    part: of the model.
    formula: in V, H, L (blocks with weights of their own), I (intermediate_size), P (positions), S (segments), C (labels), E (embedding),
        M (memory cells of an LSTM), R (distances to each side, or buckets of them).
    count: of parameters.
    textbook: whether V·H + 12·L·H² counts it.
    """

    part: str
    formula: str
    count: int
    textbook: bool = False


@dataclass(frozen=True)
class ParameterTable:
    """All parts of a model; a tensor that two parts share stands in the first."""

    entries: tuple[ParameterEntry, ...]

    @property
    def textbook(self) -> int:
        """Parameters that V·H + 12·L·H² counts."""
        return sum(entry.count for entry in self.entries if entry.textbook)

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(entry.count for entry in self.entries)


def parameter_table(config: ModelConfig, heads: Iterable[Head] = ()) -> ParameterTable:
    """Every parameter of the encoder and of these heads, with the pooler if they read it."""
    encoder = _recurrent(config) if isinstance(config, LSTMConfig) else _transformer(config)
    return ParameterTable(
        (*encoder, *(_entry(config, head) for head in with_pooler(config, heads)))
    )


def _recurrent(config: LSTMConfig) -> list[ParameterEntry]:
    """Four gates and perhaps a projection, for each direction and layer; two biases a gate, as torch has them."""
    v, e, m, n = config.vocab, config.projection, config.cells, 2 * config.depth
    projected = [ParameterEntry("LSTMs: projections", "2·L·E·M", n * e * m)] if m > e else []
    return [
        ParameterEntry("token embedding", "V·E", v * e),
        ParameterEntry("LSTMs: gates", "2·L·4·M·(E + E)", n * 4 * m * (e + e)),
        *projected,
        ParameterEntry("LSTMs: biases", "2·L·8·M", n * 8 * m),
    ]


def _transformer(config: EncoderConfig) -> list[ParameterEntry]:
    v, h, n, i, e = (
        config.vocab,
        config.width,
        config.blocks,
        config.intermediate_size,
        config.embedding_width,
    )
    letter = _embedded(config)
    late = config.norm_after_projection
    gated = isinstance(config.mlp, Gated)
    names, first = ("up, gate, down", "2·I") if gated else ("up, down", "I")
    matrices = 3 if gated else 2
    return [
        ParameterEntry("token embedding", f"V·{letter}", v * e, textbook=True),
        ParameterEntry(
            "attention: query, key, value, output", "4·L·H²", 4 * n * h * h, textbook=True
        ),
        *(
            [ParameterEntry("attention of global tokens", "3·L·H²", 3 * n * h * h)]
            if config.has_global_attention
            else []
        ),
        ParameterEntry(
            f"feed-forward: {names}", f"{matrices}·L·H·I", matrices * n * h * i, textbook=True
        ),
        ParameterEntry("position embedding", f"P·{letter}", absolute_rows(config) * e),
        *(ParameterEntry(*part) for part in relative_parts(config)),
        ParameterEntry("segment embedding", f"S·{letter}", config.segments * e),
        *(
            []
            if config.embedding is None
            else [
                ParameterEntry(
                    "embedding to width", *(("E·H", e * h) if late else ("E·H + H", e * h + h))
                )
            ]
        ),
        *_attention_biases(config),
        *(
            [
                ParameterEntry(
                    "feed-forward biases", f"L·({first} + H)", n * ((matrices - 1) * i + h)
                )
            ]
            if config.bias.mlp
            else []
        ),
        _norms(config),
    ]


def _attention_biases(config: EncoderConfig) -> list[ParameterEntry]:
    """One for the output, three or two for queries, keys and values, three for those of global tokens."""
    bias = config.bias
    if not bias.attention:
        return []
    times = 1 + (2 + bias.key + 3 * config.has_global_attention if bias.projections else 0)
    return [
        ParameterEntry("attention biases", f"{times}·L·H", times * config.blocks * config.width)
    ]


def _embedded(config: ModelConfig) -> str:
    """The letter of the embedding's width."""
    return "H" if isinstance(config, EncoderConfig) and config.embedding is None else "E"


def _norms(config: EncoderConfig) -> ParameterEntry:
    """Two in a block, but for a first without; one after the embeddings, one after the last block, as the order has it."""
    h, e, n, final = (
        config.width,
        config.embedding_width,
        config.blocks,
        isinstance(config.order, PreNorm),
    )
    each, times = _scale(config), 2 if config.bias.norm else 1
    missing = 0 if config.first_norm else 1
    terms = [f"2·L·{each}H" if not missing else f"(2·L − 1)·{each}H"]
    late = config.norm_after_projection
    terms += [f"{each}{'H' if late else _embedded(config)}"] if config.order.embedding else []
    terms += [f"{each}H"] if final else []
    count = (
        (2 * n - missing) * h
        + ((h if late else e) if config.order.embedding else 0)
        + (h if final else 0)
    )
    return ParameterEntry("LayerNorms", " + ".join(terms), times * count)


def _scale(config: ModelConfig) -> str:
    """What a LayerNorm's width is multiplied by: it has a scale and perhaps a bias."""
    return "2·" if config.bias.norm else ""


def _entry(config: ModelConfig, head: Head) -> ParameterEntry:
    h = config.width
    match head:
        case PoolerHead():
            return ParameterEntry("pooler", "H² + H", h * h + h)
        case MaskedHead():
            return _masked(config)
        case PairHead():
            return ParameterEntry("next sentence head", "2·H + 2", 2 * h + 2)
        case LabelHead(count):
            return _read("label head", config, config.readout.labels, "C", count)
        case TagHead(count):
            return _read("tag head", config, config.readout.tokens, "C", count)
        case SpanHead():
            return _span(config)
        case ReplacedHead():
            norm = (
                (f" + {_scale(config)}H", (2 if config.bias.norm else 1) * h)
                if _sums(config)
                else ("", 0)
            )
            return ParameterEntry(
                "replaced-token head", "H² + 2·H + 1" + norm[0], h * h + 2 * h + 1 + norm[1]
            )
        case ChoiceHead():
            return _read("choice head", config, config.readout.choice, "C", 1)
        case NextTokenHead():
            own = _own_output(config)
            return ParameterEntry(
                "next-token head", "V·H" if own else "0", config.vocab * h if own else 0
            )
        case BiLMHead():
            return ParameterEntry("LM head of both directions", "V", config.vocab)
        case _:
            assert_never(head)


def _sums(config: ModelConfig) -> bool:
    """Whether the replaced-token head reads a normed sum."""
    return isinstance(config, EncoderConfig) and config.readout.replaced == "with_first"


def _own_output(config: ModelConfig) -> bool:
    """Whether heads that predict tokens have a matrix of their own to do so."""
    return config.readout.output == "own"


def _masked(config: ModelConfig) -> ParameterEntry:
    v, h, e, bias = config.vocab, config.width, config.embedding_width, config.bias
    letter = _embedded(config)
    terms = [
        "H²" if letter == "H" else "H·E",
        *([letter] if bias.head else []),
        f"{_scale(config)}{letter}",
    ]
    count = (
        h * e + (e if bias.head else 0) + (2 if bias.norm else 1) * e + (v if bias.output else 0)
    )
    rows = decoder_rows(config) if isinstance(config, EncoderConfig) else 0
    own = _own_output(config)
    terms += [
        *([f"V·{letter}"] if own else []),
        *(["V"] if bias.output else []),
        *(["P·H"] if rows else []),
    ]
    return ParameterEntry(
        "masked LM head", " + ".join(terms), count + rows * h + (v * e if own else 0)
    )


def _read(
    part: str, config: ModelConfig, reads: FromPooler | Own | None, letter: str, outputs: int
) -> ParameterEntry:
    """A dense layer to the outputs, perhaps after one of its own."""
    h, terms, count = config.width, [f"{letter}·H", letter], outputs * config.width + outputs
    if isinstance(reads, Own):
        own = [
            "H²",
            *(["H"] if config.bias.head else []),
            *([f"{_scale(config)}H"] if reads.norm else []),
        ]
        norm = (2 if config.bias.norm else 1) * h if reads.norm else 0
        terms, count = own + terms, count + h * h + (h if config.bias.head else 0) + norm
    return ParameterEntry(part, " + ".join(terms), count)


def _span(config: ModelConfig) -> ParameterEntry:
    if not isinstance(config, EncoderConfig) or config.readout.span is None:
        return _read("span head", config, config.readout.tokens, "2", 2)
    h, i = config.width, config.intermediate_size
    count = 2 * h * i + i + h + (2 if config.bias.norm else 1) * h + 2 * h + 2
    return ParameterEntry("span head", f"2·H·I + I + H + {_scale(config)}H + 2·H + 2", count)
