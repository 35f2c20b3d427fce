"""AdamW and BERT's own Adam, with global-norm clipping, on torch's fused kernel.

BERT's optimizer (Devlin et al. 2018) is Adam with decoupled decay and without bias correction. The corrections are 1 − βᵗ:
with t set to a number so large that βᵗ is 0 they are exactly 1, so the fused kernel of AdamW computes BERT's Adam as it is.

Clipping and the check for gradients that are not finite ride in the same kernel: it divides by `grad_scale` and changes nothing
where `found_inf` is 1. So neither costs a pass over the gradients, nothing waits for the device, and no such gradient reaches
the weights.

A `Rule` per parameter makes its rate smaller, or pulls it toward the value that it starts from. The pull is decoupled as the
decay is: before each update w ← w − rate · pull · (w − w₀), so that Adam does not rescale it.

Sources: Kingma & Ba 2014; Loshchilov & Hutter, Decoupled weight decay regularization (2017); Zhang et al. 2020 on what the
missing correction does to fine-tuning; Li et al. 2018 (L2-SP) for the pull, there a term of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import assert_never

from bothways.core.errors import ConfigError
from bothways.training.sparse_adamw import update_rows

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
    """The optimizer of BERT's own code: as AdamW, without bias correction, so that early steps are larger."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    decay: float = 0.01
    kind: Literal["bert_adam"] = "bert_adam"

    def __post_init__(self) -> None:
        _check(self)


OptimizerConfig = AdamW | BertAdam


@dataclass(frozen=True)
class ParameterRule:
    """What holds for one parameter alone.

    Attributes:
        factor: its rate as a multiple of the run's.
        pull: toward the value that it has when the optimizer is built, per unit of rate.
    """

    factor: float = 1.0
    pull: float = 0.0


ParameterRules = Callable[[str], ParameterRule]
"""A parameter's name → what holds for it."""


def same_for_all(name: str) -> ParameterRule:
    """The same for all: the run's rate and no pull."""
    return ParameterRule()


class FusedAdamW(torch.optim.AdamW):
    """torch's AdamW on its fused kernel, with the two scalars on the device that the kernel reads if they are set.

    Attributes:
        anchors: what the pulled parameters are pulled to. No part of the state: a resumed run builds it from the same start.
        seen: of each parameter with a sparse gradient, the rows that have had one. No part of the state: its moments tell.
    """

    grad_scale: Tensor | None
    found_inf: Tensor
    anchors: dict[nn.Parameter, Tensor]
    seen: dict[nn.Parameter, Tensor]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; the rows seen are forgotten."""
        super().load_state_dict(state_dict)
        self.seen = {}


def _check(config: OptimizerConfig) -> None:
    for name in ("lr", "eps"):
        if not getattr(config, name) > 0:
            raise ConfigError(
                f"{getattr(config, name)} is too small: it must be above 0",
                where=f"optimizer.{name}",
            )
    if not all(0 <= beta < 1 for beta in config.betas):
        raise ConfigError(
            f"{config.betas} are no betas: both must be at least 0 and below 1",
            where="optimizer.betas",
        )
    if not config.decay >= 0:
        raise ConfigError(
            f"{config.decay} is no weight decay: it must be at least 0", where="optimizer.decay"
        )


def groups(
    parameters: Iterable[tuple[str, nn.Parameter]],
    config: OptimizerConfig,
    rules: ParameterRules = same_for_all,
) -> list[dict[str, Any]]:
    """Named parameters → groups of one rule and one decay, with the rate's peak; those that need no gradient are left out.

    Matrices and embedding tables decay; biases and norms, which are of one dimension, do not.

    Raises:
        ConfigError: no parameter needs a gradient.
    """
    trained = [
        (rules(name), parameter) for name, parameter in parameters if parameter.requires_grad
    ]
    if not trained:
        raise ConfigError("the model has no parameter to train", fix="Unfreeze some part of it.")
    result = []
    for rule in dict.fromkeys(rule for rule, _ in trained):
        members = [parameter for its, parameter in trained if its == rule]
        decayed = [parameter for parameter in members if parameter.ndim >= 2]
        others = [parameter for parameter in members if parameter.ndim < 2]
        peak = config.lr * rule.factor
        result += [
            {"params": some, "lr": peak, "peak": peak, "weight_decay": decay, "pull": rule.pull}
            for some, decay in ((decayed, config.decay), (others, 0.0))
            if some
        ]
    return result


def build_optimizer(
    config: OptimizerConfig,
    parameters: Iterable[tuple[str, nn.Parameter]],
    rules: ParameterRules = same_for_all,
) -> FusedAdamW:
    """The optimizer over a model's `named_parameters()`, as torch knows it: its state can be saved and restored.

    It is built while the parameters have the values that `rules` pulls them to: before a checkpoint is restored.
    """
    optimizer = FusedAdamW(
        groups(parameters, config, rules), betas=config.betas, eps=config.eps, fused=True
    )
    pulled = [
        parameter
        for group in optimizer.param_groups
        if group["pull"]
        for parameter in group["params"]
    ]
    optimizer.anchors = {parameter: parameter.detach().clone() for parameter in pulled}
    optimizer.seen = {}
    match config:
        case AdamW():
            pass
        case BertAdam():
            _leave_uncorrected(optimizer)
        case _:
            assert_never(config)
    return optimizer


def _leave_uncorrected(optimizer: FusedAdamW) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = _start(parameter, _ENDLESS)


def _start(parameter: nn.Parameter, step: float) -> dict[str, Tensor]:
    """What the fused kernel knows of a parameter at first."""
    return {
        "step": torch.tensor(step, dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def set_rate(optimizer: FusedAdamW, factor: float) -> float:
    """Set each group's rate to this multiple of its peak; the highest of them."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * factor
    rates: list[float] = [group["lr"] for group in optimizer.param_groups]
    return max(rates)


