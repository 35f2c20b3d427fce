"""The LayerNorm of a configuration (Ba et al. 2016)."""

from __future__ import annotations

from torch import nn

from bothways.model.lstm_config import ModelConfig


def layer_norm(config: ModelConfig, width: int | None = None) -> nn.LayerNorm:
    """Over `width` features, or as many as the encoder has; without a bias where the configuration says so."""
    return nn.LayerNorm(width or config.width, config.norm_epsilon, bias=config.bias.norm)
