"""How the encoder of a training run is computed, which changes none of its updates."""

from __future__ import annotations

import torch

from bothways.core.errors import ConfigError
from bothways.model.block import Block
from bothways.model.recurrentencoder import AnyEncoder
from bothways.training.run import Training


def compute_as(encoder: AnyEncoder, training: Training, device: torch.device) -> None:
    """Hand an encoder what `training.recompute` and `training.compiled` say.

    Raises:
        ConfigError: compiled, on a CPU or without blocks that could be.
    """
    encoder.recompute = training.recompute
    blocks = [module for module in encoder.modules() if isinstance(module, Block)]
    if training.compiled and (device.type == "cpu" or not blocks):
        what = f"is for the blocks of a Transformer on a GPU, not for this {type(encoder).__name__} on {device}"
        raise ConfigError(what, where="training.compiled", fix="Leave it out: on a CPU compiled blocks are no faster.")
    for block in blocks:
        block.compiled = training.compiled
