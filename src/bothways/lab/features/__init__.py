"""Tagging on frozen word vectors: the feature-based approach of the paper (table 7)."""
