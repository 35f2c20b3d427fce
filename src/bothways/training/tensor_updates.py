"""Updates that depend on a whole matrix: LAMB, StableAdamW and Muon.

Each function does one step of one parameter in place. A parameter may be several matrices of equal
shape stacked in rows, such as queries, keys and values: each is a matrix of its own, as in models
that keep them apart.

    qkv.weight (3·256, 256), parts = 3 → three trust ratios, three orthogonal updates

Arguments of each function:
    group: the settings of the parameter's group: lr, weight_decay, parts, and those of the update.
    gradient: of the same shape, clipped and finite; its memory is used for intermediate results.
    state: of the parameter; filled at the first step.
    keep: 1, or 0 if nothing must change, on the parameter's device: nothing waits for it.

Sources: You et al. 2019 (arXiv 1904.00962) and ALBERT's code for LAMB; Wortsman et al. 2023 (arXiv
2304.13013), algorithm 2, for StableAdamW; Jordan et al. 2024 (kellerjordan.github.io/posts/muon)
for Muon.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

TensorUpdate = Literal["lamb", "stable_adamw", "muon"]
QUINTIC = (3.4445, -4.7750, 2.0315)
"""a, b and c of p(s) = a·s + b·s³ + c·s⁵, which five times in a row takes any s from 0.01 to 1 to
[0.68, 1.14]."""


def lamb(
    group: Mapping[str, Any],
    weight: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    keep: Float[Tensor, ""],
) -> None:
    """Do one step of LAMB without bias correction: u = m/(√v + ε) + λw, w ← w − lr · ‖w‖/‖u‖ · u.

    The trust ratio ‖w‖/‖u‖ is 1 where one of the two is 0. It has no bounds, as in ALBERT's code.
    """
    _add_to_moments(group, gradient, state, keep)
    change = state["exp_avg_sq"].sqrt().add_(group["eps"])
    torch.div(state["exp_avg"], change, out=change).add_(weight, alpha=group["weight_decay"])
    sizes = [_apart(x, group).norm(dim=1) for x in (weight, change)]
    trust = torch.where((sizes[0] > 0) & (sizes[1] > 0), sizes[0] / sizes[1], 1.0)
    _subtract(weight, change, keep * group["lr"] * trust)


def stable_adamw(
    group: Mapping[str, Any],
    weight: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    keep: Float[Tensor, ""],
) -> None:
    """Do one step of AdamW with the rate lr / max(1, RMS), decay included.

    RMS is the root of the mean of g²/max(v̂, ε²) over the matrix: about 1 as long as the second
    moment knows the size of the gradients, more when they have grown suddenly.
    """
    squares = _add_to_moments(group, gradient, state, keep)
    steps = state["step"].clamp(min=1).to(weight.dtype)
    first, second = (-torch.expm1(steps * _log(beta)) for beta in group["betas"])
    change = state["exp_avg_sq"] / second
    rms = _apart(squares.div_(change.clamp(min=group["eps"] ** 2)), group).mean(1).sqrt()
    change.sqrt_().add_(group["eps"])
    torch.div(state["exp_avg"], change, out=change).div_(first)
    change.add_(weight, alpha=group["weight_decay"])
    _subtract(weight, change, keep * group["lr"] / rms.clamp(min=1))


def muon(
    group: Mapping[str, Any],
    weight: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    keep: Float[Tensor, ""],
) -> None:
    """Do one step of Muon, w ← w − lr · (λw + √max(1, rows/columns) · O(g + μ(m − g))).

    m is the average of gradients with the factor μ, g + μ(m − g) its look-ahead by Nesterov, O
    `orthogonalize`. The rate is in units of the spectral norm of a square matrix.
    """
    if not state:
        state |= {"step": keep.new_zeros(()), "exp_avg": torch.zeros_like(weight)}
    momentum = group["momentum"]
    state["step"] += keep
    state["exp_avg"].lerp_(gradient, keep * (1 - momentum))
    ahead = gradient.lerp_(state["exp_avg"], momentum)
    matrices = ahead.reshape(group["parts"], -1, weight.shape[1])
    scale = math.sqrt(max(1.0, matrices.shape[1] / matrices.shape[2]))
    change = orthogonalize(matrices).reshape(weight.shape) * scale
    _subtract(weight, change.add_(weight, alpha=group["weight_decay"]), keep[None] * group["lr"])


def orthogonalize(x: Float[Tensor, "parts rows columns"]) -> Float[Tensor, "parts rows columns"]:
    """Return approximately U Vᵀ of each matrix U S Vᵀ, by five steps of a Newton–Schulz iteration.

    x ← a·x + b·(x xᵀ)x + c·(x xᵀ)²x applies `QUINTIC` to the singular values. Under autocast the
    products are in bf16.
    """
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = QUINTIC
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


UPDATES: Mapping[
    TensorUpdate,
    Callable[[Mapping[str, Any], Tensor, Tensor, dict[str, Tensor], Tensor], None],
] = {"lamb": lamb, "stable_adamw": stable_adamw, "muon": muon}


def _add_to_moments(
    group: Mapping[str, Any], gradient: Tensor, state: dict[str, Tensor], keep: Tensor
) -> Tensor:
    """Add to Adam's moments, m ← β₁m + (1 − β₁)g and v ← β₂v + (1 − β₂)g²; return g²."""
    if not state:
        moments = {name: torch.zeros_like(gradient) for name in ("exp_avg", "exp_avg_sq")}
        state |= {"step": keep.new_zeros(()), **moments}
    first, second = group["betas"]
    state["step"] += keep
    state["exp_avg"].lerp_(gradient, keep * (1 - first))
    squares = gradient.square_()
    state["exp_avg_sq"].lerp_(squares, keep * (1 - second))
    return squares


def _apart(x: Tensor, group: Mapping[str, Any]) -> Float[Tensor, "parts numbers"]:
    """Return a row for each matrix of a parameter."""
    return x.reshape(group["parts"], -1)


def _subtract(weight: Tensor, change: Tensor, rates: Float[Tensor, " parts"]) -> None:
    """Subtract each matrix's change, times its rate."""
    weight.view(len(rates), -1).sub_(change.reshape(len(rates), -1).mul_(rates[:, None]))


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf
