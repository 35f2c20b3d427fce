"""Mixout: in training, weights go back at random to the values that they started from.

Dropout sets a weight to 0 with probability p; mixout sets it to its pre-trained value w₀, and corrects the others so that the
expectation is w: w̃ = w₀ + mask · (w − w₀) / (1 − p). It is dropout on the distance from the start, and is written so here.
As in the authors' experiments it works on the matrices of dense layers; biases, norms and embeddings stay as they are.

Source: Lee, Cho and Kang, Mixout: effective regularization to finetune large-scale pretrained language models (2020).
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from bothways.kernels.dropout import dropout


class MixoutLinear(nn.Linear):
    """A dense layer whose matrix is mixed with its present value in training; in evaluation, the layer as it was.

    Args:
        linear: its parameters are shared, not copied.
        rate: the probability that a weight goes back, in [0, 1).
    """

    start: Tensor

    def __init__(self, linear: nn.Linear, rate: float) -> None:
        super().__init__(
            linear.in_features, linear.out_features, linear.bias is not None, device="meta"
        )
        self.weight, self.bias, self.rate = linear.weight, linear.bias, rate
        # In no state_dict: a resumed run has it from the same start.
        self.register_buffer("start", linear.weight.detach().clone(), persistent=False)

    def forward(self, input: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows outputs"]:
        """x Wᵀ + b, in training with another draw of W each time."""
        return nn.functional.linear(
            input, self.mixed() if self.training else self.weight, self.bias
        )

    def mixed(self) -> Float[Tensor, "outputs width"]:
        """A draw of the matrix, from torch's generator."""
        return self.start + dropout(self.weight - self.start, self.rate)


def mix_out(module: nn.Module, rate: float) -> None:
    """Put a `MixoutLinear` in the place of every dense layer under `module` whose matrix is trained."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear and child.weight.requires_grad:
                setattr(parent, name, MixoutLinear(child, rate).train(child.training))
