"""DeBERTa: attention to content and to relative position apart (He et al. 2020), and as ELECTRA (version 3; He et al. 2021).

Against BERT: relative positions in each layer (`Disentangled`), no segments, ε is 1e-7, and the heads of whole sequences have a
dense layer of their own with GELU. Version 1 has byte-level BPE, and no biases of keys. Versions 2 and 3 have pieces of
SentencePiece, buckets of distances, the content's layers for positions, too; version 2 a convolution beside the first layer.

Absolute positions come in when a masked token is predicted, and only there (the enhanced mask decoder). transformers has no
such decoder and leaves out its table, `position_embeddings`; the published files have it, and a head `lm_predictions` that goes
with it. So a file with that table is read as one with a decoder (`_seen`), and a model with one is written as those are, with a
setting `enhanced_mask_decoder` that transformers passes over. Without a decoder the head is `cls.predictions`, transformers'
`legacy` layout; both names are read in either case.

Version 3's published discriminators have a head of replaced tokens, too, `mask_predictions`; no class of transformers has it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from bothways.core.errors import FolderError
from bothways.families import bert
from bothways.families.common import classes, masked_rules, output_rules
from bothways.families.config_rules import (
    FIXED,
    NUMBERS,
    ConfigRules,
    read_choice,
    read_flag,
    read_number,
)
from bothways.families.deberta_positions import (
    WITH_TANH,
    activation_said,
    decodes,
    read_position,
    write_position,
)
from bothways.families.family import Architecture, Family, HeadKind
from bothways.families.weight_names import Interleave, KeyTable, Rename, Rule, Stack
from bothways.model.config import Bias, EncoderConfig, PostNorm
from bothways.model.head_config import Own, Readout
from bothways.model.positions import Convolution, Disentangled, Learned

ENGLISH_BYTES = 50_265
ENGLISH = 128_100
MULTILINGUAL = 251_000

_OWN = Own("gelu")
_NGRAMS = Convolution(3, activation="gelu")


def _sized(vocab: int, depth: int, width: int, heads: int, position: Disentangled) -> EncoderConfig:
    return EncoderConfig(
        vocab,
        width,
        depth,
        heads,
        4 * width,
        segments=0,
        position=position,
        norm_epsilon=1e-7,
        readout=Readout(labels=_OWN, choice=_OWN),
    )


def first(depth: int, width: int, heads: int) -> EncoderConfig:
    """Version 1: a row of its own for each distance, layers of its own for positions, no biases of keys."""
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


def _read_more(config: EncoderConfig, raw: Mapping[str, Any], where: str) -> EncoderConfig:
    narrow = read_number(raw, "embedding_size", config.width, where)
    for key, size in (
        ("pooler_hidden_size", config.width),
        ("attention_head_size", config.width // config.heads),
    ):
        if raw.get(key) is not None and raw[key] != size:
            raise FolderError(
                f"{key} must be {size} as the rest says, not {raw[key]!r}", where=where
            )
    activation = read_choice(raw, "pooler_hidden_act", WITH_TANH, "gelu", where)
    own = Own(activation, input_dropout=read_number(raw, "pooler_dropout", 0.0, where))
    position = read_position(raw, config.position.max_positions, config.bias.key, where)
    # Only transformers' own layout of the head has a matrix that the embedding may be tied to.
    untied = (
        config.readout.output == "own"
        and read_flag(raw, "legacy", True, where)
        and not decodes(position)
    )
    return replace(
        config,
        segments=read_number(raw, "type_vocab_size", 0, where),
        position=position,
        embedding=None if narrow == config.width else narrow,
        order=PostNorm(projected=narrow != config.width),
        readout=replace(
            config.readout, labels=own, choice=own, output="own" if untied else "embedding"
        ),
    )


def _write_more(config: EncoderConfig) -> dict[str, Any]:
    own = config.readout.labels
    settings = {
        "type_vocab_size": config.segments,
        **({} if config.embedding is None else {"embedding_size": config.embedding}),
        "pooler_hidden_size": config.width,
        "pooler_hidden_act": activation_said(own.activation) if isinstance(own, Own) else "",
        "pooler_dropout": own.input_dropout if isinstance(own, Own) else 0.0,
    }
    return (
        settings | write_position(config.position)
        if isinstance(config.position, Learned | Disentangled)
        else settings
    )


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


def _masked(names: Mapping[str, str]) -> tuple[Rule, ...]:
    return masked_rules(names["dense"], names["norm"], "cls.predictions.decoder", names["bias"])


def _synonyms(others: Mapping[str, str], names: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((others[part], names[part]) for part in names)


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
    """The names for this configuration: heads of version 1's matrix, and the masked LM head's layout."""
    placed = tuple(
        replace(rule, heads=config.heads) if isinstance(rule, Interleave) else rule
        for rule in rules
    )
    decoder = decodes(config.position)
    ours, others = (_PUBLISHED, _LEGACY) if decoder else (_LEGACY, _PUBLISHED)
    every = (*_COMMON, *placed, _IN_DECODER if decoder else _AT_INPUT, *_masked(ours))
    return KeyTable("deberta.", every, (f"{_EMBEDDINGS}.position_ids",), _synonyms(others, ours))


def _seen(config: EncoderConfig, names: Collection[str]) -> EncoderConfig:
    """A table of absolute positions that the input does not read is the decoder's; but not if transformers trained the head."""
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
"""Settings that some models of the family do not read."""


def _own(*heads: HeadKind) -> Architecture:
    """What no class of transformers has: a model of our own folder type."""
    return Architecture("bothways.Model", frozenset(heads), own=True)


def _family(
    model_type: str,
    defaults: EncoderConfig,
    rules: tuple[Rule, ...],
    architectures: tuple[Architecture, ...],
) -> Family:
    return Family(
        model_type=model_type,
        keys=_keys_for(rules, defaults),
        architectures=architectures,
        config_rules=ConfigRules(
            defaults,
            numbers={ours: theirs for ours, theirs in NUMBERS.items() if ours != "segments"},
            fixed=FIXED | {"talking_head": False},
            ignored=_CONDITIONAL,
            read_more=_read_more,
            write_more=_write_more,
        ),
        dropouts={"labels": ("cls_dropout", None), "choice": ("cls_dropout", None)},
        adapted=lambda config: _keys_for(rules, config),
        seen=_seen,
    )


_FIRST_CLASSES = tuple(known for known in classes("Deberta") if known.heads != {"choice"})

# A setting that is absent says what it does in transformers, which the published sizes do not follow.
DEBERTA = _family(
    "deberta",
    replace(first(12, 768, 12), position=Disentangled()),
    _FIRST,
    (*_FIRST_CLASSES, _own("choice")),
)
DEBERTA_V2 = _family(
    "deberta-v2",
    replace(later(24, 1536, 24), position=Disentangled()),
    _LATER,
    (*classes("DebertaV2"), _own("replaced"), _own("masked", "replaced")),
)
