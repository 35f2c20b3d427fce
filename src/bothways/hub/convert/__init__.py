"""Conversions: checkpoints of TensorFlow to model folders, and other vocabularies."""
