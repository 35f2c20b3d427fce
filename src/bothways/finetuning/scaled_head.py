"""A head that learns numbers of any size: its outputs in their unit, from their mean on.

A new head begins near 0, and an update moves a weight by about the learning rate, whatever the size
of the gradient. Scores of 10,000 ± 3,000 would therefore take 10⁸ updates at 1e-4. While it is
trained, the last layer computes s (W x + b) + m instead, with the mean m and the standard deviation
s of the training scores: outputs, losses and metrics are the scores' as they are. At the
end s and m become part of W and b, so the saved model is a usual one.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from bothways.core.errors import Finding
from bothways.model.model import Model
from bothways.tasks.base import OutputScale

HEAD = "labels"
"""The head of a regression task, which starts at random in every run."""


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


def scale_outputs(model: Model, scale: OutputScale | None) -> list[Finding]:
    """Let the new head of a task learn its scores in their units, in place; return a note of it."""
    if scale is None:
        return []
    head = model.heads[HEAD]
    assert isinstance(head.dense, nn.Linear)
    head.dense = ScaledLinear(head.dense, scale).train(head.training)
    message = (
        f"the training scores are {scale.mean:g} ± {scale.unit:g}: the head learns them in these "
        "units, and its losses, metrics and predictions are those of the scores as they are"
    )
    return [Finding("labels", "note", message)]
