"""Which layers of an encoder are a word's features: the six choices of Devlin et al. 2018, table 7.

Weighted sums are learned like ELMo's: γ · Σ softmax(w)ₖ · layerₖ, without its layer normalisation.

Source: Peters et al. 2018, section 3.2.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import assert_never

from bothways.core.errors import ConfigError

LayerChoice = Literal[
    "embeddings", "second_to_last", "last", "weighted_last_four", "concat_last_four", "weighted_all"
]  # fmt: skip
FOUR = 4


def chosen_layers(choice: LayerChoice, depth: int) -> tuple[int, ...]:
    """Return the layers that a choice reads: 0 for the embeddings, `depth` for the last block.

    Raises:
        ConfigError: the encoder has too few blocks.
    """
    match choice:
        case "embeddings":
            return (0,)
        case "second_to_last":
            layers = range(depth - 1, depth)
        case "last":
            layers = range(depth, depth + 1)
        case "weighted_last_four" | "concat_last_four":
            layers = range(depth - FOUR + 1, depth + 1)
        case "weighted_all":
            layers = range(1, depth + 1)
        case _:
            assert_never(choice)
    if layers[0] < 1:
        message = f"{choice!r} needs more blocks than the encoder's {depth}"
        raise ConfigError(message, where="layers", fix="Choose last.")
    return tuple(layers)


class LayerSum(nn.Module):
    """γ · Σ softmax(w)ₖ · layerₖ, at first the mean.

    Args:
        layers: how many.
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(layers))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Float[Tensor, "tokens layers width"]) -> Float[Tensor, "tokens width"]:
        """Return one vector of each token's layers."""
        return self.scale * torch.einsum("tlw,l->tw", x, self.weights.softmax(0))


def build_mix(choice: LayerChoice, layers: int) -> LayerSum | nn.Flatten:
    """Return the module that makes one vector of the layers of a choice."""
    match choice:
        case "weighted_last_four" | "weighted_all":
            return LayerSum(layers)
        case "embeddings" | "second_to_last" | "last" | "concat_last_four":
            return nn.Flatten()  # all layers of a token, concatenated
        case _:
            assert_never(choice)
