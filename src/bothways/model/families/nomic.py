"""Nomic BERT: BERT with rotary positions, gated layers and no biases, for 2048 tokens.

Source: Nussbaum et al. 2024, section 3.1.

Files name tensors as FlashAttention's code does. Models that were published before transformers had
the family name their settings as GPT-2 does; they are read, and written as transformers has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from bothways.core.errors import FolderError
from bothways.model.config import Bias, Dropouts, EncoderConfig, Gated
from bothways.model.families import bert, rotary
from bothways.model.families.common import masked_rules, output_rules, position_buffers
from bothways.model.families.family import ACTIVATIONS, FIXED, ConfigRules, Family, read_number
from bothways.model.families.weight_names import KeyTable, Rename, Rule, Stack
from bothways.model.positions import Rotary

_THETA = 1000.0


def base() -> EncoderConfig:
    """Return 12 layers of 768."""
    return replace(
        bert.base(30_528),
        position=Rotary(2048, (_THETA,)),
        mlp=Gated(),
        bias=Bias(attention=False, mlp=False),
        activation="silu",
        dropout=Dropouts(0.0, 0.0),
    )


PRESETS: dict[str, Callable[[], EncoderConfig]] = {"nomic-bert-2048": base}


def _read_more(config: EncoderConfig, raw: Mapping[str, Any], location: str) -> EncoderConfig:
    fraction = read_number(raw, "rotary_emb_fraction", 1.0, location)
    if fraction != 1:
        message = f"rotary_emb_fraction must be 1, not {fraction}"
        raise FolderError(message, where=location, fix="Use the model's own code.")
    position = rotary.read_rotary(config, raw, _THETA, location)
    if raw.get("rotary_scaling_factor"):
        # The published code scales positions only in texts longer than those it was trained on.
        trained = read_number(raw, "max_trained_positions", 2048, location)
        position = replace(position, max_positions=min(position.max_positions, trained))
    return replace(config, position=position)


_SETTINGS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "activation_function": "hidden_act",
    "resid_pdrop": "hidden_dropout_prob",
    "attn_pdrop": "attention_probs_dropout_prob",
    "rotary_emb_base": "rope_theta",
}
_OFF = (
    "prenorm", "parallel_block", "use_rms_norm", "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias",
    "causal", "rotary_emb_interleaved",
)  # fmt: skip
_MASKED = "cls.predictions"
_HEADS: tuple[Rule, ...] = (
    *masked_rules(
        f"{_MASKED}.transform.dense",
        f"{_MASKED}.transform.layer_norm",
        f"{_MASKED}.decoder",
        f"{_MASKED}.bias",
    ),
    *output_rules(),
)


def _rules(stem: str) -> tuple[Rule, ...]:
    layer = f"{stem}.encoder.layers.{{}}"
    layers: tuple[Rule, ...] = (
        Rename("encoder.blocks.{}.attention.qkv", f"{layer}.attn.Wqkv"),
        Rename("encoder.blocks.{}.attention.out", f"{layer}.attn.out_proj"),
        # The activation is applied to `fc12`, the first half here.
        Stack("encoder.blocks.{}.mlp.up", (f"{layer}.mlp.fc12", f"{layer}.mlp.fc11")),
        Rename("encoder.blocks.{}.mlp.down", f"{layer}.mlp.fc2"),
        Rename("encoder.blocks.{}.attention_norm", f"{layer}.norm1"),
        Rename("encoder.blocks.{}.mlp_norm", f"{layer}.norm2"),
    )
    return (*rotary.rotary_rules(stem, layers, "emb_ln"), *_HEADS)


NOMIC_BERT = Family(
    model_type="nomic_bert",
    keys=KeyTable("nomic_bert.", _rules("nomic_bert"), position_buffers("nomic_bert.embeddings")),
    architectures=rotary.pooled_classes("NomicBert"),
    config_rules=ConfigRules(
        base(),
        activations={**ACTIVATIONS, "swiglu": "silu"},
        fixed=FIXED | dict.fromkeys(_OFF, False),
        aliases=_SETTINGS,
        ignored=frozenset({"embd_pdrop", "max_trained_positions", "auto_map"}),
        read_more=_read_more,
        write_more=lambda config: {
            "head_dim": config.width // config.heads,
            **rotary.write_rotary(config),
        },
    ),
    other_keys=(
        KeyTable("bert.", _rules("bert")),
        KeyTable("nomic_bert.", (*rotary.rotary_rules("nomic_bert"), *_HEADS)),
    ),
)
