"""Activations by name, as configurations say them."""

from __future__ import annotations

from typing import Literal

Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]
"""GELU (Hendrycks & Gimpel 2016), exact or as Google approximates it, ReLU, and SiLU."""
