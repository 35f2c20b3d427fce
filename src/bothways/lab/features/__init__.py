"""Tagging on frozen word vectors: the feature-based approach of the paper (table 7)."""

from typing import Literal

LayerChoice = Literal[
    "embeddings", "second_to_last", "last", "weighted_last_four", "concat_last_four", "weighted_all"
]  # fmt: skip
"""Layers that are a word's features, as in table 7; here for commands that load no torch."""
