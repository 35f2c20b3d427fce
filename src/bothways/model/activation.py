"""Activation functions by name."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import assert_never

Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]
"""GELU (Hendrycks & Gimpel 2016), exact or approximated as Google does, ReLU, and SiLU."""


def activate(name: Activation | Literal["tanh"], x: Tensor) -> Tensor:
    """Apply an activation; "gelu" is x·Φ(x), "gelu_tanh" Hendrycks and Gimpel's approximation."""
    match name:
        case "tanh":
            return torch.tanh(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu":
            return F.relu(x)
        case "silu":
            return F.silu(x)
        case _:
            assert_never(name)
