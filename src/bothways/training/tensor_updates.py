"""Updates that depend on a whole matrix: LAMB, StableAdamW and Muon.

Each function does one step of several parameters in place. A parameter may be several matrices of
equal shape stacked in rows, such as queries, keys and values: each is a matrix of its own, as in
models that keep them apart.

    qkv.weight (3·256, 256), parts = 3 → three trust ratios, three orthogonal updates

Of a parameter that ranks share, each updates its rows (`matrix_rows`).

Sources: You et al. 2019 (arXiv 1904.00962) and ALBERT's code for LAMB; Wortsman et al. 2023 (arXiv
2304.13013), algorithm 2, for StableAdamW; Jordan et al. 2024 (kellerjordan.github.io/posts/muon)
for Muon.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from bothways.training.matrix_rows import OwnRows, from_whole, over_ranks

TensorUpdate = Literal["lamb", "stable_adamw", "muon"]
QUINTIC = (3.4445, -4.7750, 2.0315)
"""a, b and c of p(s) = a·s + b·s³ + c·s⁵, which five times in a row takes any s from 0.01 to 1 to
[0.68, 1.14]."""


def lamb(parameters: Sequence[OwnRows]) -> None:
    """Do one step of LAMB without bias correction: u = m/(√v + ε) + λw, w ← w − lr · ‖w‖/‖u‖ · u.

    The trust ratio ‖w‖/‖u‖ is 1 where one of the two is 0. It has no bounds, as in ALBERT's code.
    """
    sums: list[Tensor] = []
    for parameter in parameters:
        average, squares = _add_to_moments(parameter)
        change, decay = parameter.gradient, parameter.group["weight_decay"]
        torch.sqrt(squares, out=change).add_(parameter.group["eps"])
        torch.div(average, change, out=change).add_(parameter.weight, alpha=decay)
        for x in (parameter.weight, change):  # squares whose root is `norm` to the bit
            norms = [matrix.norm() for matrix in parameter.apart(x)]
            sums.append(torch.stack(norms).square())
    sizes = [total.sqrt() for total in over_ranks(parameters, sums)]
    for parameter, weight, change in zip(parameters, sizes[::2], sizes[1::2], strict=True):
        trust = torch.where((weight > 0) & (change > 0), weight / change, 1.0)
        parameter.subtract(parameter.gradient, parameter.keep * parameter.group["lr"] * trust)


def stable_adamw(parameters: Sequence[OwnRows]) -> None:
    """Do one step of AdamW with the rate lr / max(1, RMS), decay included.

    RMS is the root of the mean of g²/max(v̂, ε²) over the matrix: about 1 as long as the second
    moment knows the size of the gradients, more when they have grown suddenly.
    """
    sums: list[Tensor] = []
    for parameter in parameters:
        average, squares = _add_to_moments(parameter)
        steps = parameter.state["step"].clamp(min=1).to(parameter.weight.dtype)
        correction1, correction2 = (  # 1 − βᵗ
            -torch.expm1(steps * (math.log(beta) if beta else -math.inf))
            for beta in parameter.group["betas"]
        )
        ratio, eps, root = parameter.gradient, parameter.group["eps"], squares / correction2
        ratio.div_(root.clamp(min=eps**2))
        sums.append(torch.stack([ratios.sum() for ratios in parameter.apart(ratio)]))
        root.sqrt_().add_(eps)
        torch.div(average, root, out=ratio).div_(correction1).add_(
            parameter.weight, alpha=parameter.group["weight_decay"]
        )
    for parameter, total in zip(parameters, over_ranks(parameters, sums), strict=True):
        rms = (total / math.prod(parameter.shape[1:])).sqrt()
        parameter.subtract(
            parameter.gradient, parameter.keep * parameter.group["lr"] / rms.clamp(min=1)
        )


def muon(parameters: Sequence[OwnRows]) -> None:
    """Do one step of Muon, w ← w − lr · (λw + √max(1, rows/columns) · O(g + μ(m − g))).

    m is the average of gradients with the factor μ, g + μ(m − g) its look-ahead by Nesterov, O
    `orthogonalize`. The rate is in units of the spectral norm of a square matrix.
    """
    for parameter in parameters:
        parameter.count_step()
        momentum, average = parameter.group["momentum"], parameter.moment("exp_avg")
        average.lerp_(parameter.gradient, parameter.keep * (1 - momentum))
        parameter.gradient.lerp_(average, momentum)  # the look-ahead
    for parameter, orthogonal in from_whole(parameters, orthogonalize, _cost):
        count, rows, columns = parameter.shape
        change = orthogonal * math.sqrt(max(1.0, rows / columns))
        change.add_(parameter.weight, alpha=parameter.group["weight_decay"])
        parameter.subtract(change, (parameter.keep * parameter.group["lr"]).expand(count))


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


UPDATES: Mapping[TensorUpdate, Callable[[Sequence[OwnRows]], None]] = MappingProxyType(
    {"lamb": lamb, "stable_adamw": stable_adamw, "muon": muon}
)


def _cost(parameter: OwnRows) -> float:
    """Return the cost of `orthogonalize`, up to a factor."""
    count, rows, columns = parameter.shape
    return float(count * rows * columns * min(rows, columns))


def _add_to_moments(parameter: OwnRows) -> tuple[Tensor, Tensor]:
    """Add to Adam's moments, m ← β₁m + (1 − β₁)g and v ← β₂v + (1 − β₂)g², and return them.

    The gradient is squared.
    """
    parameter.count_step()
    beta1, beta2 = parameter.group["betas"]
    average, squares = (parameter.moment(name) for name in ("exp_avg", "exp_avg_sq"))
    average.lerp_(parameter.gradient, parameter.keep * (1 - beta1))
    squares.lerp_(parameter.gradient.square_(), parameter.keep * (1 - beta2))
    return average, squares
