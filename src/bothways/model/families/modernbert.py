"""ModernBERT: BERT's task with the architecture of later language models (Warner et al. 2024).

Differences from BERT: rotary positions; local attention within 64 tokens in two of three layers,
with a smaller base of the angles; GeGLU; no biases but in outputs; pre-norm with a LayerNorm after
the embeddings; no segments and no pooler. Every head has a dense layer with GELU and LayerNorm of
its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from bothways.core.errors import FolderError
from bothways.model.attention.patterns import Full, Pattern, Window
from bothways.model.config import Bias, Dropouts, EncoderConfig, Gated, Own, PreNorm, Readout
from bothways.model.families import family
from bothways.model.families.common import classes, masked_rules
from bothways.model.families.family import Family
from bothways.model.families.weight_names import KeyTable, Rename, Rule
from bothways.model.positions import Rotary

GLOBAL, LOCAL = 160_000.0, 10_000.0
_PAD = 50_283
_OWN = Own("gelu", norm=True, reads="mean")


def _sized(depth: int, width: int, intermediate_size: int) -> EncoderConfig:
    return EncoderConfig(
        vocab=50_368,
        width=width,
        depth=depth,
        heads=width // 64,
        intermediate_size=intermediate_size,
        segments=0,
        position=Rotary(8192, (GLOBAL, LOCAL, LOCAL)),
        patterns=(Full(), Window(64), Window(64)),
        order=PreNorm(embedding=True),
        mlp=Gated(),
        bias=Bias(attention=False, mlp=False, norm=False, head=False),
        norm_epsilon=1e-5,
        dropout=Dropouts(0.0, 0.0, places=("embedding", "attention")),
        pad=_PAD,
        readout=Readout(labels=_OWN, choice=_OWN, tokens=_OWN, masked="gelu"),
    )


def base() -> EncoderConfig:
    """Return 22 layers of 768."""
    return _sized(22, 768, 1152)


ETTIN = {"17m": (7, 256, 384), "32m": (10, 384, 576), "68m": (19, 512, 768), "1b": (28, 1792, 3840)}
"""Further sizes of ModernBERT, as layers, width and features between (Weller et al. 2025)."""

PRESETS: dict[str, Callable[[], EncoderConfig]] = {
    **{f"ettin-{name}": functools.partial(_sized, *size) for name, size in ETTIN.items()},
    "modernbert-base": base,
    "modernbert-large": lambda: _sized(28, 1024, 2624),
}

_FULL, _WINDOW = "full_attention", "sliding_attention"
_THETAS = {_FULL: ("global_rope_theta", GLOBAL), _WINDOW: ("local_rope_theta", LOCAL)}
"""Kinds of layers, with the name of their base in older files and its default."""
_POOLINGS = {"cls": "first", "mean": "mean"}


def _read_more(config: EncoderConfig, raw: Mapping[str, Any], location: str) -> EncoderConfig:
    # Older files have only the interval of global layers.
    interval = family.read_number(raw, "global_attn_every_n_layers", 3, location)
    if interval < 1:
        message = f"global_attn_every_n_layers must be at least 1, not {interval}"
        raise FolderError(message, where=location)
    kinds = raw.get("layer_types") or _alternating(config.depth, interval)
    allowed, depth = list(_THETAS), config.depth
    if not isinstance(kinds, list) or len(kinds) != depth or any(k not in allowed for k in kinds):
        names = " or ".join(_THETAS)
        message = f"layer_types must name {names} for each of {depth} layers, not {kinds!r}"
        raise FolderError(message, where=location)
    patterns: dict[str, Pattern] = {
        _FULL: Full(),
        _WINDOW: Window(family.read_number(raw, "local_attention", 128, location) // 2),
    }
    bases = {kind: _base(raw, kind, location) for kind in set(kinds)}
    activation = family.read_choice(
        raw, "classifier_activation", family.ACTIVATIONS, "gelu", location
    )
    reads = family.read_choice(raw, "classifier_pooling", _POOLINGS, "cls", location)
    inner = Own(activation, norm=True, reads=reads)
    rate = family.read_number(raw, "embedding_dropout", 0.0, location)
    attention_rate = config.dropout.attention  # also on the output of attention
    return replace(
        config,
        position=Rotary(config.position.max_positions, tuple(bases[kind] for kind in kinds)),
        patterns=tuple(patterns[kind] for kind in kinds),
        dropout=replace(
            config.dropout,
            hidden=attention_rate,
            embedding=None if rate == attention_rate else rate,
        ),
        readout=replace(
            config.readout,
            labels=inner,
            choice=inner,
            tokens=inner,
            masked=activation,
        ),
    ).canonical


def _alternating(depth: int, interval: int) -> list[str]:
    """Return the kinds of layers: one in `interval` is global, and the first one is."""
    return [_WINDOW if layer % interval else _FULL for layer in range(depth)]


def _base(raw: Mapping[str, Any], kind: str, location: str) -> float:
    """Return the base of the angles in layers of a kind."""
    old, default = _THETAS[kind]
    rope = raw.get("rope_parameters") or {}
    parameters = (rope.get(kind) or {}) if isinstance(rope, dict) else rope
    if not isinstance(parameters, dict) or rope.keys() - _THETAS:
        message = f"rope_parameters must be a table for each kind of layers, not {rope!r:.60}"
        raise FolderError(message, where=location)
    if raw.get("rope_scaling") or parameters.get("rope_type", "default") != "default":
        scaling = raw.get("rope_scaling") or parameters.get("rope_type")
        message = f"rotary positions scaled by {scaling!r} have no counterpart here"
        raise FolderError(message, where=location)
    if "rope_theta" in parameters:
        return float(family.read_number(parameters, "rope_theta", default, location))
    if raw.get(old) is None and kind == _WINDOW and old in raw:
        return _base(raw, _FULL, location)
    return float(family.read_number(raw, old, default, location))


def _write_more(config: EncoderConfig) -> dict[str, Any]:
    layers = [
        _WINDOW if isinstance(config.pattern(layer), Window) else _FULL
        for layer in range(config.depth)
    ]
    radius = next(
        (pattern.radius for pattern in config.patterns if isinstance(pattern, Window)), 64
    )
    thetas = {
        kind: config.base(layers.index(kind)) if kind in layers else default
        for kind, (_, default) in _THETAS.items()
    }
    inner = config.readout.tokens or _OWN
    # Releases of transformers before 5, and other programs, read no tables: only these names.
    older: dict[str, Any] = {old: thetas[kind] for kind, (old, _) in _THETAS.items()}
    for interval in range(config.depth, 0, -1):
        if layers == _alternating(config.depth, interval):
            older["global_attn_every_n_layers"] = interval
    return {
        **older,
        "layer_types": layers,
        "local_attention": 2 * radius,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()
        },
        "embedding_dropout": config.dropout_at("embedding"),
        "classifier_activation": family.first_name(family.ACTIVATIONS, inner.activation),
        "classifier_pooling": family.first_name(_POOLINGS, inner.reads),
        # Absent ids would be the published vocabulary's.
        **({} if config.vocab > _PAD else dict.fromkeys(_SPECIALS)),
    }


_SPECIALS = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
_LAYER = "model.layers.{}"
_RULES: tuple[Rule, ...] = (
    Rename("encoder.embedding.token", "model.embeddings.tok_embeddings"),
    Rename("encoder.embedding.norm", "model.embeddings.norm"),
    Rename("encoder.blocks.{}.attention_norm", f"{_LAYER}.attn_norm"),
    Rename("encoder.blocks.{}.attention.qkv", f"{_LAYER}.attn.Wqkv"),
    Rename("encoder.blocks.{}.attention.out", f"{_LAYER}.attn.Wo"),
    Rename("encoder.blocks.{}.mlp_norm", f"{_LAYER}.mlp_norm"),
    Rename("encoder.blocks.{}.mlp.up", f"{_LAYER}.mlp.Wi"),
    Rename("encoder.blocks.{}.mlp.down", f"{_LAYER}.mlp.Wo"),
    Rename("encoder.norm", "model.final_norm"),
    # All heads begin with the same layer.
    *masked_rules("head.dense", "head.norm", "decoder"),
    *(Rename(f"heads.{kind}.inner", "head.dense") for kind in ("labels", "tags", "span", "choice")),
    *(Rename(f"heads.{kind}.norm", "head.norm") for kind in ("labels", "tags", "span", "choice")),
    *(Rename(f"heads.{kind}.dense", "classifier") for kind in ("labels", "tags", "span", "choice")),
)

MODERNBERT = Family(
    model_type="modernbert",
    keys=KeyTable("model.", _RULES),
    architectures=classes("ModernBert"),
    config_rules=family.ConfigRules(
        base(),
        numbers=family.SIZES
        | {
            "norm_epsilon": "norm_eps",
            "dropout.attention": "attention_dropout",
            "readout.span_dropout": "classifier_dropout",
            "mlp.dropout": "mlp_dropout",
            "bias.attention": "attention_bias",
            "bias.mlp": "mlp_bias",
            "bias.norm": "norm_bias",
            "bias.head": "classifier_bias",
            "bias.output": "decoder_bias",
        },
        activation="hidden_activation",
        ignored=frozenset(
            """
            deterministic_flash_attn initializer_cutoff_factor sparse_pred_ignore_index
            sparse_prediction reference_compile repad_logits_with_grad global_attn_every_n_layers
            global_rope_theta local_rope_theta rope_scaling layer_norm_eps position_embedding_type
            """.split()  # noqa: SIM905
        ),
        fixed={},
        read_more=_read_more,
        write_more=_write_more,
    ),
    dropouts=dict.fromkeys(family.DROPOUTS, ("classifier_dropout", 0.0)),
)
