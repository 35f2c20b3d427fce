"""AdamW and BERT's own Adam, with global-norm clipping, on torch's fused kernel.

BERT's optimiser (Devlin et al. 2018) is Adam with decoupled decay and without bias correction. The corrections are 1 − βᵗ:
with t set to a number so large that βᵗ is 0 they are exactly 1, so the fused kernel of AdamW computes BERT's Adam as it is.

Clipping and the check for gradients that are not finite ride in the same kernel: it divides by `grad_scale` and changes nothing
where `found_inf` is 1. So neither costs a pass over the gradients, nothing waits for the device, and no such gradient reaches
the weights.

Sources: Kingma & Ba 2014; Loshchilov & Hutter, Decoupled weight decay regularization (2017); Zhang et al. 2020 on what the
missing correction does to fine-tuning.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import assert_never

from bothways.core.errors import ConfigError

# 0.9999999 to this power is 0 in float32, and adding 1 to it in float32 leaves it as it is.
_ENDLESS = 1e9


@dataclass(frozen=True)
class AdamW:
    """Adam with bias correction and decoupled decay. `lr` is the peak of the schedule; 1-d parameters are not decayed."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decay: float = 0.01
    kind: Literal["adamw"] = "adamw"

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True)
class BertAdam:
    """The optimiser of BERT's own code: as AdamW, without bias correction, so that early steps are larger."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    decay: float = 0.01
    kind: Literal["bert_adam"] = "bert_adam"

    def __post_init__(self) -> None:
        _check(self)


Optimiser = AdamW | BertAdam


class FusedAdamW(torch.optim.AdamW):
    """torch's AdamW on its fused kernel, with the two scalars on the device that the kernel reads if they are set."""

    grad_scale: Tensor | None
    found_inf: Tensor


def _check(config: Optimiser) -> None:
    for name in ("lr", "eps"):
        if not getattr(config, name) > 0:
            raise ConfigError(f"{getattr(config, name)} is too small: it must be above 0", where=f"optimiser.{name}")
    if not all(0 <= beta < 1 for beta in config.betas):
        raise ConfigError(f"{config.betas} are no betas: both must be at least 0 and below 1", where="optimiser.betas")
    if not config.decay >= 0:
        raise ConfigError(f"{config.decay} is no weight decay: it must be at least 0", where="optimiser.decay")


def groups(parameters: Iterable[tuple[str, nn.Parameter]], config: Optimiser) -> list[dict[str, Any]]:
    """Named parameters → groups of one rate and one decay, with the rate's peak; those that need no gradient are left out.

    Matrices and embedding tables decay; biases and norms, which are of one dimension, do not.

    Raises:
        ConfigError: no parameter needs a gradient.
    """
    trained = [parameter for _, parameter in parameters if parameter.requires_grad]
    if not trained:
        raise ConfigError("the model has no parameter to train", fix="Unfreeze some part of it.")
    decayed = [parameter for parameter in trained if parameter.ndim >= 2]
    others = [parameter for parameter in trained if parameter.ndim < 2]
    return [
        {"params": members, "lr": config.lr, "peak": config.lr, "weight_decay": decay}
        for members, decay in ((decayed, config.decay), (others, 0.0))
        if members
    ]


def build(config: Optimiser, parameters: Iterable[tuple[str, nn.Parameter]]) -> FusedAdamW:
    """The optimiser over a model's `named_parameters()`, as torch knows it: its state can be saved and restored."""
    optimiser = FusedAdamW(groups(parameters, config), betas=config.betas, eps=config.eps, fused=True)
    match config:
        case AdamW():
            pass
        case BertAdam():
            _leave_uncorrected(optimiser)
        case _:
            assert_never(config)
    return optimiser


def _leave_uncorrected(optimiser: FusedAdamW) -> None:
    for group in optimiser.param_groups:
        for parameter in group["params"]:
            optimiser.state[parameter] = {
                "step": torch.tensor(_ENDLESS, dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def set_rate(optimiser: FusedAdamW, factor: float) -> float:
    """Set each group's rate to this multiple of its peak; the highest of them."""
    for group in optimiser.param_groups:
        group["lr"] = group["peak"] * factor
    rates: list[float] = [group["lr"] for group in optimiser.param_groups]
    return max(rates)


@torch.no_grad()
def update(optimiser: FusedAdamW, clip_norm: float | None) -> Float[Tensor, ""]:
    """Scale the gradients down to this global norm if theirs is higher, change the weights, forget the gradients.

    Where the norm is not finite, weights and state stay as they are: the caller is to look at it and stop.

    Returns:
        The norm before clipping, on the device; nothing waits for it.
    """
    gradients = [p.grad for group in optimiser.param_groups for p in group["params"] if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    optimiser.grad_scale = None if clip_norm is None else (norm / clip_norm).clamp(min=1).float()
    optimiser.found_inf = norm.isfinite().logical_not().float()
    optimiser.step()
    optimiser.zero_grad()
    return norm
