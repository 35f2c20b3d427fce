"""Optimizers with clipping of the global norm: AdamW and BERT's own Adam on torch's fused kernel,
LAMB, StableAdamW and Muon next to it.

BERT's optimizer (Devlin et al. 2018) is Adam with decoupled decay and without bias correction. The
corrections are 1 − βᵗ: with t so large that βᵗ is 0 they are exactly 1, and the fused kernel of
AdamW computes BERT's Adam.

The same kernel clips and checks: it divides gradients by `grad_scale` and changes nothing where
`found_inf` is 1. So neither needs a pass over the gradients, nothing waits for the device, and no
gradient that is not finite reaches the weights.

The groups of LAMB, StableAdamW and Muon name one of `UPDATES` instead, which depends on whole
matrices. A parameter may be several matrices of equal shape stacked in rows, such as queries, keys
and values: each is a matrix of its own, as in models that keep them apart.

    qkv.weight (3·256, 256), parts = 3 → three trust ratios, three orthogonal updates

Their other parameters are groups of the fused kernel: biases and norms of LAMB are BERT's Adam, and
AdamW takes the parameters that Muon leaves: all but the matrices of blocks.

A `ParameterRule` lowers the rate of a parameter or pulls it toward its start. The pull is decoupled
as the decay is: before each update w ← w − rate · pull · (w − w₀), which Adam does not rescale.

A table with a sparse gradient, an embedding of which a step reads some rows, is updated by rows: a
row that has had no gradient yet has moments of 0, so that Adam leaves it alone, but for the decay.
The result is the dense update's, which is used where there is no compiled kernel. An update
that depends on whole matrices reads the gradient as dense.

Sources: Kingma & Ba 2014; Loshchilov & Hutter 2017 on decoupled decay; Zhang et al. 2020 on the
missing correction in fine-tuning; Li et al. 2018 (L2-SP) for the pull, there a term of the loss;
You et al. 2019 (arXiv 1904.00962) and ALBERT's code for LAMB; Wortsman et al. 2023 (arXiv
2304.13013), algorithm 2, for StableAdamW; Jordan et al. 2024 (kellerjordan.github.io/posts/muon).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from bothways.core.config.values import require_at_least, require_range
from bothways.core.errors import ConfigError, setting
from bothways.model.kernels import abi
from bothways.model.kernels.library import call_kernel, runs_on
from bothways.training.parallel import full_tensor, is_sharded
from bothways.training.schedules import Auto

# 0.9999999 to this power is 0 in float32, and adding 1 to it in float32 leaves it as it is.
_ENDLESS = 1e9


@dataclass(frozen=True)
class _Adam:
    """Settings of Adam and its relatives.

    Attributes:
        lr: the peak of the schedule; "auto" is for fine-tuning only.
        betas: the factors of the averages of gradients and of their squares.
        eps: is added to the root of the average of squares.
        decay: weight decay, times the rate; none for biases and LayerNorms.
    """

    lr: float | Auto = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    decay: float = 0.01

    def __post_init__(self) -> None:
        _check_rate(self)
        require_range("(0, inf)", "optimizer", eps=self.eps)
        for beta in self.betas:
            require_range("[0, 1)", "optimizer", betas=beta)


@dataclass(frozen=True)
class AdamW(_Adam):
    """Adam with bias correction and decoupled decay, which 1-d parameters do not have."""

    eps: float = 1e-8
    kind: Literal["adamw"] = "adamw"


@dataclass(frozen=True)
class BertAdam(_Adam):
    """The optimizer of BERT's own code: AdamW without bias correction, with larger early steps."""

    kind: Literal["bert_adam"] = "bert_adam"


@dataclass(frozen=True)
class Lamb(_Adam):
    """ALBERT's optimizer: each matrix and table moves by the rate times its own norm.

    The rate belongs to the batch: 1.76e-3 is for 4,096 sequences, and falls with the root of their
    number. Biases and LayerNorms are updated as by `BertAdam`.
    """

    lr: float = 1.76e-3
    kind: Literal["lamb"] = "lamb"


@dataclass(frozen=True)
class StableAdamW(_Adam):
    """AdamW that takes a smaller step on a matrix whose gradients have grown suddenly.

    It needs no clipping: set `training.clip_norm` to none.
    """

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.98)
    kind: Literal["stable_adamw"] = "stable_adamw"


