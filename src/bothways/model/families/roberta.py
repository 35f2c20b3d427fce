"""RoBERTa, XLM-RoBERTa and CamemBERT: BERT without next sentence prediction, on more text.

Source: Liu et al. 2019; Conneau et al. 2020; Martin et al. 2020.

Differences from BERT: two unused rows at the start of the position table, one segment, ε = 1e-5,
and a dense layer of its own on `<s>` in the head for labels. The masked LM head always uses GELU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from bothways.core.errors import FolderError
from bothways.model.config import EncoderConfig, Own, Readout
from bothways.model.families import bert
from bothways.model.families.common import classes, masked_rules, output_rules, position_buffers
from bothways.model.families.family import ConfigRules, Family
from bothways.model.families.weight_names import KeyTable, Rename, Rule
from bothways.model.positions import Learned

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


PRESETS: dict[str, Callable[[], EncoderConfig]] = {
    "roberta-base": base,
    "roberta-large": large,
    "distilroberta-base": lambda: replace(base(), depth=6),  # Sanh et al. 2019
    "xlm-roberta-base": lambda: base(MULTILINGUAL),
    "xlm-roberta-large": lambda: large(MULTILINGUAL),
    "camembert-base": lambda: base(FRENCH),
    "camembert-large": lambda: large(FRENCH),
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
