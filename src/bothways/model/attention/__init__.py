"""Attention: who attends to whom, and which kernel computes it."""