@dataclass(frozen=True)
class Muon:
    """Orthogonal updates of the matrices of blocks; the other parameters have AdamW.

    Attributes:
        lr: of the matrices, in units of the spectral norm.
        momentum: the factor of the average of gradients.
        decay: of the matrices.
        others: the optimizer of embeddings, heads, biases and LayerNorms.
    """

    lr: float = 0.02
    momentum: float = 0.95
    decay: float = 0.01
    others: AdamW = field(default_factory=lambda: AdamW(lr=3e-4, betas=(0.9, 0.95)))
    kind: Literal["muon"] = "muon"

    def __post_init__(self) -> None:
        _check_rate(self)
        require_range("[0, 1)", "optimizer", momentum=self.momentum)
        if isinstance(self.others.lr, str):
            message, fix = "is not chosen for muon", "Set a number, such as 3e-4."
            raise ConfigError(message, where="optimizer.others.lr", fix=fix)


OptimizerConfig = AdamW | BertAdam | Lamb | StableAdamW | Muon
OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""Parameter groups → an optimizer, such as `torch.optim.SGD` or a `functools.partial` of it; its
learning rate is the peak of the schedule."""
MAX_RATE = 1e3
"""No training with a higher rate ends in anything but overflow."""


@dataclass(frozen=True)
class ParameterRule:
    """An exception for one parameter.

    Attributes:
        factor: its rate as a multiple of the run's.
        pull: toward the value that it has when the optimizer is built, per unit of rate.
    """

    factor: float = 1.0
    pull: float = 0.0


ParameterRules = Callable[[str], ParameterRule]
"""A parameter's name → its rule."""


def same_for_all(name: str) -> ParameterRule:
    """Return the rule without exceptions: the run's rate and no pull."""
    return ParameterRule()


