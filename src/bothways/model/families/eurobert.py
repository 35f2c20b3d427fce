"""EuroBERT: a bidirectional Llama for European and other languages, for 8192 tokens.

Source: Boizard et al. 2025, section 2.1.

Differences from BERT: rotary positions, SwiGLU, RMSNorm before each sub-layer, groups of heads that
share keys and values, no biases, no dropout. The masked LM head is a matrix of its own alone; the
head for labels applies its dense layer to every token and averages what comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from bothways.model.config import Bias, Dropouts, EncoderConfig, Gated, Own, PreNorm, Readout
from bothways.model.families.common import classes, output_rules
from bothways.model.families.family import (
    SIZES,
    ConfigRules,
    Family,
    first_name,
    read_choice,
    read_number,
)
from bothways.model.families.rotary import layer_rules, read_rotary, write_rotary
from bothways.model.families.weight_names import KeyTable, Rename, Tie
from bothways.model.positions import Rotary

_VOCAB, _PAD, _THETA = 128_256, 128_001, 10_000.0
_POOLINGS: dict[str, Any] = {"bos": "first", "mean": "mean", "late": "late"}


def eurobert_shape(
    depth: int, width: int, intermediate_size: int, heads: int, groups: int
) -> EncoderConfig:
    """Return `depth` layers of `width` features, with `groups` heads of keys and values."""
    return EncoderConfig(
        vocab=_VOCAB,
        width=width,
        depth=depth,
        heads=heads,
        intermediate_size=intermediate_size,
        segments=0,
        position=Rotary(8192, (250_000.0,)),
        order=PreNorm(),
        mlp=Gated(),
        bias=Bias(attention=False, mlp=False, output=False),
        activation="silu",
        norm="rms",
        norm_epsilon=1e-5,
        dropout=Dropouts(0.0, 0.0),
        pad=_PAD,
        key_value_heads=None if groups == heads else groups,
        readout=Readout(labels=Own("gelu", reads="late"), masked="direct", output="own"),
    )


PRESETS: dict[str, Callable[[], EncoderConfig]] = {
    "eurobert-210m": lambda: eurobert_shape(12, 768, 3072, 12, 12),
    "eurobert-610m": lambda: eurobert_shape(26, 1152, 4096, 18, 6),
    "eurobert-2.1b": lambda: eurobert_shape(32, 2304, 6144, 18, 6),
}


def _read_more(config: EncoderConfig, raw: Mapping[str, Any], location: str) -> EncoderConfig:
    groups = config.heads
    if raw.get("num_key_value_heads") is not None:
        groups = read_number(raw, "num_key_value_heads", groups, location)
    reads = read_choice(raw, "classifier_pooling", _POOLINGS, "late", location)
    return replace(
        config,
        position=read_rotary(config, raw, _THETA, location),
        key_value_heads=None if groups == config.heads else groups,
        bias=replace(config.bias, output=config.bias.mlp),
        readout=replace(config.readout, labels=Own("gelu", reads=reads)),
    )


def _write_more(config: EncoderConfig) -> dict[str, Any]:
    labels = config.readout.labels
    reads = labels.reads if isinstance(labels, Own) else ""
    return {
        "num_key_value_heads": config.key_value_heads or config.heads,
        "head_dim": config.width // config.heads,
        "classifier_pooling": first_name(_POOLINGS, reads),
        **write_rotary(config),
        # Absent ids would be the published vocabulary's.
        **({} if config.vocab > _PAD else {"bos_token_id": None, "eos_token_id": None}),
    }


def _keys_for(config: EncoderConfig) -> KeyTable:
    grouped = config.key_value_heads is not None
    return KeyTable(
        "model.",
        (
            Rename("encoder.embedding.token", "model.embed_tokens"),
            *layer_rules("model.layers.{}", "input_layernorm", "post_attention_layernorm", grouped),
            Rename("encoder.norm", "model.norm"),
            Rename("heads.masked.bias", "lm_head.bias"),
            Tie("encoder.embedding.token.weight", "lm_head.weight", owner="heads.masked"),
            *output_rules({"labels.inner": "dense"}),
        ),
    )


_DEFAULT = replace(eurobert_shape(12, 768, 3072, 12, 12), position=Rotary(8192, (_THETA,)))
EUROBERT = Family(
    model_type="eurobert",
    keys=_keys_for(_DEFAULT),
    architectures=classes("EuroBert", heads={"masked", "labels", "tags"}),
    config_rules=ConfigRules(
        _DEFAULT,
        numbers=SIZES
        | {
            "norm_epsilon": "rms_norm_eps",
            "dropout.attention": "attention_dropout",
            "bias.mlp": "mlp_bias",
            "bias.attention": "attention_bias",
        },
        fixed={},
        aliases={"clf_pooling": "classifier_pooling"},
        ignored=frozenset({"pretraining_tp", "mask_token_id", "auto_map"}),
        read_more=_read_more,
        write_more=_write_more,
    ),
    dropouts={},
    adapted=_keys_for,
)
