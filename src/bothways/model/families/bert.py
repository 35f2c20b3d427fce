"""BERT in its published sizes; its relatives Megatron-BERT, ERNIE, DistilBERT, ALBERT, ELECTRA.

Source: Devlin et al. 2018, section 3; for the small sizes, Turc et al. 2019. Heads have 64
features and the feed-forward layer has 4H.

Google's code computes GELU by its tanh approximation. The configurations released for transformers
have the exact "gelu", as have these presets; to follow the paper exactly, replace `activation` by
"gelu_tanh". The largest difference between the two functions is 5e-4.

Differences from BERT:

- Megatron-BERT (Shoeybi et al. 2019): pre-norm.
- ERNIE (Sun et al. 2019, 2020, 2021), for Chinese: later versions add a vector for the task of
  pre-training to each token; that of the first task is read when none is named, as in transformers.
  Version 3 has 2048 positions and four segments.
- DistilBERT (Sanh et al. 2019), half of BERT's layers, distilled from all of them: no segments and
  no pooler; heads for whole texts have a dense layer with ReLU of their own on [CLS]; dropout on
  the feed-forward layers, not on attention's output; ε is always 1e-12.
- ALBERT (Lan et al. 2019): embeddings of 128 features with a dense layer to the width; one or
  several groups of layers that share their weights, with one or several blocks per layer; a pair
  head that predicts the order of two segments (SOP), with dropout; no dropout after the
  feed-forward layer.
- ELECTRA (Clark et al. 2020), of which a generator fills masks and a discriminator finds replaced
  tokens, two classes of one family: embeddings may be narrower than the encoder, with a dense layer
  between; no pooler; heads for whole texts have a dense layer with GELU of their own on [CLS].
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bothways.model.config import Dropouts, EncoderConfig, Own, PreNorm, Readout, Sharing
from bothways.model.families.family import (
    FIXED,
    NUMBERS,
    Architecture,
    ConfigRules,
    Family,
    classes,
    masked_rules,
    output_rules,
    position_buffers,
    read_flag,
    read_number,
)
from bothways.model.families.weight_names import KeyTable, Rename, Rule, Stack
from bothways.model.positions import Learned

UNCASED = 30_522
CASED = 28_996
MULTILINGUAL_CASED = 119_547
MULTILINGUAL_UNCASED = 105_879
CHINESE = 21_128


def sized(depth: int, width: int, vocab: int = UNCASED) -> EncoderConfig:
    """Return `depth` layers of `width` features."""
    return EncoderConfig(
        vocab=vocab, width=width, depth=depth, heads=width // 64, intermediate_size=4 * width
    )


# Each takes the size of the vocabulary.
tiny, mini = functools.partial(sized, 2, 128), functools.partial(sized, 4, 256)
small, medium = functools.partial(sized, 4, 512), functools.partial(sized, 8, 512)
base, large = functools.partial(sized, 12, 768), functools.partial(sized, 24, 1024)
_MEGATRON = replace(large(29_056), order=PreNorm())


def _ernie(depth: int, width: int, task_types: int = 16) -> EncoderConfig:
    """Return ERNIE 3 with `depth` layers of `width` features, in 12 heads."""
    return EncoderConfig(
        40_000, width, depth, intermediate_size=4 * width, segments=4, position=Learned(2048),
        norm_epsilon=1e-5, task_types=task_types,
    )  # fmt: skip


_DISTIL_HEAD = Own("relu")


def distilbert(vocab: int = UNCASED) -> EncoderConfig:
    """Return 6 layers of 768."""
    return replace(
        base(vocab), depth=6, segments=0, dropout=Dropouts(places=("embedding", "mlp")),
        readout=Readout(labels=_DISTIL_HEAD, choice=_DISTIL_HEAD, span_dropout=0.1),
    )  # fmt: skip


def albert(depth: int = 12, width: int = 768, heads: int = 12) -> EncoderConfig:
    """Return a size of version 2, which has no dropout; the base has 11,683,584 parameters."""
    return EncoderConfig(
        30_000, width, depth, heads, 4 * width, activation="gelu_tanh", embedding=128,
        dropout=Dropouts(0.0, 0.0, places=("embedding", "attention")),
        sharing=Sharing(), readout=Readout(pair_dropout=0.1),
    )  # fmt: skip


ELECTRA_READOUT = Readout(labels=Own("gelu", dropout_first=True), choice=Own("gelu"), masked="gelu")
"""What the heads of ELECTRA read; a BERT with it is an ELECTRA."""


def electra(depth: int, width: int, embedding: int) -> EncoderConfig:
    """Return a network of ELECTRA; all its embeddings are of one width in a size."""
    narrow = None if embedding == width else embedding
    return replace(sized(depth, width), embedding=narrow, readout=ELECTRA_READOUT)


_DISCRIMINATORS = {
    "electra-small": electra(12, 256, 128),
    "electra-base": electra(12, 768, 768),
    "electra-large": electra(24, 1024, 1024),
}
_GENERATORS = {
    "electra-small-generator": electra(12, 256, 128),
    "electra-base-generator": electra(12, 256, 768),
    "electra-large-generator": electra(24, 256, 1024),
}
PRESETS: dict[str, EncoderConfig] = {
    "bert-tiny": tiny(),
    "bert-mini": mini(),
    "bert-small": small(),
    "bert-medium": medium(),
    "bert-base": base(),
    "bert-large": large(),
    "bert-base-uncased": base(),
    "bert-large-uncased": large(),
    "bert-base-cased": base(CASED),
    "bert-large-cased": large(CASED),
    "bert-base-multilingual-cased": base(MULTILINGUAL_CASED),
    "bert-base-multilingual-uncased": base(MULTILINGUAL_UNCASED),
    "bert-base-chinese": base(CHINESE),
    "megatron-bert-345m": _MEGATRON,
    "ernie-3.0-base-zh": _ernie(12, 768, 3),
    "ernie-3.0-medium-zh": _ernie(6, 768),
    "ernie-3.0-mini-zh": _ernie(6, 384),
    "ernie-3.0-micro-zh": _ernie(4, 384),
    "ernie-3.0-nano-zh": _ernie(4, 312),
    "distilbert-base": distilbert(),
    "distilbert-base-uncased": distilbert(),
    "distilbert-base-cased": distilbert(CASED),
    "distilbert-base-multilingual-cased": distilbert(MULTILINGUAL_CASED),
    "albert-base": albert(),
    "albert-base-v2": albert(),
    "albert-large-v2": albert(24, 1024, 16),
    "albert-xlarge-v2": albert(24, 2048, 16),
    "albert-xxlarge-v2": albert(12, 4096, 64),
    **_DISCRIMINATORS,
    **{f"{name}-discriminator": shape for name, shape in _DISCRIMINATORS.items()},
    **_GENERATORS,
}


def encoder_rules(stem: str) -> tuple[Rule, ...]:
    """Return the names of the encoder's tensors without LayerNorms, in BERT and its descendants."""
    layer = f"{stem}.encoder.layer.{{}}"
    return (
        Rename("encoder.embedding.token", f"{stem}.embeddings.word_embeddings"),
        Rename("encoder.embedding.position", f"{stem}.embeddings.position_embeddings"),
        Rename("encoder.embedding.segment", f"{stem}.embeddings.token_type_embeddings"),
        Stack(
            "encoder.blocks.{}.attention.qkv",
            tuple(f"{layer}.attention.self.{name}" for name in ("query", "key", "value")),
        ),
        Rename("encoder.blocks.{}.attention.out", f"{layer}.attention.output.dense"),
        Rename("encoder.blocks.{}.mlp.up", f"{layer}.intermediate.dense"),
        Rename("encoder.blocks.{}.mlp.down", f"{layer}.output.dense"),
    )


