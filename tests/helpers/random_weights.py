"""Random changes of the parameters of models."""

from typing import TypeVar

import torch
from torch import nn

ModuleT = TypeVar("ModuleT", bound=nn.Module)


@torch.no_grad()
def perturb(module: ModuleT, scale: float) -> ModuleT:
    """Add noise to every parameter, so that none has its initial value, and return the module."""
    for parameter in module.parameters():
        parameter.add_(torch.randn_like(parameter) * scale)
    return module
