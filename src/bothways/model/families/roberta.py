"""RoBERTa, XLM-RoBERTa and CamemBERT, BERT without next sentence prediction on more text; MPNet.

Source: Liu et al. 2019; Conneau et al. 2020; Martin et al. 2020; Song et al. 2020.

Differences from BERT: two unused rows at the start of the position table, one segment, ε = 1e-5,
and a dense layer of its own on `<s>` in the head for labels. The masked LM head always uses GELU.

MPNet has a bias of distances on the scores, shared by all layers; the pooler of multiple choice; no
segments. Its tokens are BERT's word pieces between RoBERTa's special tokens. transformers counts
its positions from the id 1 of padding, whatever `config.json` has, and 32 buckets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bothways.core.errors import FolderError
from bothways.model.config import EncoderConfig, Own, Readout
from bothways.model.families import bert
from bothways.model.families.family import (
    UNSEGMENTED,
    ConfigRules,
    Family,
    classes,
    masked_rules,
    output_rules,
    position_buffers,
    read_number,
)
from bothways.model.families.weight_names import KeyTable, Rename, Rule, Stack
from bothways.model.positions import DistanceBias, Learned

ENGLISH = 50_265
MULTILINGUAL = 250_002
FRENCH = 32_005
_OFFSET = 2

_READOUT = Readout(labels=Own("tanh", dropout_first=True), masked="gelu")


def _as_roberta(shape: EncoderConfig) -> EncoderConfig:
    position = Learned(512, _OFFSET)
    return replace(shape, segments=1, position=position, norm_epsilon=1e-5, pad=1, readout=_READOUT)


def base(vocab: int = ENGLISH) -> EncoderConfig:
    """Return 12 layers of 768."""
    return _as_roberta(bert.base(vocab))


def large(vocab: int = ENGLISH) -> EncoderConfig:
    """Return 24 layers of 1024."""
    return _as_roberta(bert.large(vocab))


_BIAS = DistanceBias()
_MPNET = replace(base(30_527), segments=0, position=Learned(512, _OFFSET, bias=_BIAS))
PRESETS: dict[str, EncoderConfig] = {
    "roberta-base": base(),
    "roberta-large": large(),
    "distilroberta-base": replace(base(), depth=6),  # Sanh et al. 2019
    "xlm-roberta-base": base(MULTILINGUAL),
    "xlm-roberta-large": large(MULTILINGUAL),
    "camembert-base": base(FRENCH),
    "camembert-large": large(FRENCH),
    "mpnet-base": _MPNET,
}


def head_rules(stem: str) -> tuple[Rule, ...]:
    """Return the names of the heads' tensors."""
    return (
        Rename("heads.pooler.dense", f"{stem}.pooler.dense"),
        *masked_rules("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias"),
        *output_rules({"labels.inner": "classifier.dense", "labels.dense": "classifier.out_proj"}),
    )


_RULES: tuple[Rule, ...] = (
    *bert.encoder_rules("roberta"),
    *bert.post_norm_rules("roberta"),
    *head_rules("roberta"),
)


def counted_from_padding(
    config: EncoderConfig, raw: Mapping[str, Any], location: str
) -> EncoderConfig:
    """Return the configuration with positions that count from the padding token's id."""
    if config.pad is None:
        raise FolderError("pad_token_id is absent, and positions count from it", where=location)
    position, offset = config.position, config.pad + 1
    return replace(config, position=Learned(position.max_positions + _OFFSET - offset, offset))


def _family(model_type: str, stem: str, defaults: EncoderConfig) -> Family:
    return Family(
        model_type=model_type,
        keys=KeyTable("roberta.", _RULES, position_buffers("roberta.embeddings")),
        architectures=classes(stem, pooled={"choice"}),
        config_rules=ConfigRules(defaults, read_more=counted_from_padding),
        dropouts={"labels": ("classifier_dropout", None), "tags": ("classifier_dropout", None)},
    )


# The defaults are those of transformers' classes, which the published models do not have.
_ABSENT = replace(base(), segments=2, norm_epsilon=1e-12, position=Learned(510, _OFFSET))
ROBERTA = _family("roberta", "Roberta", _ABSENT)
_SMALLER = replace(_ABSENT, vocab=30_522)
XLM_ROBERTA = replace(_family("xlm-roberta", "XLMRoberta", _SMALLER), vocabulary="Unigram")
CAMEMBERT = replace(_family("camembert", "Camembert", _SMALLER), vocabulary="Unigram")


_BUCKETS = "relative_attention_num_buckets"


def _read_mpnet(config: EncoderConfig, raw: Mapping[str, Any], location: str) -> EncoderConfig:
    if config.pad != 1:
        message = f"pad_token_id must be 1, from which positions count, not {config.pad}"
        raise FolderError(message, where=location)
    buckets = read_number(raw, _BUCKETS, _BIAS.buckets, location)
    if buckets != _BIAS.buckets:
        message = f"{_BUCKETS} must be {_BIAS.buckets}, not {buckets}"
        fix = "transformers computes that many whatever the setting: use its code for other tables."
        raise FolderError(message, where=location, fix=fix)
    return config


_LAYER = "mpnet.encoder.layer.{}"
_MPNET_RULES: tuple[Rule, ...] = (
    Stack(
        "encoder.blocks.{}.attention.qkv",
        tuple(f"{_LAYER}.attention.attn.{name}" for name in ("q", "k", "v")),
    ),
    Rename("encoder.blocks.{}.attention.out", f"{_LAYER}.attention.attn.o"),
    Rename("encoder.blocks.{}.attention_norm", f"{_LAYER}.attention.LayerNorm"),
    Rename("encoder.relative.table", "mpnet.encoder.relative_attention_bias"),
    *(
        rule
        for rule in (*bert.encoder_rules("mpnet"), *bert.post_norm_rules("mpnet"))
        if ".attention" not in rule.name and "segment" not in rule.name
    ),
    *head_rules("mpnet"),
)

MPNET = Family(
    model_type="mpnet",
    keys=KeyTable("mpnet.", _MPNET_RULES, position_buffers("mpnet.embeddings")),
    architectures=classes("MPNet", pooled={"choice"}),
    config_rules=ConfigRules(
        # The defaults are those of transformers' class, which the published models do not have.
        replace(_MPNET, norm_epsilon=1e-12, position=replace(_MPNET.position, max_positions=510)),
        numbers=UNSEGMENTED,
        constant={_BUCKETS: _BIAS.buckets},
        read_more=_read_mpnet,
    ),
    dropouts={},
)
