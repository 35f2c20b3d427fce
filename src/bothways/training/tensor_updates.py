"""Updates that depend on a whole matrix: LAMB, StableAdamW and Muon.

Each function does one step of a parameter in place. A parameter may be several matrices of
equal shape stacked in rows, such as queries, keys and values: each is a matrix of its own, as in
models that keep them apart.

    qkv.weight (3·256, 256), parts = 3 → three trust ratios, three orthogonal updates

Sources: You et al. 2019 (arXiv 1904.00962) and ALBERT's code for LAMB; Wortsman et al. 2023 (arXiv
2304.13013), algorithm 2, for StableAdamW; Jordan et al. 2024 (kellerjordan.github.io/posts/muon)
for Muon.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

TensorUpdate = Literal["lamb", "stable_adamw", "muon"]
QUINTIC = (3.4445, -4.7750, 2.0315)
"""a, b and c of p(s) = a·s + b·s³ + c·s⁵, which five times in a row takes any s from 0.01 to 1 to
[0.68, 1.14]."""


@dataclass(frozen=True)
class Matrices:
    """The matrices that are stacked in a parameter, and what their update needs.

    Attributes:
        group: the settings of the parameter's group: lr, weight_decay, parts, and those of the
            update. `parts` is the number of matrices.
        parameter: with its gradient.
        state: of the parameter; `moment` and `count_step` fill it at the first step.
        gradient: clipped and finite; its memory is used for the change.
        keep: 1, or 0 if nothing must change, on the parameter's device: nothing waits for it.
    """

    group: Mapping[str, Any]
    parameter: nn.Parameter
    state: dict[str, Tensor]
    gradient: Tensor
    keep: Float[Tensor, ""]

    @classmethod
    def of(
        cls,
        group: Mapping[str, Any],
        parameter: nn.Parameter,
        state: dict[str, Tensor],
        found_inf: Tensor,
        scale: Tensor | None,
    ) -> Matrices:
        """Return the matrices of a parameter that has a gradient.

        Args:
            found_inf: 1 if some gradient is not finite, else 0.
            scale: the divisor of gradients; None for 1.
        """
        assert parameter.grad is not None
        gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        if scale is not None:
            gradient.div_(scale)
        gradient.masked_fill_(found_inf.bool(), 0.0)  # 0 times NaN is not 0
        return cls(group, parameter, state, gradient, (1 - found_inf).to(parameter.dtype))

    @property
    def shape(self) -> tuple[int, int, int]:
        """The number of matrices, their rows and their columns."""
        count = int(self.group["parts"])
        rows = len(self.parameter) if self.parameter.ndim else 1  # a single number is a row
        return count, rows // count, self.parameter.numel() // max(rows, 1)

    def count_step(self) -> Tensor:
        """Add one to the number of steps, unless nothing must change, and return it."""
        if "step" not in self.state:
            self.state["step"] = self.keep.new_zeros(())
        return self.state["step"].add_(self.keep)

    def moment(self, name: str) -> Tensor:
        """Return a moment, which begins with 0."""
        if name not in self.state:
            self.state[name] = torch.zeros_like(self.parameter)
        return self.state[name]

    def apart(self, x: Tensor) -> Float[Tensor, "parts numbers"]:
        """Return a tensor like the parameter as one vector for each matrix."""
        return x.reshape(self.shape[0], -1)

    def subtract(self, change: Tensor, rates: Float[Tensor, " parts"]) -> None:
        """Subtract each matrix's change, times its rate, from the parameter."""
        changes = zip(self.apart(self.parameter.detach()), self.apart(change), rates, strict=True)
        for weight, matrix_change, rate in changes:
            weight.sub_(matrix_change.mul_(rate))


def lamb(matrices: Matrices) -> None:
    """Do one step of LAMB without bias correction: u = m/(√v + ε) + λw, w ← w − lr · ‖w‖/‖u‖ · u.

    The trust ratio ‖w‖/‖u‖ is 1 where one of the two is 0. It has no bounds, as in ALBERT's code.
    """
    average, squares = _add_to_moments(matrices)
    change, group, weights = matrices.gradient, matrices.group, matrices.parameter.detach()
    torch.sqrt(squares, out=change).add_(group["eps"])
    torch.div(average, change, out=change).add_(weights, alpha=group["weight_decay"])
    weight, size = (
        torch.stack([matrix.norm() for matrix in matrices.apart(x)]) for x in (weights, change)
    )
    trust = torch.where((weight > 0) & (size > 0), weight / size, 1.0)
    matrices.subtract(change, matrices.keep * group["lr"] * trust)


def stable_adamw(matrices: Matrices) -> None:
    """Do one step of AdamW with the rate lr / max(1, RMS), decay included.

    RMS is the root of the mean of g²/max(v̂, ε²) over the matrix: about 1 as long as the second
    moment knows the size of the gradients, more when they have grown suddenly.
    """
    average, squares = _add_to_moments(matrices)
    group, weights = matrices.group, matrices.parameter.detach()
    steps = matrices.state["step"].clamp(min=1).to(weights.dtype)
    correction1, correction2 = (  # 1 − βᵗ
        -torch.expm1(steps * (math.log(beta) if beta else -math.inf)) for beta in group["betas"]
    )
    ratio, eps, root = matrices.gradient, group["eps"], squares / correction2
    ratio.div_(root.clamp(min=eps**2))
    total = torch.stack([ratios.sum() for ratios in matrices.apart(ratio)])
    root.sqrt_().add_(eps)
    torch.div(average, root, out=ratio).div_(correction1)
    ratio.add_(weights, alpha=group["weight_decay"])
    rms = (total / math.prod(matrices.shape[1:])).sqrt()
    matrices.subtract(ratio, matrices.keep * group["lr"] / rms.clamp(min=1))


def muon(matrices: Matrices) -> None:
    """Do one step of Muon, w ← w − lr · (λw + √max(1, rows/columns) · O(g + μ(m − g))).

    m is the average of gradients with the factor μ, g + μ(m − g) its look-ahead by Nesterov, O
    `orthogonalize`. The rate is in units of the spectral norm of a square matrix.
    """
    matrices.count_step()
    group, gradient, average = matrices.group, matrices.gradient, matrices.moment("exp_avg")
    average.lerp_(gradient, matrices.keep * (1 - group["momentum"]))
    gradient.lerp_(average, group["momentum"])  # the look-ahead
    count, rows, columns = matrices.shape
    orthogonal = orthogonalize(gradient.reshape(matrices.shape)).reshape(gradient.shape)
    change = orthogonal * math.sqrt(max(1.0, rows / columns))
    change.add_(matrices.parameter.detach(), alpha=group["weight_decay"])
    matrices.subtract(change, (matrices.keep * group["lr"]).expand(count))


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


UPDATES: Mapping[TensorUpdate, Callable[[Matrices], None]] = MappingProxyType(
    {"lamb": lamb, "stable_adamw": stable_adamw, "muon": muon}
)


def _add_to_moments(matrices: Matrices) -> tuple[Tensor, Tensor]:
    """Add to Adam's moments, m ← β₁m + (1 − β₁)g and v ← β₂v + (1 − β₂)g², and return them.

    The gradient is squared.
    """
    matrices.count_step()
    beta1, beta2 = matrices.group["betas"]
    average, squares = (matrices.moment(name) for name in ("exp_avg", "exp_avg_sq"))
    average.lerp_(matrices.gradient, matrices.keep * (1 - beta1))
    squares.lerp_(matrices.gradient.square_(), matrices.keep * (1 - beta2))
    return average, squares
