"""The memory of an optimizer, counted from the optimizer itself."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bothways.training import optimizers


class MomentBytes(NamedTuple):
    """Bytes that an optimizer keeps per parameter, in fp32.

    Attributes:
        hidden: of the matrices that a learner declares (`TrainingModule.matrices`).
        others: of tables, heads, biases and LayerNorms.
    """

    hidden: int
    others: int


def moment_bytes(config: optimizers.OptimizerConfig | optimizers.OptimizerFactory) -> MomentBytes:
    """Return what an optimizer keeps, found by one update of a small matrix of each kind.

    Values that an optimizer has once for a row or a parameter, such as its step, are not counted.

    Raises:
        ConfigError: a function makes no suitable optimizer.
    """
    match config:
        case (
            optimizers.AdamW()
            | optimizers.BertAdam()
            | optimizers.Lamb()
            | optimizers.StableAdamW()
            | optimizers.Muon()
        ):
            config = dataclasses.replace(config, lr=1.0)  # "auto" until the run begins
        case _:
            pass
    parameters = {name: nn.Parameter(torch.ones(2, 3)) for name in MomentBytes._fields}
    optimizer = optimizers.build_optimizer(config, parameters.items(), matrices={"hidden": 1})
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizers.update(optimizer, None)
    return MomentBytes(*(_kept(optimizer, parameter) for parameter in parameters.values()))


def _kept(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> int:
    state = optimizer.state.get(parameter, {}).values()
    kept = [each for each in state if isinstance(each, Tensor) and each.shape == parameter.shape]
    return sum(each.nbytes for each in kept) // parameter.numel()
