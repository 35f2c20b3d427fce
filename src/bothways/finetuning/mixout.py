"""Mixout: in training, weights return at random to their pre-trained values.

Dropout sets a weight to 0 with probability p; mixout sets it to its pre-trained value w₀, and
corrects the others so that the expectation is w: w̃ = w₀ + mask · (w − w₀) / (1 − p). It is
dropout on the distance from the start, and is written so here. As in the authors' experiments, it
applies to the matrices of dense layers; biases, norms and embeddings are unchanged.

Source: Lee, Cho and Kang, Mixout: effective regularization to finetune large-scale pretrained
language models (2020).
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from bothways.model.kernels.dropout import dropout


class MixoutLinear(nn.Linear):
    """A dense layer that mixes its matrix with its initial value in training only.

    Args:
        linear: its parameters are shared, not copied.
        rate: the probability that a weight returns to its initial value, in [0, 1).
    """

    start: Tensor

    def __init__(self, linear: nn.Linear, rate: float) -> None:
        super().__init__(
            linear.in_features, linear.out_features, linear.bias is not None, device="meta"
        )
        self.weight, self.bias, self.rate = linear.weight, linear.bias, rate
        # Not in the state_dict: a resumed run reads the same start again.
        self.register_buffer("start", linear.weight.detach().clone(), persistent=False)

    def forward(self, input: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows outputs"]:
        """Return x Wᵀ + b; in training, W is drawn in each call."""
        return nn.functional.linear(
            input, self.mixed() if self.training else self.weight, self.bias
        )

    def mixed(self) -> Float[Tensor, "outputs width"]:
        """Draw a mixed matrix from torch's generator."""
        return self.start + dropout(self.weight - self.start, self.rate)


def mix_out(module: nn.Module, rate: float) -> None:
    """Replace every dense layer under `module` whose matrix is trained by a `MixoutLinear`."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear and child.weight.requires_grad:
                setattr(parent, name, MixoutLinear(child, rate).train(child.training))