def post_norm_rules(stem: str) -> tuple[Rule, ...]:
    """Return the names of the LayerNorms in post-norm order."""
    layer = f"{stem}.encoder.layer.{{}}"
    return (
        Rename("encoder.embedding.norm", f"{stem}.embeddings.LayerNorm"),
        Rename("encoder.blocks.{}.attention_norm", f"{layer}.attention.output.LayerNorm"),
        Rename("encoder.blocks.{}.mlp_norm", f"{layer}.output.LayerNorm"),
    )


_LM = "cls.predictions"
MASKED_RULES = masked_rules(
    f"{_LM}.transform.dense", f"{_LM}.transform.LayerNorm", f"{_LM}.decoder", f"{_LM}.bias"
)


def common_rules(stem: str) -> tuple[Rule, ...]:
    """Return the names of all tensors but LayerNorms, where all heads are BERT's."""
    return (
        *encoder_rules(stem),
        Rename("heads.pooler.dense", f"{stem}.pooler.dense"),
        Rename("heads.pair.dense", "cls.seq_relationship"),
        *MASKED_RULES,
        *output_rules(),
    )


_PRE_NORM: tuple[Rule, ...] = (
    Rename("encoder.blocks.{}.attention_norm", "bert.encoder.layer.{}.attention.ln"),
    Rename("encoder.blocks.{}.mlp_norm", "bert.encoder.layer.{}.ln"),
    Rename("encoder.norm", "bert.encoder.ln"),
)
_CONSTANT = {"position_embedding_type": "absolute"}
_COMPUTED = position_buffers("bert.embeddings")


