"""Comparison of speed with transformers on this machine."""