class FusedAdamW(torch.optim.AdamW):
    """torch's AdamW on its fused kernel, which reads `grad_scale` and `found_inf` on the device.

    Groups with an `update` other than "adamw" are stepped by `step_whole`.

    Attributes:
        anchors: the targets of pulled parameters; a resumed run builds them again.
        seen: whether each row of a parameter with sparse gradients has had one `(rows)`; not in
            the state, the moments imply it.
    """

    grad_scale: Tensor | None
    found_inf: Tensor
    anchors: dict[nn.Parameter, Tensor]
    seen: dict[nn.Parameter, Tensor]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state, and forget the rows seen."""
        super().load_state_dict(state_dict)
        self.seen = {}

    def step_whole(self) -> None:
        """Step the parameters whose update depends on whole matrices, and drop their gradients."""
        for group in self.param_groups:
            if (step := UPDATES.get(group["update"])) is None:
                continue
            for weight in (p for p in group["params"] if p.grad is not None):
                gradient = weight.grad.to_dense() if weight.grad.is_sparse else weight.grad
                if self.grad_scale is not None:
                    gradient.div_(self.grad_scale)
                gradient.masked_fill_(self.found_inf.bool(), 0.0)  # 0 times NaN is not 0
                keep = (1 - self.found_inf).to(weight.dtype)
                step(Matrices(group, weight, self.state[weight], gradient, keep))
                weight.grad = None


def _check_rate(config: _Adam | Muon) -> None:
    if not isinstance(config.lr, str):
        require_range(f"(0, {MAX_RATE:g}]", "optimizer", lr=config.lr)
    require_at_least(0, "optimizer", decay=config.decay)


def peak_rate(config: OptimizerConfig) -> float:
    """Return the peak of the rate; ConfigError for "auto", which only fine-tuning resolves."""
    if isinstance(config.lr, str):
        message = "is chosen by fine-tuning alone, and must be a number here"
        raise ConfigError(message, where="training.optimizer.lr", fix="Set a number, such as 1e-4.")
    return config.lr


def _by_rule(
    parameters: Iterable[tuple[str, nn.Parameter]], rules: ParameterRules
) -> dict[ParameterRule, dict[str, nn.Parameter]]:
    """Return the parameters that need a gradient by their rule; ConfigError if there are none."""
    result: dict[ParameterRule, dict[str, nn.Parameter]] = {}
    for name, parameter in parameters:
        if parameter.requires_grad:
            result.setdefault(rules(name), {})[name] = parameter
    if not result:
        raise ConfigError("the model has no parameter to train", fix="Unfreeze some part of it.")
    return result


NO_MATRICES: Mapping[str, int] = MappingProxyType({})


def parameter_groups(
    parameters: Iterable[tuple[str, nn.Parameter]],
    config: OptimizerConfig,
    rules: ParameterRules = same_for_all,
    matrices: Mapping[str, int] = NO_MATRICES,
) -> list[dict[str, Any]]:
    """Return groups of one rule and equal settings, with the peak of the rate.

    Matrices and embedding tables decay; biases and norms, which are of one dimension, do not.
    Parameters that need no gradient are dropped.

    Args:
        matrices: the hidden matrices by name, with the number of matrices stacked in each.

    Raises:
        ConfigError: no parameter needs a gradient.
    """
    result: dict[tuple[Any, ...], dict[str, Any]] = {}
    for rule, members in _by_rule(parameters, rules).items():
        # Matrices come first: False sorts before True.
        for name, parameter in sorted(members.items(), key=lambda item: item[1].ndim < 2):
            matrix, stacked = parameter.ndim >= 2, matrices.get(name, 0)
            # Muon leaves tables and vectors, in which no hidden matrices are stacked.
            method = config.others if isinstance(config, Muon) and not stacked else config
            peak = peak_rate(method) * rule.factor
            settings: dict[str, Any] = {"weight_decay": method.decay if matrix else 0.0}
            if isinstance(method, Muon):
                settings |= {"update": "muon", "parts": stacked, "momentum": method.momentum}
            elif isinstance(method, AdamW | BertAdam) or (isinstance(method, Lamb) and not matrix):
                settings |= {"betas": method.betas, "eps": method.eps, "update": "adamw"}
            else:
                settings |= {"betas": method.betas, "eps": method.eps, "update": method.kind}
                settings["parts"] = stacked or 1
            group = {"params": [], "lr": peak, "peak": peak, "pull": rule.pull, **settings}
            key = (rule, *settings.values())
            result.setdefault(key, group)["params"].append(parameter)
    return list(result.values())


def build_optimizer(
    config: OptimizerConfig | OptimizerFactory,
    parameters: Iterable[tuple[str, nn.Parameter]],
    rules: ParameterRules = same_for_all,
    matrices: Mapping[str, int] = NO_MATRICES,
) -> torch.optim.Optimizer:
    """Return the optimizer over a model's named parameters.

    It is built while the parameters have the values that `rules` pulls them to: before a
    checkpoint is restored.

    Args:
        matrices: the hidden matrices by name, with the number of matrices stacked in each
            (`hidden_matrices`).

    Raises:
        ConfigError: no parameter needs a gradient, a function makes no suitable optimizer, a pull
            is asked of one, Muon gets no matrices, or whole matrices are updated by their parts.
    """
    if isinstance(config, OptimizerConfig):
        return _build(config, parameter_groups(parameters, config, rules, matrices))
    members = _by_rule(parameters, rules)
    if any(rule.pull for rule in members):
        message = "needs one of the library's own optimizers"
        raise ConfigError(message, where="stability.pull")
    location, fix = "training.optimizer", "Give a function of groups, such as torch.optim.SGD."
    try:
        optimizer = config([{"params": [*some.values()]} for some in members.values()])
    except (TypeError, ValueError) as error:
        message = f"cannot make an optimizer of groups: {error}"
        raise ConfigError(message, where=location, fix=fix) from error
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"must make an optimizer of torch, not a {name}", where=location, fix=fix)
    other = isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam)
    if other or any("lr" not in group for group in optimizer.param_groups):
        message = f"{name} does not make a step of one dense gradient and a rate"
        raise ConfigError(message, where=location, fix=fix)
    for rule, group in zip(members, optimizer.param_groups, strict=True):
        group["peak"] = group["lr"] * rule.factor
    return optimizer


def _build(config: OptimizerConfig, parameters: list[dict[str, Any]]) -> FusedAdamW:
    if isinstance(config, Muon) and all(group["update"] == "adamw" for group in parameters):
        message = "muon updates the matrices of Transformer blocks, and this model has none"
        fix = f"Set {setting('training.optimizer', 'adamw')}."
        raise ConfigError(message, where="training.optimizer", fix=fix)
    if any(
        is_sharded(weight)
        for group in parameters
        for weight in group["params"]
        if group["update"] != "adamw"
    ):
        message = f"{config.kind} updates whole matrices, and the ranks share those of this model"
        fix = f"Set {setting('training.optimizer', 'adamw')}, or {setting('sharding', 'none')}: "
        fix += "each rank then has the whole model."
        raise ConfigError(message, where="training.optimizer", fix=fix)
    optimizer = FusedAdamW(parameters, fused=True)
    # Anchors are the weights before fine-tuning, which some rules pull back to.
    optimizer.anchors, optimizer.seen = {}, {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if group["pull"]:
                optimizer.anchors[parameter] = parameter.detach().clone()
            if isinstance(config, BertAdam | Lamb) and group["update"] == "adamw":
                optimizer.state[parameter] = _start(parameter, _ENDLESS)
    return optimizer


def _start(parameter: nn.Parameter, step: float) -> dict[str, Tensor]:
    """Return the first state of a parameter in the fused kernel."""
    return {
        "step": torch.tensor(step, dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def set_rate(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Set each group's rate to this multiple of its peak, and return the highest.

    The peak of an optimizer that was built elsewhere is the rate it has at first.
    """
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("peak", group["lr"]) * factor
    rates: list[float] = [group["lr"] for group in optimizer.param_groups]
    return max(rates)


