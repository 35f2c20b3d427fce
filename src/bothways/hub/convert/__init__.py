"""Conversions: checkpoints of TensorFlow to model folders, and other vocabularies."""

from typing import Literal

ModelPart = Literal["discriminator", "generator"]
"""The two models in an ELECTRA checkpoint."""