def architectures(stem: str) -> tuple[Architecture, ...]:
    """Return BERT's classes, their names beginning with `stem`."""
    pair: frozenset[str] = frozenset({"pooler", "pair"})
    pair_classes = classes(stem, pooled={"labels", "choice"}, pretraining={"masked", *pair})
    return (*pair_classes, Architecture(f"{stem}ForNextSentencePrediction", pair))


BERT = Family(
    model_type="bert",
    keys=KeyTable("bert.", common_rules("bert") + post_norm_rules("bert"), _COMPUTED),
    architectures=architectures("Bert"),
    config_rules=ConfigRules(base(), constant=_CONSTANT),
)
MEGATRON_BERT = Family(
    model_type="megatron-bert",
    keys=KeyTable("bert.", common_rules("bert") + _PRE_NORM, _COMPUTED),
    architectures=architectures("MegatronBert"),
    config_rules=ConfigRules(_MEGATRON, constant=_CONSTANT),
    dropouts={},
)
ERNIE = Family(
    model_type="ernie",
    keys=KeyTable(
        "ernie.",
        (
            *common_rules("ernie"),
            *post_norm_rules("ernie"),
            Rename("encoder.embedding.task", "ernie.embeddings.task_type_embeddings"),
        ),
        position_buffers("ernie.embeddings"),
    ),
    architectures=architectures("Ernie"),
    config_rules=ConfigRules(
        base(),
        read_more=lambda config, raw, location: replace(
            config,
            task_types=read_number(raw, "task_type_vocab_size", 3, location)
            * read_flag(raw, "use_task_id", False, location),
        ),
        write_more=lambda config: {
            "use_task_id": config.task_types > 0,
            "task_type_vocab_size": config.task_types or 3,
        },
    ),
)

_DISTIL_LAYER = "distilbert.transformer.layer.{}"
_DISTIL_RULES: tuple[Rule, ...] = (
    Rename("encoder.embedding.token", "distilbert.embeddings.word_embeddings"),
    Rename("encoder.embedding.position", "distilbert.embeddings.position_embeddings"),
    Rename("encoder.embedding.norm", "distilbert.embeddings.LayerNorm"),
    Stack(
        "encoder.blocks.{}.attention.qkv",
        tuple(f"{_DISTIL_LAYER}.attention.{name}_lin" for name in "qkv"),
    ),
    Rename("encoder.blocks.{}.attention.out", f"{_DISTIL_LAYER}.attention.out_lin"),
    Rename("encoder.blocks.{}.attention_norm", f"{_DISTIL_LAYER}.sa_layer_norm"),
    Rename("encoder.blocks.{}.mlp.up", f"{_DISTIL_LAYER}.ffn.lin1"),
    Rename("encoder.blocks.{}.mlp.down", f"{_DISTIL_LAYER}.ffn.lin2"),
    Rename("encoder.blocks.{}.mlp_norm", f"{_DISTIL_LAYER}.output_layer_norm"),
    *masked_rules("vocab_transform", "vocab_layer_norm", "vocab_projector"),
    *output_rules({"labels.inner": "pre_classifier", "choice.inner": "pre_classifier"}),
)

