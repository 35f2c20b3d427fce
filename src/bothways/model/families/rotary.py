"""Common parts of families with rotary positions: settings, classes, names of Llama's layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bothways.core.errors import FolderError
from bothways.model.config import EncoderConfig
from bothways.model.families.common import classes
from bothways.model.families.family import Architecture, read_number
from bothways.model.families.weight_names import Rename, Rule, Stack
from bothways.model.positions import Rotary

_FIX = "Use the model's own code for other scalings."


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
        raise FolderError(message, where=location, fix=_FIX)
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
