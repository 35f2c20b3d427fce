"""Families with rotary positions and gated layers: Nomic BERT, GTE and EuroBERT.

Nomic BERT (Nussbaum et al. 2024, section 3.1): BERT without biases, for 2048 tokens. Files name
tensors as FlashAttention's code does. Models that were published before transformers had the family
name their settings as GPT-2 does; they are read, and written as transformers has them.

GTE (Zhang et al. 2024, section 3.1): BERT for 8192 tokens. The published models have the type
`new`; they are read, and written as transformers has them.

EuroBERT (Boizard et al. 2025, section 2.1): a bidirectional Llama for European and other languages,
for 8192 tokens. RMSNorm before each sub-layer, groups of heads that share keys and values, no
biases, no dropout. The masked LM head is a matrix of its own alone; the head for labels applies its
dense layer to every token and averages what comes out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bothways.core.errors import FolderError
from bothways.model.config import Bias, Dropouts, EncoderConfig, Gated, Own, PreNorm, Readout
from bothways.model.families import bert
from bothways.model.families.family import (
    ACTIVATIONS,
    FIXED,
    SIZES,
    UNSEGMENTED,
    Architecture,
    ConfigRules,
    Family,
    classes,
    first_name,
    masked_rules,
    output_rules,
    position_buffers,
    read_choice,
    read_number,
)
from bothways.model.families.weight_names import KeyTable, Rename, Rule, Stack, Swap, Tie
from bothways.model.positions import Rotary

_NOMIC = replace(
    bert.base(30_528),
    position=Rotary(2048, (1000.0,)),
    mlp=Gated(),
    bias=Bias(attention=False, mlp=False),
    activation="silu",
    dropout=Dropouts(0.0, 0.0),
)


def _gte(
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


_EUROBERT_PAD = 128_001


def _eurobert(
    depth: int, width: int, intermediate_size: int, heads: int, groups: int
) -> EncoderConfig:
    """Return `depth` layers of `width` features, with `groups` heads of keys and values."""
    return EncoderConfig(
        vocab=128_256,
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
        pad=_EUROBERT_PAD,
        key_value_heads=None if groups == heads else groups,
        readout=Readout(labels=Own("gelu", reads="late"), masked="direct", output="own"),
    )


PRESETS: dict[str, EncoderConfig] = {
    "nomic-bert-2048": _NOMIC,
    "gte-base-en-v1.5": _gte(bert.base(30_528), 0, 500_000.0, 2.0),
    "gte-large-en-v1.5": _gte(bert.large(30_528), 2, 160_000.0, 2.0),
    "gte-multilingual-base": _gte(bert.base(250_048), 1, 20_000.0, 8.0, 1),
    "eurobert-210m": _eurobert(12, 768, 3072, 12, 12),
    "eurobert-610m": _eurobert(26, 1152, 4096, 18, 6),
    "eurobert-2.1b": _eurobert(32, 2304, 6144, 18, 6),
}


def read_rotary(
    config: EncoderConfig, raw: Mapping[str, Any], theta: float, location: str
) -> Rotary:
    """Return the rotary positions of `rope_parameters`, or of `rope_theta` and `rope_scaling`.

    Older files of GTE have "ntk" scaling: a larger base, and angles divided by factor^(2/d).
    """
    size = config.width // config.heads
    if raw.get("head_dim") not in (None, size):
        message = f"head_dim must be {size}, the width of a head, not {raw['head_dim']!r:.40}"
        raise FolderError(message, where=location)
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        message = f"rope_parameters must be a table, not {parameters!r:.60}"
        raise FolderError(message, where=location)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    allowed = {"rope_type", "type", "rope_theta", "factor"}
    unsupported = [
        key for key, value in parameters.items() if key not in allowed and value is not None
    ]
    if kind not in ("default", "linear", "ntk") or unsupported:
        listed = ", ".join([f"of type {kind!r}", *unsupported])
        message = f"rotary positions {listed} have no counterpart here"
        raise FolderError(
            message, where=location, fix="Use the model's own code for other scalings."
        )
    base = float(read_number(raw, "rope_theta", theta, location))
    base = float(read_number(parameters, "rope_theta", base, location))
    factor = 1.0 if kind == "default" else float(read_number(parameters, "factor", 1.0, location))
    if kind == "ntk":
        base, factor = base * factor, factor ** (2 / size)
    return Rotary(config.position.max_positions, (base,), factor)


def write_rotary(config: EncoderConfig) -> dict[str, Any]:
    """Return the settings of rotary positions."""
    position = config.position
    if not isinstance(position, Rotary):
        return {}
    scaled = position.factor != 1
    parameters = {
        "rope_type": "linear" if scaled else "default",
        "rope_theta": position.bases[0],
        **({"factor": position.factor} if scaled else {}),
    }
    return {"rope_parameters": parameters}


def layer_rules(
    layer: str, attention_norm: str, mlp_norm: str, grouped: bool = False
) -> tuple[Rule, ...]:
    """Return the names of a block's tensors, as in Llama.

    Args:
        layer: the beginning of the names.
        attention_norm, mlp_norm: the names of the norms.
        grouped: whether keys and values have fewer heads than queries.
    """
    query, *pair = (f"{layer}.self_attn.{name}_proj" for name in ("q", "k", "v"))
    qkv = "encoder.blocks.{}.attention.qkv"
    apart = (Rename(f"{qkv}.query", query), Stack(f"{qkv}.key_value", tuple(pair)))
    return (
        *(apart if grouped else (Stack(qkv, (query, *pair)),)),
        Rename("encoder.blocks.{}.attention.out", f"{layer}.self_attn.o_proj"),
        # The activation is applied to `gate_proj`, the first half here.
        Stack("encoder.blocks.{}.mlp.up", (f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj")),
        Rename("encoder.blocks.{}.mlp.down", f"{layer}.mlp.down_proj"),
        Rename("encoder.blocks.{}.attention_norm", f"{layer}.{attention_norm}"),
        Rename("encoder.blocks.{}.mlp_norm", f"{layer}.{mlp_norm}"),
    )


def rotary_rules(
    stem: str, layers: tuple[Rule, ...] = (), embedding_norm: str = "embeddings.LayerNorm"
) -> tuple[Rule, ...]:
    """Return the names of an encoder's tensors in post-norm order, and of the pooler.

    Args:
        stem: the beginning of the names.
        layers: the rules of the blocks; empty for Llama's names.
        embedding_norm: the name of the norm after the embeddings.
    """
    norms = "post_attention_layernorm", "post_mlp_layernorm"
    return (
        Rename("encoder.embedding.token", f"{stem}.embeddings.word_embeddings"),
        Rename("encoder.embedding.segment", f"{stem}.embeddings.token_type_embeddings"),
        Rename("encoder.embedding.norm", f"{stem}.{embedding_norm}"),
        *(layers or layer_rules(f"{stem}.layers.{{}}", *norms)),
        Rename("heads.pooler.dense", f"{stem}.pooler.dense"),
    )


def pooled_classes(stem: str) -> tuple[Architecture, ...]:
    """Return the classes of GTE and Nomic BERT: the head for labels reads a pooler of its own."""
    with_heads = classes(stem, pooled={"labels"}, heads={"masked", "labels", "tags"})
    return (*with_heads[:-1], *classes(stem, heads=()))


def _read_nomic(config: EncoderConfig, raw: Mapping[str, Any], location: str) -> EncoderConfig:
    fraction = read_number(raw, "rotary_emb_fraction", 1.0, location)
    if fraction != 1:
        message = f"rotary_emb_fraction must be 1, not {fraction}"
        raise FolderError(message, where=location, fix="Use the model's own code.")
    position = read_rotary(config, raw, 1000.0, location)
    if raw.get("rotary_scaling_factor"):
        # The published code scales positions only in texts longer than those it was trained on.
        trained = read_number(raw, "max_trained_positions", 2048, location)
        position = replace(position, max_positions=min(position.max_positions, trained))
    return replace(config, position=position)


_NOMIC_SETTINGS = {
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
_LM = "cls.predictions"
_NOMIC_HEADS: tuple[Rule, ...] = (
    *masked_rules(
        f"{_LM}.transform.dense",
        f"{_LM}.transform.layer_norm",
        f"{_LM}.decoder",
        f"{_LM}.bias",
    ),
    *output_rules(),
)


def _nomic_rules(stem: str) -> tuple[Rule, ...]:
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
    return (*rotary_rules(stem, layers, "emb_ln"), *_NOMIC_HEADS)


NOMIC_BERT = Family(
    model_type="nomic_bert",
    keys=KeyTable(
        "nomic_bert.", _nomic_rules("nomic_bert"), position_buffers("nomic_bert.embeddings")
    ),
    architectures=pooled_classes("NomicBert"),
    config_rules=ConfigRules(
        _NOMIC,
        activations={**ACTIVATIONS, "swiglu": "silu"},
        fixed=FIXED | dict.fromkeys(_OFF, False),
        published=_NOMIC_SETTINGS,
        ignored=frozenset({"embd_pdrop", "max_trained_positions", "auto_map"}),
        read_more=_read_nomic,
        write_more=lambda config: {
            "head_dim": config.width // config.heads,
            **write_rotary(config),
        },
    ),
    other_keys=(
        KeyTable("bert.", _nomic_rules("bert")),
        KeyTable("nomic_bert.", (*rotary_rules("nomic_bert"), *_NOMIC_HEADS)),
    ),
)


def _gte_heads(norm: str) -> tuple[Rule, ...]:
    return (*masked_rules("lm_head.dense", norm, "lm_head.decoder"), *output_rules())


def _gte_rules(stem: str) -> tuple[Rule, ...]:
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
    return (*rotary_rules(stem, layers), *_gte_heads("lm_head.norm"))


GTE = Family(
    model_type="gte",
    keys=KeyTable("gte.", _gte_rules("gte")),
    architectures=pooled_classes("Gte"),
    config_rules=ConfigRules(
        _gte(bert.base(250_048), 1, 160_000.0, 1.0, 1),
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
            position=read_rotary(config, raw, 160_000.0, location),
            mlp=Gated(config.dropout.hidden),
        ),
        write_more=lambda config: {
            "type_vocab_size": config.segments,
            **write_rotary(config),
        },
    ),
    other_keys=(
        KeyTable("new.", _gte_rules("new"), ("new.embeddings.position_ids",)),
        KeyTable("gte.", (*rotary_rules("gte"), *_gte_heads("lm_head.layer_norm"))),
    ),
    other_types=("new",),
)


_POOLINGS: dict[str, Any] = {"bos": "first", "mean": "mean", "late": "late"}


def _read_eurobert(config: EncoderConfig, raw: Mapping[str, Any], location: str) -> EncoderConfig:
    groups = config.heads
    if raw.get("num_key_value_heads") is not None:
        groups = read_number(raw, "num_key_value_heads", groups, location)
    reads = read_choice(raw, "classifier_pooling", _POOLINGS, "late", location)
    return replace(
        config,
        position=read_rotary(config, raw, 10_000.0, location),
        key_value_heads=None if groups == config.heads else groups,
        bias=replace(config.bias, output=config.bias.mlp),
        readout=replace(config.readout, labels=Own("gelu", reads=reads)),
    )


def _write_eurobert(config: EncoderConfig) -> dict[str, Any]:
    labels = config.readout.labels
    reads = labels.reads if isinstance(labels, Own) else ""
    return {
        "num_key_value_heads": config.key_value_heads or config.heads,
        "head_dim": config.width // config.heads,
        "classifier_pooling": first_name(_POOLINGS, reads),
        **write_rotary(config),
        # Absent ids would be the published vocabulary's.
        **({} if config.vocab > _EUROBERT_PAD else {"bos_token_id": None, "eos_token_id": None}),
    }


def _eurobert_keys(config: EncoderConfig) -> KeyTable:
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


_EUROBERT = replace(_eurobert(12, 768, 3072, 12, 12), position=Rotary(8192, (10_000.0,)))
EUROBERT = Family(
    model_type="eurobert",
    keys=_eurobert_keys(_EUROBERT),
    architectures=classes("EuroBert", heads={"masked", "labels", "tags"}),
    config_rules=ConfigRules(
        _EUROBERT,
        numbers=SIZES
        | {
            "norm_epsilon": "rms_norm_eps",
            "dropout.attention": "attention_dropout",
            "bias.mlp": "mlp_bias",
            "bias.attention": "attention_bias",
        },
        fixed={},
        published={"clf_pooling": "classifier_pooling"},
        ignored=frozenset({"pretraining_tp", "mask_token_id", "auto_map"}),
        read_more=_read_eurobert,
        write_more=_write_eurobert,
    ),
    dropouts={},
    adapted=_eurobert_keys,
)