DISTILBERT = Family(
    model_type="distilbert",
    keys=KeyTable("distilbert.", _DISTIL_RULES, ("distilbert.embeddings.position_ids",)),
    architectures=classes("DistilBert"),
    config_rules=ConfigRules(
        distilbert(),
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

_ALBERT_LAYER = "albert.encoder.albert_layer_groups.{}.albert_layers.{}"
_ALBERT_BLOCK = "encoder.blocks.{}.{}"
_ALBERT_RULES: tuple[Rule, ...] = (
    Rename("encoder.embedding.token", "albert.embeddings.word_embeddings"),
    Rename("encoder.embedding.position", "albert.embeddings.position_embeddings"),
    Rename("encoder.embedding.segment", "albert.embeddings.token_type_embeddings"),
    Rename("encoder.embedding.norm", "albert.embeddings.LayerNorm"),
    Rename("encoder.embedding.project", "albert.encoder.embedding_hidden_mapping_in"),
    Stack(
        f"{_ALBERT_BLOCK}.attention.qkv",
        tuple(f"{_ALBERT_LAYER}.attention.{name}" for name in ("query", "key", "value")),
    ),
    Rename(f"{_ALBERT_BLOCK}.attention.out", f"{_ALBERT_LAYER}.attention.dense"),
    Rename(f"{_ALBERT_BLOCK}.attention_norm", f"{_ALBERT_LAYER}.attention.LayerNorm"),
    Rename(f"{_ALBERT_BLOCK}.mlp.up", f"{_ALBERT_LAYER}.ffn"),
    Rename(f"{_ALBERT_BLOCK}.mlp.down", f"{_ALBERT_LAYER}.ffn_output"),
    Rename(f"{_ALBERT_BLOCK}.mlp_norm", f"{_ALBERT_LAYER}.full_layer_layer_norm"),
    Rename("heads.pooler.dense", "albert.pooler"),
    Rename("heads.pair.dense", "sop_classifier.classifier"),
    *masked_rules(
        "predictions.dense", "predictions.LayerNorm", "predictions.decoder", "predictions.bias"
    ),
    *output_rules(),
)
_ALBERT_DROPOUT = ("classifier_dropout_prob", 0.1)

ALBERT = Family(
    model_type="albert",
    keys=KeyTable("albert.", _ALBERT_RULES, position_buffers("albert.embeddings")),
    architectures=classes(
        "Albert", pooled={"labels", "choice"}, pretraining={"masked", "pooler", "pair"}
    ),
    config_rules=ConfigRules(
        albert(12, 4096, 64),
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
    dropouts={"labels": _ALBERT_DROPOUT, "tags": _ALBERT_DROPOUT, "choice": _ALBERT_DROPOUT},
)


def _read_electra(config: EncoderConfig, raw: Mapping[str, Any], location: str) -> EncoderConfig:
    embedding = read_number(raw, "embedding_size", 128, location)
    return replace(config, embedding=None if embedding == config.width else embedding)


_ELECTRA_RULES: tuple[Rule, ...] = (
    *encoder_rules("electra"),
    *post_norm_rules("electra"),
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
    keys=KeyTable("electra.", _ELECTRA_RULES, position_buffers("electra.embeddings")),
    architectures=classes("Electra", pretraining={"replaced"}),
    config_rules=ConfigRules(
        electra(12, 256, 128),
        numbers=NUMBERS,
        fixed=FIXED
        | {"summary_type": "first", "summary_use_proj": True, "summary_activation": "gelu"},
        read_more=_read_electra,
        write_more=lambda config: {"embedding_size": config.embedding_width},
    ),
    dropouts={
        "labels": ("classifier_dropout", None),
        "tags": ("classifier_dropout", None),
        "choice": ("summary_last_dropout", 0.1),
    },
    otherwise=dict.fromkeys(_GENERATORS, "ElectraForMaskedLM"),
)
