"""ALBERT: narrow embeddings, and layers that share their weights (Lan et al. 2019).

Differences from BERT: embeddings of 128 features with a dense layer to the width; one or several
groups of layers that share their weights, with one or several blocks per layer; a pair head that
predicts the order of two segments (SOP), with dropout; no dropout after the feed-forward layer.
"""

from __future__ import annotations

from collections.abc import Callable

from bothways.model.config import Dropouts, EncoderConfig, Readout, Sharing
from bothways.model.families.common import classes, masked_rules, output_rules, position_buffers
from bothways.model.families.family import DROPOUTS, NUMBERS, ConfigRules, Family
from bothways.model.families.weight_names import KeyTable, Rename, Rule, Stack

VOCABULARY = 30_000


def _sized(depth: int, width: int, heads: int) -> EncoderConfig:
    """Return the configuration of version 2, which has no dropout."""
    return EncoderConfig(
        VOCABULARY, width, depth, heads, 4 * width, activation="gelu_tanh", embedding=128,
        dropout=Dropouts(0.0, 0.0, places=("embedding", "attention")),
        sharing=Sharing(), readout=Readout(pair_dropout=0.1),
    )  # fmt: skip


def base() -> EncoderConfig:
    """Return 12 layers of 768: 11,683,584 parameters without the heads of pre-training."""
    return _sized(12, 768, 12)


PRESETS: dict[str, Callable[[], EncoderConfig]] = {
    "albert-base": base,
    "albert-base-v2": base,
    "albert-large-v2": lambda: _sized(24, 1024, 16),
    "albert-xlarge-v2": lambda: _sized(24, 2048, 16),
    "albert-xxlarge-v2": lambda: _sized(12, 4096, 64),
}


_LAYER = "albert.encoder.albert_layer_groups.{}.albert_layers.{}"
_BLOCK = "encoder.blocks.{}.{}"
_RULES: tuple[Rule, ...] = (
    Rename("encoder.embedding.token", "albert.embeddings.word_embeddings"),
    Rename("encoder.embedding.position", "albert.embeddings.position_embeddings"),
    Rename("encoder.embedding.segment", "albert.embeddings.token_type_embeddings"),
    Rename("encoder.embedding.norm", "albert.embeddings.LayerNorm"),
    Rename("encoder.embedding.project", "albert.encoder.embedding_hidden_mapping_in"),
    Stack(
        f"{_BLOCK}.attention.qkv",
        tuple(f"{_LAYER}.attention.{name}" for name in ("query", "key", "value")),
    ),
    Rename(f"{_BLOCK}.attention.out", f"{_LAYER}.attention.dense"),
    Rename(f"{_BLOCK}.attention_norm", f"{_LAYER}.attention.LayerNorm"),
    Rename(f"{_BLOCK}.mlp.up", f"{_LAYER}.ffn"),
    Rename(f"{_BLOCK}.mlp.down", f"{_LAYER}.ffn_output"),
    Rename(f"{_BLOCK}.mlp_norm", f"{_LAYER}.full_layer_layer_norm"),
    Rename("heads.pooler.dense", "albert.pooler"),
    Rename("heads.pair.dense", "sop_classifier.classifier"),
    *masked_rules(
        "predictions.dense", "predictions.LayerNorm", "predictions.decoder", "predictions.bias"
    ),
    *output_rules(),
)

ALBERT = Family(
    model_type="albert",
    keys=KeyTable("albert.", _RULES, position_buffers("albert.embeddings")),
    architectures=classes(
        "Albert", pooled={"labels", "choice"}, pretraining={"masked", "pooler", "pair"}
    ),
    config_rules=ConfigRules(
        _sized(12, 4096, 64),
        numbers=NUMBERS
        | {
            "embedding": "embedding_size",
            "sharing.groups": "num_hidden_groups",
            "sharing.layers_per_group": "inner_group_num",
            "readout.pair_dropout": "classifier_dropout_prob",
        },
        ignored=frozenset(
            {"net_structure_type", "gap_size", "num_memory_blocks", "down_scale_factor"}
        ),
    ),
    dropouts=dict.fromkeys(DROPOUTS, ("classifier_dropout_prob", 0.1)),
)
