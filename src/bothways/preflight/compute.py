"""Options of a training run's computation that do not change its results, and its peak speed."""

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
    """Set `training.recompute` and `training.compiled` on an encoder.

    Raises:
        ConfigError: compiled is set on a CPU or for an encoder without Transformer blocks.
    """
    encoder.recompute = training.recompute
    blocks = [module for module in encoder.modules() if isinstance(module, Block)]
    if training.compiled and (device.type == "cpu" or not blocks):
        what = (
            "is for the blocks of a Transformer on a GPU, "
            f"not for this {type(encoder).__name__} on {device}"
        )
        raise ConfigError(
            what,
            where="training.compiled",
            fix="Leave it out: on a CPU compiled blocks are no faster.",
        )
    for block in blocks:
        block.compiled = training.compiled


def peak_of(forward: float, training: Training, device: torch.device, plan: Plan) -> Peak:
    """Return the peak that the speed of a run is compared with.

    It holds the operations of a step per token, and the matrix product rate of all ranks.

    Args:
        forward: operations per token of a forward pass (`model.flops.forward_flops`).
    """
    rate = gemm_rate(device, resolve_precision(training.precision, device))
    return Peak((1 + BACKWARD) * forward, rate * plan.world)
