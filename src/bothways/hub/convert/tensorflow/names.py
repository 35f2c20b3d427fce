"""Names in Google's checkpoints: TensorFlow's variable → transformers' tensor.

google-research/bert, google-research/albert and google-research/electra name the matrix of a dense
layer `kernel` (stored transposed), the vectors of a LayerNorm `gamma` and `beta`, and the layers
`layer_0`, `layer_1`, …. Embedding tables and the outputs of a head are not transposed. Most paths
are those of transformers, with slashes for dots; a family lists the others.

    bert/encoder/layer_3/output/dense/kernel → bert.encoder.layer.3.output.dense.weight
"""

from __future__ import annotations

import re

from bothways.model.families.weight_names import KeyTable, Rename, TensorPlacement, Transpose

Paths = tuple[tuple[str, str], ...]
"""Expressions in a path and their replacements, applied in order."""

_LEAVES = {
    "kernel": "weight", "bias": "bias", "gamma": "weight", "beta": "bias",
    "output_weights": "weight", "output_bias": "bias",
}  # fmt: skip
_TABLES = ("word_embeddings", "position_embeddings", "token_type_embeddings")

_LAYERS = (r"/layer_(\d+)/", r"/layer/\1/")
_HEAD = (r"^(?=output_\w+$)", "classifier/")
BERT: Paths = (_LAYERS, (r"^cls/squad/", "qa_outputs/"), _HEAD)
ALBERT: Paths = (
    (r"^bert/encoder/transformer/group_(\d+)/inner_group_(\d+)/",
     r"albert/encoder/albert_layer_groups/\1/albert_layers/\2/"),
    (r"^bert/", "albert/"),
    (r"/attention_1/(self|output(?=/dense))/", "/attention/"),
    (r"(/albert_layers/\d+)/LayerNorm/", r"\1/attention/LayerNorm/"),
    (r"/LayerNorm_1/", "/full_layer_layer_norm/"),
    (r"/ffn_1/intermediate/output/dense/", "/ffn_output/"),
    (r"/ffn_1/intermediate/dense/", "/ffn/"),
    (r"/pooler/dense/", "/pooler/"),
    (r"^cls/predictions/(transform/)?", "predictions/"),
    (r"^cls/seq_relationship/", "sop_classifier/classifier/"),
    _HEAD,
)  # fmt: skip
# Variables of the other of ELECTRA's two models get an empty name.
DISCRIMINATOR: Paths = (
    _LAYERS,
    (r"^(?!electra/|discriminator_predictions/).*", ""),
    (r"/dense_1/", "/dense_prediction/"),
)
_GENERATOR: Paths = (
    _LAYERS,
    (r"^generator/", "electra/"),
    (r"^generator_predictions/output_bias$", "generator_lm_head/bias"),
)
GENERATOR: Paths = ((r"^(?!electra/embeddings/|generator).*", ""), *_GENERATOR)
"""The generator shares the discriminator's embeddings (Clark et al. 2020, section 3.2)."""
UNTIED_GENERATOR: Paths = ((r"^(?!generator).*", ""), *_GENERATOR)
"""A generator with its own embeddings, an option of Google's code."""


def place(paths: Paths, table: KeyTable, variable: str) -> tuple[str, TensorPlacement] | None:
    """Return the name of a variable in transformers, and its place in TensorFlow's file.

    None for what is no part of a model of the family `table`.
    """
    path = variable
    for expression, replacement in paths:
        path = re.sub(expression, replacement, path)
    owner, _, leaf = path.rpartition("/")
    if leaf in _TABLES:
        owner, leaf = path, "kernel"
    name = f"{owner}.{_LEAVES.get(leaf, '')}".replace("/", ".")
    if leaf not in _LEAVES or not table.origins(name):
        return None
    turned = leaf == "kernel" and not path.endswith(_TABLES)
    rule = Transpose(name, variable) if turned else Rename(name, variable)
    return name, TensorPlacement(rule, (variable,))
