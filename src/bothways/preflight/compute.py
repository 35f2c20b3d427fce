"""How the encoder of a training run is computed, which changes none of its updates, and how fast that could be."""

from __future__ import annotations

import torch

from bothways.core.errors import ConfigError
from bothways.model.block import Block
from bothways.model.flops import BACKWARD
from bothways.model.lstm import AnyEncoder
from bothways.runtime.devices import gemm_rate, resolve_precision
from bothways.training.parallel import Plan
from bothways.training.run import Training
from bothways.training.trackers import Peak


def compute_as(encoder: AnyEncoder, training: Training, device: torch.device) -> None:
    """Hand an encoder what `training.recompute` and `training.compiled` say.

    Raises:
        ConfigError: compiled, on a CPU or without blocks that could be.
    """
    encoder.recompute = training.recompute
    blocks = [module for module in encoder.modules() if isinstance(module, Block)]
    if training.compiled and (device.type == "cpu" or not blocks):
        what = f"is for the blocks of a Transformer on a GPU, not for this {type(encoder).__name__} on {device}"
        raise ConfigError(
            what,
            where="training.compiled",
            fix="Leave it out: on a CPU compiled blocks are no faster.",
        )
    for block in blocks:
        block.compiled = training.compiled


def peak_of(forward: float, training: Training, device: torch.device, plan: Plan) -> Peak:
    """What the speed of a run is compared with: operations of a step per token, and those of matrix products on all ranks.

    Args:
        forward: operations per token of a forward pass (`model.operations.forward_flops`).
    """
    rate = gemm_rate(device, resolve_precision(training.precision, device))
    return Peak((1 + BACKWARD) * forward, rate * plan.world)
