"""DistilBERT: half of BERT's layers, distilled from all of them (Sanh et al. 2019).

Differences from BERT: no segments and no pooler; heads for whole texts have a dense layer with
ReLU of their own on [CLS]; dropout on the feed-forward layers, not on attention's output; ε is
always 1e-12.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bothways.model.config import Dropouts, EncoderConfig, Own, Readout
from bothways.model.families import bert
from bothways.model.families.common import classes, masked_rules, output_rules
from bothways.model.families.family import ConfigRules, Family
from bothways.model.families.weight_names import KeyTable, Rename, Rule, Stack

_HEAD = Own("relu")


def base(vocab: int = bert.UNCASED) -> EncoderConfig:
    """Return 6 layers of 768."""
    shape = replace(
        bert.base(vocab), depth=6, segments=0, dropout=Dropouts(places=("embedding", "mlp"))
    )
    return replace(shape, readout=Readout(labels=_HEAD, choice=_HEAD, span_dropout=0.1))


PRESETS: dict[str, Callable[[], EncoderConfig]] = {
    "distilbert-base": base,
    "distilbert-base-uncased": base,
    "distilbert-base-cased": lambda: base(bert.CASED),
    "distilbert-base-multilingual-cased": lambda: base(bert.MULTILINGUAL_CASED),
}


_LAYER = "distilbert.transformer.layer.{}"
_RULES: tuple[Rule, ...] = (
    Rename("encoder.embedding.token", "distilbert.embeddings.word_embeddings"),
    Rename("encoder.embedding.position", "distilbert.embeddings.position_embeddings"),
    Rename("encoder.embedding.norm", "distilbert.embeddings.LayerNorm"),
    Stack(
        "encoder.blocks.{}.attention.qkv", tuple(f"{_LAYER}.attention.{name}_lin" for name in "qkv")
    ),
    Rename("encoder.blocks.{}.attention.out", f"{_LAYER}.attention.out_lin"),
    Rename("encoder.blocks.{}.attention_norm", f"{_LAYER}.sa_layer_norm"),
    Rename("encoder.blocks.{}.mlp.up", f"{_LAYER}.ffn.lin1"),
    Rename("encoder.blocks.{}.mlp.down", f"{_LAYER}.ffn.lin2"),
    Rename("encoder.blocks.{}.mlp_norm", f"{_LAYER}.output_layer_norm"),
    *masked_rules("vocab_transform", "vocab_layer_norm", "vocab_projector"),
    *output_rules({"labels.inner": "pre_classifier", "choice.inner": "pre_classifier"}),
)

DISTILBERT = Family(
    model_type="distilbert",
    keys=KeyTable("distilbert.", _RULES, ("distilbert.embeddings.position_ids",)),
    architectures=classes("DistilBert"),
    config_rules=ConfigRules(
        base(),
        numbers={
            "vocab": "vocab_size",
            "width": "dim",
            "depth": "n_layers",
            "heads": "n_heads",
            "intermediate_size": "hidden_dim",
            "dropout.hidden": "dropout",
            "dropout.attention": "attention_dropout",
            "initial_range": "initializer_range",
            "readout.span_dropout": "qa_dropout",
        },
        activation="activation",
        ignored=frozenset({"sinusoidal_pos_embds", "tie_weights_"}),
        fixed={},
        aliases={
            "hidden_size": "dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
        },
    ),
    dropouts={"labels": ("seq_classif_dropout", 0.2), "choice": ("seq_classif_dropout", 0.2)},
)
