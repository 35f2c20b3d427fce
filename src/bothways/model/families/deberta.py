"""DeBERTa: separate attention to content and to relative position (He et al. 2020, 2021).

Differences from BERT: relative positions in each layer (`Disentangled`), no segments, ε = 1e-7,
and heads for whole sequences with a dense layer and GELU of their own. Version 1 has byte-level
BPE and no biases of keys. Versions 2 and 3 have SentencePiece, buckets of distances, and share
projections between content and positions; version 2 has a convolution next to the first layer.
Version 3 is pre-trained like ELECTRA.

Absolute positions are added only when a masked token is predicted (the enhanced mask decoder).
transformers has no such decoder and leaves out its table, `position_embeddings`; the published
files have it, with a head `lm_predictions`. A file with that table is therefore read as one with
a decoder (`_seen`), and a model with a decoder is written like the published ones, with a setting
`enhanced_mask_decoder` that transformers ignores. Without a decoder the head is `cls.predictions`,
transformers' `legacy` layout; both names are read in either case.

Version 3's published discriminators have a head of replaced tokens, `mask_predictions`, which no
class of transformers has; their `config.json` names none. We write them alike, and transformers
opens the encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, get_args

from bothways.core.errors import FolderError
from bothways.model.config import Bias, EncoderConfig, Own, PostNorm, Readout
from bothways.model.families import bert, family
from bothways.model.families.common import classes, masked_rules, output_rules
from bothways.model.families.family import Architecture, Family
from bothways.model.families.weight_names import Interleave, KeyTable, Rename, Rule, Stack
from bothways.model.positions import Convolution, Disentangled, Learned, Term

ENGLISH_BYTES = 50_265
ENGLISH = 128_100
MULTILINGUAL = 251_000

_OWN = Own("gelu")
_NGRAMS = Convolution(3, activation="gelu")


def _sized(vocab: int, depth: int, width: int, heads: int, position: Disentangled) -> EncoderConfig:
    readout = Readout(labels=_OWN, choice=_OWN)
    return EncoderConfig(
        vocab, width, depth, heads, 4 * width,
        segments=0, position=position, norm_epsilon=1e-7, readout=readout,
    )  # fmt: skip


def first(depth: int, width: int, heads: int) -> EncoderConfig:
    """Version 1: a row for each distance, separate layers for positions, no biases of keys."""
    return replace(
        _sized(ENGLISH_BYTES, depth, width, heads, Disentangled(absolute="decoder")),
        bias=Bias(key=False),
    )


def later(
    depth: int, width: int, heads: int, vocab: int = ENGLISH, convolution: Convolution | None = None
) -> EncoderConfig:
    """Version 3, and with a convolution version 2."""
    position = Disentangled(
        buckets=256, shared=True, norm=True, absolute="decoder", convolution=convolution
    )
    shape = _sized(vocab, depth, width, heads, position)
    return replace(shape, readout=replace(shape.readout, replaced="with_first"))


PRESETS: dict[str, Callable[[], EncoderConfig]] = {
    "deberta-base": lambda: first(12, 768, 12),
    "deberta-large": lambda: first(24, 1024, 16),
    "deberta-xlarge": lambda: first(48, 1024, 16),
    "deberta-v2-xlarge": lambda: later(24, 1536, 24, convolution=_NGRAMS),
    "deberta-v2-xxlarge": lambda: later(48, 1536, 24, convolution=_NGRAMS),
    "deberta-v3-xsmall": lambda: later(12, 384, 6),
    "deberta-v3-small": lambda: later(6, 768, 12),
    "deberta-v3-base": lambda: later(12, 768, 12),
    "deberta-v3-large": lambda: later(24, 1024, 16),
    "mdeberta-v3-base": lambda: later(12, 768, 12, MULTILINGUAL),
}


_WITH_TANH: dict[str, Any] = {**family.ACTIVATIONS, "tanh": "tanh"}
"""The activations of the pooler and of the convolution."""


def _has_decoder(position: object) -> bool:
    return isinstance(position, Disentangled) and position.absolute == "decoder"


def _read_more(config: EncoderConfig, raw: Mapping[str, Any], location: str) -> EncoderConfig:
    narrow = family.read_number(raw, "embedding_size", config.width, location)
    sizes = {
        "pooler_hidden_size": config.width,
        "attention_head_size": config.width // config.heads,
    }
    for key, size in sizes.items():
        if raw.get(key) is not None and raw[key] != size:
            message = f"{key} must be {size}, as the other settings imply, not {raw[key]!r:.40}"
            raise FolderError(message, where=location)
    activation = family.read_choice(raw, "pooler_hidden_act", _WITH_TANH, "gelu", location)
    inner = Own(activation, input_dropout=family.read_number(raw, "pooler_dropout", 0.0, location))
    position = _read_position(raw, config.position.max_positions, config.bias.key, location)
    # Only transformers' own layout of the head has a matrix that can be tied to the embedding.
    legacy = family.read_flag(raw, "legacy", True, location)
    untied = config.readout.output == "own" and legacy and not _has_decoder(position)
    return replace(
        config,
        segments=family.read_number(raw, "type_vocab_size", 0, location),
        position=position,
        embedding=None if narrow == config.width else narrow,
        order=PostNorm(projected=narrow != config.width),
        readout=replace(
            config.readout, labels=inner, choice=inner, output="own" if untied else "embedding"
        ),
    )


def _write_more(config: EncoderConfig) -> dict[str, Any]:
    inner, position = config.readout.labels, config.position
    settings: dict[str, Any] = {
        "type_vocab_size": config.segments,
        **({} if config.embedding is None else {"embedding_size": config.embedding}),
        "pooler_hidden_size": config.width,
        "pooler_hidden_act": "",
        "pooler_dropout": 0.0,
    }
    if isinstance(inner, Own):
        settings["pooler_hidden_act"] = family.first_name(_WITH_TANH, inner.activation)
        settings["pooler_dropout"] = inner.input_dropout
    match position:
        case Learned():
            settings |= {
                "relative_attention": False,
                "position_biased_input": True,
                "pos_att_type": None,
                "legacy": True,
            }
        case Disentangled():
            settings |= {
                "relative_attention": True,
                "pos_att_type": list(position.terms),
                # −1 stands for the number of positions.
                "max_relative_positions": position.max_distance or -1,
                "position_biased_input": position.absolute == "input",
                "legacy": not _has_decoder(position),
                "position_buckets": position.buckets or -1,
                "share_att_key": position.shared,
                "norm_rel_ebd": "layer_norm" if position.norm else "none",
            }
            if _has_decoder(position):
                settings["enhanced_mask_decoder"] = True
            if position.convolution is not None:
                settings["conv_kernel_size"] = position.convolution.size
                settings["conv_groups"] = position.convolution.groups
                name = family.first_name(_WITH_TANH, position.convolution.activation)
                settings["conv_act"] = name
    return settings


def _read_position(
    raw: Mapping[str, Any], max_positions: int, is_later: bool, location: str
) -> Learned | Disentangled:
    """Return the positions; version 1 ignores the settings of later versions."""
    at_input = family.read_flag(raw, "position_biased_input", True, location)
    # The terms of attention are a list or one text: "p2c|c2p".
    value = raw.get("pos_att_type") or []
    names = value.lower().split("|") if isinstance(value, str) else value
    terms_by_name: dict[Any, Term] = {term: term for term in get_args(Term)}
    if not isinstance(names, list) or not all(
        isinstance(name, str) and name.strip() in terms_by_name for name in names
    ):
        message = (
            f"pos_att_type {value!r:.80} has no counterpart here: it must hold c2p, p2c or both"
        )
        raise FolderError(message, where=location)
    terms = tuple(terms_by_name[name.strip()] for name in names)
    size = family.read_number(raw, "conv_kernel_size", 0, location) if is_later else 0
    if not family.read_flag(raw, "relative_attention", False, location):
        if terms or not at_input or size > 0:
            message = (
                "without relative_attention there must be no pos_att_type, no convolution, "
                "and position_biased_input"
            )
            fix = "Set relative_attention to true, as in the published models."
            raise FolderError(message, where=location, fix=fix)
        return Learned(max_positions)
    decoder = family.read_flag(raw, "enhanced_mask_decoder", False, location)
    position = Disentangled(
        max_positions,
        terms,
        max_distance=_read_positive(raw, "max_relative_positions", location),
        absolute="input" if at_input else "decoder" if decoder else "none",
    )
    if not is_later:
        return position
    groups = family.read_number(raw, "conv_groups", 1, location)
    activation = family.read_choice(raw, "conv_act", _WITH_TANH, "tanh", location)
    return replace(
        position,
        buckets=_read_positive(raw, "position_buckets", location),
        shared=family.read_flag(raw, "share_att_key", False, location),
        norm=family.read_choice(
            raw, "norm_rel_ebd", {"none": False, "layer_norm": True}, "none", location
        ),
        convolution=Convolution(size, groups, activation) if size > 0 else None,
    )


def _read_positive(raw: Mapping[str, Any], key: str, location: str) -> int | None:
    """Return a number, None where it is below 1, such as -1."""
    number: int = family.read_number(raw, key, -1, location)
    return number if number > 0 else None


_EMBEDDINGS = "deberta.embeddings"
_ENCODER = "deberta.encoder"
_SELF = f"{_ENCODER}.layer.{{}}.attention.self"
_ATTENTION = "encoder.blocks.{}.attention"
_AT_INPUT = Rename("encoder.embedding.position", f"{_EMBEDDINGS}.position_embeddings")
_IN_DECODER = Rename("heads.masked.position", f"{_EMBEDDINGS}.position_embeddings")
_LEGACY = {
    "dense": "cls.predictions.transform.dense",
    "norm": "cls.predictions.transform.LayerNorm",
    "bias": "cls.predictions.bias",
}
_PUBLISHED = {
    "dense": "lm_predictions.lm_head.dense",
    "norm": "lm_predictions.lm_head.LayerNorm",
    "bias": "lm_predictions.lm_head.bias",
}


_COMMON: tuple[Rule, ...] = (
    Rename("encoder.embedding.token", f"{_EMBEDDINGS}.word_embeddings"),
    Rename("encoder.embedding.segment", f"{_EMBEDDINGS}.token_type_embeddings"),
    Rename("encoder.embedding.project", f"{_EMBEDDINGS}.embed_proj"),
    Rename("encoder.relative.table", f"{_ENCODER}.rel_embeddings"),
    Rename("encoder.relative.norm", f"{_ENCODER}.LayerNorm"),
    Rename("encoder.convolution.conv", f"{_ENCODER}.conv.conv"),
    Rename("encoder.convolution.norm", f"{_ENCODER}.conv.LayerNorm"),
    Rename(f"{_ATTENTION}.out", f"{_ENCODER}.layer.{{}}.attention.output.dense"),
    Rename("encoder.blocks.{}.mlp.up", f"{_ENCODER}.layer.{{}}.intermediate.dense"),
    Rename("encoder.blocks.{}.mlp.down", f"{_ENCODER}.layer.{{}}.output.dense"),
    *bert.post_norm_rules("deberta"),
    *output_rules(
        {
            "labels.inner": "pooler.dense",
            "choice.inner": "pooler.dense",
            "replaced.norm": "mask_predictions.LayerNorm",
            "replaced.inner": "mask_predictions.dense",
            "replaced.dense": "mask_predictions.classifier",
        }
    ),
)
_FIRST: tuple[Rule, ...] = (
    Interleave(f"{_ATTENTION}.qkv", f"{_SELF}.in_proj"),
    Stack(f"{_ATTENTION}.bias", (f"{_SELF}.q_bias", f"{_SELF}.v_bias")),
    Rename(f"{_ATTENTION}.position_key", f"{_SELF}.pos_proj"),
    Rename(f"{_ATTENTION}.position_query", f"{_SELF}.pos_q_proj"),
)
_LATER: tuple[Rule, ...] = (
    Stack(f"{_ATTENTION}.qkv", tuple(f"{_SELF}.{name}_proj" for name in ("query", "key", "value"))),
    Rename(f"{_ATTENTION}.position_key", f"{_SELF}.pos_key_proj"),
    Rename(f"{_ATTENTION}.position_query", f"{_SELF}.pos_query_proj"),
)


def _keys_for(rules: tuple[Rule, ...], config: EncoderConfig) -> KeyTable:
    """Return the names for this configuration: its number of heads, its masked LM head."""
    placed = tuple(
        replace(rule, heads=config.heads) if isinstance(rule, Interleave) else rule
        for rule in rules
    )
    decoder = _has_decoder(config.position)
    names, others = (_PUBLISHED, _LEGACY) if decoder else (_LEGACY, _PUBLISHED)
    masked = masked_rules(names["dense"], names["norm"], "cls.predictions.decoder", names["bias"])
    all_rules = (*_COMMON, *placed, _IN_DECODER if decoder else _AT_INPUT, *masked)
    synonyms = tuple((others[kind], names[kind]) for kind in names)
    return KeyTable("deberta.", all_rules, (f"{_EMBEDDINGS}.position_ids",), synonyms)


def _seen(config: EncoderConfig, names: Collection[str]) -> EncoderConfig:
    """Add a decoder where there is a table of absolute positions that the input does not read.

    A file whose head transformers has trained has none.
    """
    position = config.position
    if not isinstance(position, Disentangled) or position.absolute != "none":
        return config
    table = any(name.endswith("embeddings.position_embeddings.weight") for name in names)
    legacy = _LEGACY["bias"] in names and _PUBLISHED["bias"] not in names
    if not table or legacy:
        return config
    return replace(
        config,
        position=replace(position, absolute="decoder"),
        readout=replace(config.readout, output="embedding"),
    )


_CONDITIONAL = frozenset(
    """
    padding_idx legacy enhanced_mask_decoder max_relative_positions position_buckets share_att_key
    norm_rel_ebd conv_kernel_size conv_groups conv_act
    """.split()  # noqa: SIM905
)
"""Settings that only some models of the family read."""


def _family(
    model_type: str,
    defaults: EncoderConfig,
    rules: tuple[Rule, ...],
    architectures: tuple[Architecture, ...],
    classless: tuple[Architecture, ...] = (),
) -> Family:
    return Family(
        model_type=model_type,
        keys=_keys_for(rules, defaults),
        architectures=architectures,
        classless=classless,
        config_rules=family.ConfigRules(
            defaults,
            numbers=family.UNSEGMENTED,
            fixed=family.FIXED | {"talking_head": False},
            ignored=_CONDITIONAL,
            read_more=_read_more,
            write_more=_write_more,
        ),
        dropouts={"labels": ("cls_dropout", None), "choice": ("cls_dropout", None)},
        adapted=lambda config: _keys_for(rules, config),
        seen=_seen,
    )


# The defaults are those of transformers' classes, which the published models do not have.
DEBERTA = _family(
    "deberta",
    replace(first(12, 768, 12), position=Disentangled()),
    _FIRST,
    tuple(known for known in classes("Deberta") if known.heads != {"choice"}),
)
DEBERTA_V2 = _family(
    "deberta-v2",
    replace(later(24, 1536, 24), position=Disentangled()),
    _LATER,
    classes("DebertaV2"),
    (Architecture("DebertaV2Model", frozenset({"replaced"})),),
)
