"""Rules for names in Google's checkpoints: TensorFlow's variable ↔ transformers' tensor.

google-research/bert, google-research/albert and google-research/electra name the matrix of a dense
layer `kernel` (stored transposed), the vectors of a LayerNorm `gamma` and `beta`, and the layers
`layer_0`, `layer_1`, …. Embedding tables and the outputs of a head are not transposed. In a rule,
`{}` matches a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from bothways.model.families.weight_names import Rename, Transpose

NameRule = Rename | Transpose
"""Here `name` is transformers' name and `stored` is TensorFlow's."""


def find_rule(rules: Iterable[NameRule], variable: str) -> tuple[NameRule, str] | None:
    """Return the rule for a variable and its name in transformers; None if there is no rule."""
    for rule in rules:
        match = re.fullmatch(re.escape(rule.stored).replace(r"\{\}", "([0-9]+)"), variable)
        if match is not None:
            return rule, rule.name.format(*match.groups())
    return None


def _dense(variable: str, name: str) -> tuple[NameRule, ...]:
    return (
        Transpose(f"{name}.weight", f"{variable}/kernel"),
        Rename(f"{name}.bias", f"{variable}/bias"),
    )


def _norm(variable: str, name: str) -> tuple[NameRule, ...]:
    return (
        Rename(f"{name}.weight", f"{variable}/gamma"),
        Rename(f"{name}.bias", f"{variable}/beta"),
    )


def _outputs(variable: str, name: str) -> tuple[NameRule, ...]:
    """Return the rules of a head's last layer, whose matrix is not transposed."""
    return (
        Rename(f"{name}.weight", f"{variable}output_weights"),
        Rename(f"{name}.bias", f"{variable}output_bias"),
    )


def _embeddings(variable: str, stem: str) -> tuple[NameRule, ...]:
    tables = ("word_embeddings", "position_embeddings", "token_type_embeddings")
    return (
        *(
            Rename(f"{stem}.embeddings.{name}.weight", f"{variable}/embeddings/{name}")
            for name in tables
        ),
        *_norm(f"{variable}/embeddings/LayerNorm", f"{stem}.embeddings.LayerNorm"),
    )


def _attention(variable: str, stem: str) -> tuple[NameRule, ...]:
    return tuple(
        rule
        for name in ("query", "key", "value")
        for rule in _dense(f"{variable}/self/{name}", f"{stem}.{name}")
    )


def _layers(variable: str, name: str) -> tuple[NameRule, ...]:
    layer, stem = f"{variable}/encoder/layer_{{}}", f"{name}.encoder.layer.{{}}"
    return (
        *_attention(f"{layer}/attention", f"{stem}.attention.self"),
        *_dense(f"{layer}/attention/output/dense", f"{stem}.attention.output.dense"),
        *_norm(f"{layer}/attention/output/LayerNorm", f"{stem}.attention.output.LayerNorm"),
        *_dense(f"{layer}/intermediate/dense", f"{stem}.intermediate.dense"),
        *_dense(f"{layer}/output/dense", f"{stem}.output.dense"),
        *_norm(f"{layer}/output/LayerNorm", f"{stem}.output.LayerNorm"),
    )


BERT: tuple[NameRule, ...] = (
    *_embeddings("bert", "bert"),
    *_layers("bert", "bert"),
    *_dense("bert/pooler/dense", "bert.pooler.dense"),
    *_dense("cls/predictions/transform/dense", "cls.predictions.transform.dense"),
    *_norm("cls/predictions/transform/LayerNorm", "cls.predictions.transform.LayerNorm"),
    Rename("cls.predictions.bias", "cls/predictions/output_bias"),
    *_outputs("cls/seq_relationship/", "cls.seq_relationship"),
    *_outputs("cls/squad/", "qa_outputs"),
    *_outputs("", "classifier"),
)

_GROUP = "bert/encoder/transformer/group_{}/inner_group_{}"
_SHARED = "albert.encoder.albert_layer_groups.{}.albert_layers.{}"
ALBERT: tuple[NameRule, ...] = (
    *_embeddings("bert", "albert"),
    *_dense(
        "bert/encoder/embedding_hidden_mapping_in", "albert.encoder.embedding_hidden_mapping_in"
    ),
    *_attention(f"{_GROUP}/attention_1", f"{_SHARED}.attention"),
    *_dense(f"{_GROUP}/attention_1/output/dense", f"{_SHARED}.attention.dense"),
    *_norm(f"{_GROUP}/LayerNorm", f"{_SHARED}.attention.LayerNorm"),
    *_dense(f"{_GROUP}/ffn_1/intermediate/dense", f"{_SHARED}.ffn"),
    *_dense(f"{_GROUP}/ffn_1/intermediate/output/dense", f"{_SHARED}.ffn_output"),
    *_norm(f"{_GROUP}/LayerNorm_1", f"{_SHARED}.full_layer_layer_norm"),
    *_dense("bert/pooler/dense", "albert.pooler"),
    *_dense("cls/predictions/transform/dense", "predictions.dense"),
    *_norm("cls/predictions/transform/LayerNorm", "predictions.LayerNorm"),
    Rename("predictions.bias", "cls/predictions/output_bias"),
    *_outputs("cls/seq_relationship/", "sop_classifier.classifier"),
    *_outputs("", "classifier"),
)

DISCRIMINATOR: tuple[NameRule, ...] = (
    *_embeddings("electra", "electra"),
    *_dense("electra/embeddings_project", "electra.embeddings_project"),
    *_layers("electra", "electra"),
    *_dense("discriminator_predictions/dense", "discriminator_predictions.dense"),
    *_dense("discriminator_predictions/dense_1", "discriminator_predictions.dense_prediction"),
)
_GENERATOR: tuple[NameRule, ...] = (
    *_dense("generator/embeddings_project", "electra.embeddings_project"),
    *_layers("generator", "electra"),
    *_dense("generator_predictions/dense", "generator_predictions.dense"),
    *_norm("generator_predictions/LayerNorm", "generator_predictions.LayerNorm"),
    Rename("generator_lm_head.bias", "generator_predictions/output_bias"),
)
GENERATOR = (*_embeddings("electra", "electra"), *_GENERATOR)
"""The generator shares the discriminator's embeddings (Clark et al. 2020, section 3.2)."""
UNTIED_GENERATOR = (*_embeddings("generator", "electra"), *_GENERATOR)
"""A generator with its own embeddings, an option of Google's code."""
