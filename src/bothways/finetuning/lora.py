"""Layers that are trained in place of a model's own, and become part of its weights at the end.

LoRA: the encoder's own weights stay as they are. Each chosen matrix W gets a change of low rank,
trained in its place: y = W x + (α / r) · B A x, where A (r × inputs) starts at random and B
(outputs × r) at 0, so that training starts from the model as it is. The heads are trained whole. A
step needs no gradients and no moments of the encoder's weights, which saves memory and time. The
saved model is a usual one, unless the folder is to hold the changes alone (`adapter_only`).

Scaled outputs, for scores of any size: a new head begins near 0, and an update moves a weight by
about the learning rate, whatever the size of the gradient. Scores of 10,000 ± 3,000 would therefore
take 10⁸ updates at 1e-4. The last layer computes s (W x + b) + m instead, with the mean m and the
standard deviation s of the training scores: outputs, losses and metrics are the scores' as they
are. At the end s and m become part of W and b.

Source: Hu et al., LoRA: Low-rank adaptation of large language models (2021), section 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bothways.core.config.values import require_at_least, require_range
from bothways.core.errors import Finding
from bothways.core.source import rng
from bothways.core.training_module import hidden_matrices
from bothways.hub.adapter import LowRankChange
from bothways.model.model import Model
from bothways.tasks.base import OutputScale


@dataclass(frozen=True)
class LoRA:
    """Low-rank changes of the encoder's matrices, trained in place of its weights.

    Attributes:
        rank: rank r of each change.
        alpha: the change is multiplied by alpha / rank.
        matrices: the matrices that are changed: "all" of attention and feed-forward layers, or
            "query_value", those that make queries and values, as in the paper.
        adapter_only: True to save the changes and the heads alone, as an adapter of PEFT, in place
            of all weights.
    """

    rank: int = 8
    alpha: float = 8.0
    matrices: Literal["all", "query_value"] = "all"
    adapter_only: bool = False

    def __post_init__(self) -> None:
        require_at_least(1, "lora", rank=self.rank)
        require_range("(0, inf)", "lora", alpha=self.alpha)


class LoRALinear(nn.Linear):
    """A dense layer with low-rank changes of the matrices that its weight stacks.

    Args:
        linear: its parameters are shared, not copied.
        lora: rank and scale.
        stacked: the number of matrices stacked in the weight, such as 3 for queries, keys, values.
        changed: the numbers of those that are changed.

    Attributes:
        into: the matrices A, one after the other `(changed · rank, inputs)`.
        out: the matrices B `(changed, outputs of one, rank)`.
    """

    def __init__(
        self, linear: nn.Linear, lora: LoRA, stacked: int, changed: tuple[int, ...]
    ) -> None:
        super().__init__(
            linear.in_features, linear.out_features, linear.bias is not None, device="meta"
        )
        self.weight, self.bias = linear.weight, linear.bias
        self.stacked, self.changed, self.scale = stacked, changed, lora.alpha / lora.rank
        into = linear.weight.new_empty(len(changed) * lora.rank, linear.in_features)
        # As nn.Linear starts its weights; so do the authors' code and the peft library.
        self.into = nn.Parameter(nn.init.kaiming_uniform_(into, math.sqrt(5)))
        rows = linear.out_features // stacked
        self.out = nn.Parameter(linear.weight.new_zeros(len(changed), rows, lora.rank))

    def forward(self, input: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows outputs"]:
        """Return W x + b + (α / r) · B A x."""
        plain = nn.functional.linear(input, self.weight, self.bias)
        rows, count = input.shape[:-1], len(self.changed)
        low = nn.functional.linear(input, self.into).view(*rows, count, -1)
        # m stacked matrices (query, key, value), rank r, o outputs of each.
        change = torch.einsum("...mr,mor->...mo", low, self.out) * self.scale
        if count == self.stacked:
            return plain + change.flatten(-2)
        matrices = plain.view(*rows, self.stacked, -1)
        index = torch.tensor(self.changed, device=plain.device)
        return matrices.index_add(-2, index, change.to(plain.dtype)).flatten(-2)

    def merged(self) -> nn.Linear:
        """Return the usual layer that computes the same."""
        result = nn.Linear(self.in_features, self.out_features, False, device="meta")
        into = self.into.detach().view(len(self.changed), -1, self.in_features)
        weight = self.weight.detach().clone()
        matrices = weight.view(self.stacked, -1, self.in_features)
        matrices[list(self.changed)] += self.scale * torch.bmm(self.out.detach(), into)
        result.weight, result.bias = nn.Parameter(weight), self.bias
        return result.train(self.training)


def add_changes(model: Model, lora: LoRA | None, seed: int, frozen: int = 0) -> None:
    """Freeze the encoder and give its matrices low-rank changes, in place.

    Draws are keyed by the seed; torch's generator is unchanged.

    Args:
        lora: None leaves the model as it is.
        frozen: the number of lowest parts without changes, as in `Stability`: embeddings, block 1 …
    """
    if lora is None:
        return
    for parameter in model.encoder.parameters():
        parameter.requires_grad_(False)
    # A generator of its own: other random draws of the run stay as they are without changes.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng(seed, "lora").integers(2**63)))
        for block in [*model.encoder.blocks][max(0, frozen - 1) :]:
            for path, stacked in hidden_matrices(block).items():
                parent, _, name = path.removesuffix(".weight").rpartition(".")
                whole, module = lora.matrices == "all", block.get_submodule(parent)
                changed = tuple(range(stacked)) if whole else _QUERY_VALUE.get(name, ())
                linear = getattr(module, name)
                if linear is not None and changed:
                    layer = LoRALinear(linear, lora, stacked, changed)
                    setattr(module, name, layer.train(module.training))


_QUERY_VALUE: dict[str, tuple[int, ...]] = {
    "qkv": (0, 2), "global_qkv": (0, 2), "query": (0,), "key_value": (1,)
}  # fmt: skip
"""The queries and values among the matrices that a layer stacks."""


def merge_changes(model: Model) -> dict[str, LowRankChange]:
    """Make low-rank changes and scales a part of the weights, in place; other layers stay.

    Returns:
        The low-rank changes by the name of their layer.
    """
    changes: dict[str, LowRankChange] = {}
    for prefix, parent in list(model.named_modules()):
        for name, child in parent.named_children():
            if isinstance(child, LoRALinear):
                into, out = (factor.detach().cpu() for factor in (child.into, child.out))
                change = LowRankChange(into, out, child.stacked, child.changed)
                changes[f"{prefix}.{name}"] = change
            if isinstance(child, LoRALinear | ScaledLinear):
                setattr(parent, name, child.merged())
    return changes


class ScaledLinear(nn.Linear):
    """A dense layer whose outputs are multiplied by a number and moved by another.

    Args:
        linear: its parameters are shared, not copied.
    """

    def __init__(self, linear: nn.Linear, scale: OutputScale) -> None:
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias, self.scale = linear.weight, linear.bias, scale

    def forward(self, input: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows outputs"]:
        """Return s (W x + b) + m, in fp32: bf16 has three digits, too few for s and m together."""
        return super().forward(input).float() * self.scale.unit + self.scale.mean

    def merged(self) -> nn.Linear:
        """Return the usual layer that computes the same."""
        result = nn.Linear(self.in_features, self.out_features, device="meta")
        weight, bias = (tensor.detach().double() for tensor in (self.weight, self.bias))
        result.weight = nn.Parameter((weight * self.scale.unit).to(self.weight.dtype))
        bias = bias * self.scale.unit + self.scale.mean
        result.bias = nn.Parameter(bias.to(self.bias.dtype))
        return result.train(self.training)


def scale_outputs(model: Model, scale: OutputScale | None, is_trained: bool) -> list[Finding]:
    """Let the head of a regression learn scores in their units, in place; return a note.

    Args:
        is_trained: the head is trained further: its outputs stay as they are.
    """
    if scale is None:
        return []
    head = model.heads["labels"]
    assert isinstance(head.dense, nn.Linear)
    if is_trained:
        with torch.no_grad():
            head.dense.weight.div_(scale.unit)
            head.dense.bias.sub_(scale.mean).div_(scale.unit)
    head.dense = ScaledLinear(head.dense, scale).train(head.training)
    message = f"the training scores are {scale.mean:g} ± {scale.unit:g}: the head learns them in "
    message += "these units; losses, metrics and predictions have the units of the data"
    return [Finding("labels", "note", message)]
