"""GTE: BERT with rotary positions and gated layers, for 8192 tokens.

Source: Zhang et al. 2024, section 3.1.

The published models have the type `new`; they are read, and written as transformers has them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bothways.model.config import Bias, Dropouts, EncoderConfig, Gated, Readout
from bothways.model.families import bert, rotary
from bothways.model.families.common import masked_rules, output_rules
from bothways.model.families.family import FIXED, UNSEGMENTED, ConfigRules, Family, read_number
from bothways.model.families.weight_names import KeyTable, Rename, Rule, Swap
from bothways.model.positions import Rotary

_THETA = 160_000.0
ENGLISH, MULTILINGUAL = 30_528, 250_048


def gte_shape(
    shape: EncoderConfig, segments: int, theta: float, scaling: float, pad: int = 0
) -> EncoderConfig:
    """Return a published size; `scaling` is that of its longest input."""
    factor = scaling ** (2 / 64)
    return replace(
        shape,
        segments=segments,
        position=Rotary(8192, (theta * scaling,), factor),
        mlp=Gated(0.1),
        bias=Bias(up=False),
        dropout=Dropouts(0.1, 0.0),
        pad=pad,
        readout=Readout(masked="gelu"),
    )


PRESETS: dict[str, Callable[[], EncoderConfig]] = {
    "gte-base-en-v1.5": lambda: gte_shape(bert.base(ENGLISH), 0, 500_000.0, 2.0),
    "gte-large-en-v1.5": lambda: gte_shape(bert.large(ENGLISH), 2, 160_000.0, 2.0),
    "gte-multilingual-base": lambda: gte_shape(bert.base(MULTILINGUAL), 1, 20_000.0, 8.0, 1),
}


def _heads(norm: str) -> tuple[Rule, ...]:
    return (*masked_rules("lm_head.dense", norm, "lm_head.decoder"), *output_rules())


def _rules(stem: str) -> tuple[Rule, ...]:
    layer = f"{stem}.encoder.layer.{{}}"
    layers: tuple[Rule, ...] = (
        Rename("encoder.blocks.{}.attention.qkv", f"{layer}.attention.qkv_proj"),
        Rename("encoder.blocks.{}.attention.out", f"{layer}.attention.o_proj"),
        # The activation is applied to the second half, the first one here.
        Swap("encoder.blocks.{}.mlp.up", f"{layer}.mlp.up_gate_proj"),
        Rename("encoder.blocks.{}.mlp.down", f"{layer}.mlp.down_proj"),
        Rename("encoder.blocks.{}.attention_norm", f"{layer}.attn_ln"),
        Rename("encoder.blocks.{}.mlp_norm", f"{layer}.mlp_ln"),
    )
    return (*rotary.rotary_rules(stem, layers), *_heads("lm_head.norm"))


GTE = Family(
    model_type="gte",
    keys=KeyTable("gte.", _rules("gte")),
    architectures=rotary.pooled_classes("Gte"),
    config_rules=ConfigRules(
        gte_shape(bert.base(MULTILINGUAL), 1, _THETA, 1.0, 1),
        numbers=UNSEGMENTED,
        fixed=FIXED
        | {"position_embedding_type": "rope", "layer_norm_type": "layer_norm"}
        | {"pack_qkv": True, "logn_attention_scale": False},
        ignored=frozenset(
            {"auto_map", "unpad_inputs", "use_memory_efficient_attention", "logn_attention_clip1"}
        ),
        read_more=lambda config, raw, location: replace(
            config,
            segments=read_number(raw, "type_vocab_size", 1, location),
            position=rotary.read_rotary(config, raw, _THETA, location),
            mlp=Gated(config.dropout.hidden),
        ),
        write_more=lambda config: {
            "type_vocab_size": config.segments,
            **rotary.write_rotary(config),
        },
    ),
    other_keys=(
        KeyTable("new.", _rules("new"), ("new.embeddings.position_ids",)),
        KeyTable("gte.", (*rotary.rotary_rules("gte"), *_heads("lm_head.layer_norm"))),
    ),
    other_types=("new",),
)