@torch.no_grad()
def update(optimizer: FusedAdamW, clip_norm: float | None) -> Float[Tensor, ""]:
    """Scale the gradients down to this global norm if theirs is higher, change the weights, forget the gradients.

    Where the norm is not finite, weights and state stay as they are: the caller is to look at it and stop.

    Returns:
        The norm before clipping, on the device; nothing waits for it.
    """
    norm = nn.utils.get_total_norm(
        [
            _values(p)
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
    )
    optimizer.grad_scale = None if clip_norm is None else (norm / clip_norm).clamp(min=1).float()
    optimizer.found_inf = norm.isfinite().logical_not().float()
    _pull(optimizer)
    _step_rows(optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def _values(parameter: nn.Parameter) -> Tensor:
    """The numbers of its gradient; a sparse one is made to have each row once."""
    assert parameter.grad is not None
    if not parameter.grad.is_sparse:
        return parameter.grad
    parameter.grad = parameter.grad.coalesce()
    return parameter.grad.values()


def _step_rows(optimizer: FusedAdamW) -> None:
    """The step of the parameters with sparse gradients, which then have none."""
    for group in optimizer.param_groups:
        for weight in (p for p in group["params"] if p.grad is not None):
            if not weight.grad.is_sparse:
                optimizer.seen.pop(weight, None)
                continue
            state = optimizer.state[weight] = optimizer.state[weight] or _start(weight, 0.0)
            if weight not in optimizer.seen:
                optimizer.seen[weight] = (
                    state["exp_avg"].any(1) | state["exp_avg_sq"].any(1)
                ).nonzero()[:, 0]
            seen, scale, skip = optimizer.seen[weight], optimizer.grad_scale, optimizer.found_inf
            optimizer.seen[weight] = update_rows(group, weight, state, seen, scale, skip)
            weight.grad = None


def _pull(optimizer: FusedAdamW) -> None:
    """w ← w − rate · pull · (w − w₀) where that is asked for, and nowhere in a step whose gradient is not finite."""
    for group in optimizer.param_groups:
        if group["pull"]:
            weights = group["params"]
            ways = torch._foreach_sub([optimizer.anchors[weight] for weight in weights], weights)
            torch._foreach_mul_(ways, (1 - optimizer.found_inf) * (group["lr"] * group["pull"]))
            torch._foreach_add_(weights, ways)