@torch.no_grad()
def update(optimizer: torch.optim.Optimizer, clip_norm: float | None) -> Float[Tensor, ""]:
    """Clip the gradients to a global norm, change the weights, forget the gradients.

    Where the norm is not finite, weights and state stay as they are: the caller must stop.

    Returns:
        The norm before clipping, on the device; `FusedAdamW` does not wait for it.
    """
    weights = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    for weight in weights:
        if weight.grad.is_sparse:
            weight.grad = weight.grad.coalesce()
    gradients = [w.grad.values() if w.grad.is_sparse else w.grad for w in weights]
    norm = full_tensor(nn.utils.get_total_norm(gradients))
    # torch divides the gradients by the scale inside its fused step, and skips it for infinity.
    scale = None if clip_norm is None else (norm / clip_norm).clamp(min=1).float()
    if isinstance(optimizer, FusedAdamW):
        optimizer.grad_scale, optimizer.found_inf = scale, norm.isfinite().logical_not().float()
        _pull(optimizer)
        optimizer.step_whole()
        _step_rows(optimizer)
        optimizer.step()
    elif norm.isfinite():
        for weight in weights if scale is not None else ():
            weight.grad /= scale
        optimizer.step()
    optimizer.zero_grad()
    return norm


def _step_rows(optimizer: FusedAdamW) -> None:
    """Step the parameters with sparse gradients and drop these, or make them dense."""
    for group in optimizer.param_groups:
        for weight in (p for p in group["params"] if p.grad is not None):
            has_kernel = weight.dtype is torch.float32 and weight.is_contiguous()
            if not (weight.grad.is_sparse and has_kernel and runs_on(weight.device)):
                optimizer.seen.pop(weight, None)
                weight.grad = weight.grad.to_dense() if weight.grad.is_sparse else weight.grad
                continue
            if not (state := optimizer.state[weight]):
                state |= _start(weight, 0.0)
            # Rows whose moments are 0 have had no gradient yet.
            if weight not in optimizer.seen:
                optimizer.seen[weight] = state["exp_avg"].any(1) | state["exp_avg_sq"].any(1)
            if not optimizer.found_inf:
                update_rows(group, weight, state, optimizer.seen[weight], optimizer.grad_scale)
            weight.grad = None


def _pull(optimizer: FusedAdamW) -> None:
    """Pull, w ← w − rate · pull · (w − w₀), unless the gradient of the step is not finite."""
    for group in optimizer.param_groups:
        if group["pull"]:
            weights = group["params"]
            ways = torch._foreach_sub([optimizer.anchors[weight] for weight in weights], weights)
            torch._foreach_mul_(ways, (1 - optimizer.found_inf) * (group["lr"] * group["pull"]))
            torch._foreach_add_(weights, ways)


def update_rows(
    group: dict[str, Any],
    weight: nn.Parameter,
    state: dict[str, Tensor],
    seen: Bool[Tensor, " rows"],
    scale: Tensor | None,
) -> None:
    """Do one step of AdamW on a table by its coalesced sparse gradient, with the compiled kernel.

    Args:
        group: of the optimizer, with its rate, betas, epsilon and decay.
        weight: the table `(rows, width)`, in fp32.
        state: its moments, of the whole table, and its step.
        seen: the rows that have had a gradient before; those of this one are added.
        scale: the divisor of gradients; None for 1.
    """
    assert weight.grad is not None
    rows, gradients = weight.grad.indices()[0], weight.grad.values().contiguous()
    state["step"] += 1
    (beta1, second), steps, rate = group["betas"], float(state["step"]), group["lr"]
    table = abi.AdamWTable(
        weight=weight.data_ptr(),
        average=state["exp_avg"].data_ptr(),
        squares=state["exp_avg_sq"].data_ptr(),
        seen=seen.data_ptr(),
        rows=len(weight),
        width=weight.shape[1],
        scale=1.0 if scale is None else float(scale),
        decay=-rate * group["weight_decay"],
        rate=-rate / (1 - beta1**steps),
        first=1 - beta1,
        second=1 - second,
        keep=second,
        correction=math.sqrt(1 - second**steps),
        epsilon=group["eps"],
    )
    call_kernel("bothways_adamw_rows", table, rows, gradients, len(rows))


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


UPDATES: Mapping[str, Callable[[Matrices], None]] = MappingProxyType(
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
