"""ELECTRA: a generator fills masks, a discriminator finds replaced tokens (Clark et al. 2020).

Differences from BERT: embeddings may be narrower than the encoder, with a dense layer between; no
pooler; heads for whole texts have a dense layer with GELU of their own on [CLS]. Generator and
discriminator are two classes of one family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from bothways.model.config import EncoderConfig, Own, Readout
from bothways.model.families import bert
from bothways.model.families.common import classes, masked_rules, output_rules, position_buffers
from bothways.model.families.family import FIXED, NUMBERS, ConfigRules, Family, read_number
from bothways.model.families.weight_names import KeyTable, Rename, Rule

READOUT = Readout(labels=Own("gelu", dropout_first=True), choice=Own("gelu"), masked="gelu")
"""What the heads of ELECTRA read; a BERT with it is an ELECTRA."""


def _sized(depth: int, width: int, embedding: int) -> EncoderConfig:
    shape = replace(
        bert.base(), depth=depth, width=width, heads=width // 64, intermediate_size=4 * width
    )
    return replace(shape, embedding=None if embedding == width else embedding, readout=READOUT)


GENERATORS: dict[str, Callable[[], EncoderConfig]] = {
    "electra-small-generator": lambda: _sized(12, 256, 128),
    "electra-base-generator": lambda: _sized(12, 256, 768),
    "electra-large-generator": lambda: _sized(24, 256, 1024),
}
_MODELS: dict[str, Callable[[], EncoderConfig]] = {
    "electra-small": lambda: _sized(12, 256, 128),
    "electra-base": lambda: _sized(12, 768, 768),
    "electra-large": lambda: _sized(24, 1024, 1024),
}
PRESETS: dict[str, Callable[[], EncoderConfig]] = {
    **_MODELS,
    **{f"{name}-discriminator": make for name, make in _MODELS.items()},
    **GENERATORS,
}


def _read_more(config: EncoderConfig, raw: Mapping[str, Any], location: str) -> EncoderConfig:
    embedding = read_number(raw, "embedding_size", 128, location)
    return replace(config, embedding=None if embedding == config.width else embedding)


_RULES: tuple[Rule, ...] = (
    *bert.encoder_rules("electra"),
    *bert.post_norm_rules("electra"),
    Rename("encoder.embedding.project", "electra.embeddings_project"),
    Rename("heads.replaced.inner", "discriminator_predictions.dense"),
    Rename("heads.replaced.dense", "discriminator_predictions.dense_prediction"),
    *masked_rules(
        "generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head"
    ),
    *output_rules(
        {
            "labels.inner": "classifier.dense",
            "labels.dense": "classifier.out_proj",
            "choice.inner": "sequence_summary.summary",
        }
    ),
)

ELECTRA = Family(
    model_type="electra",
    keys=KeyTable("electra.", _RULES, position_buffers("electra.embeddings")),
    architectures=classes("Electra", pretraining={"replaced"}),
    config_rules=ConfigRules(
        _sized(12, 256, 128),
        numbers=NUMBERS,
        fixed=FIXED
        | {"summary_type": "first", "summary_use_proj": True, "summary_activation": "gelu"},
        read_more=_read_more,
        write_more=lambda config: {"embedding_size": config.embedding_width},
    ),
    dropouts={
        "labels": ("classifier_dropout", None),
        "tags": ("classifier_dropout", None),
        "choice": ("summary_last_dropout", 0.1),
    },
    otherwise=dict.fromkeys(GENERATORS, "ElectraForMaskedLM"),
)
