"""Which layers of an encoder are a word's features: the six choices of Devlin et al. 2018, table 7.

Weighted sums are learned like ELMo's: γ · Σ softmax(w)ₖ · layerₖ, without its layer normalisation.

Taggers on these features are bidirectional LSTMs over packed tokens (`BiLSTM`). cuDNN and torch
read sequences one time step at a time, the tokens of all sequences at one step next to each other.
Tokens are put in that order, so that nothing is padded.

    sequences  a0 a1 a2 | b0 b1      by time  a0 b0 | a1 b1 | a2      sizes 2 2 1

Source: Peters et al. 2018, section 3.2; Hochreiter and Schmidhuber 1997; Graves and Schmidhuber
2005 for both directions.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from typing_extensions import assert_never

from bothways.core.batch import Layout
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
    """γ · Σ softmax(w)ₖ · layerₖ, at first the mean."""

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


class BiLSTM(nn.Module):
    """Layers of bidirectional LSTMs, with torch's own initialisation.

    Args:
        hidden: features of each direction; the output has twice as many, forward first.
        dropout: between layers.
    """

    def __init__(self, width: int, hidden: int, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        rate = dropout if layers > 1 else 0.0
        self.lstm = nn.LSTM(width, hidden, layers, dropout=rate, bidirectional=True)
        self.width = 2 * hidden

    def forward(
        self, x: Float[Tensor, "tokens width"], layout: Layout
    ) -> Float[Tensor, "tokens hidden"]:
        """Read each sequence by itself."""
        order, sizes = by_time(layout)
        inputs = x[order]
        if inputs.is_cuda:
            # Autocast would run cuDNN in fp16 whatever precision was asked for, and gradients
            # would vanish.
            with torch.autocast("cuda", enabled=False):
                inputs = inputs.to(next(self.lstm.parameters()).dtype)
                outputs = self.lstm(PackedSequence(inputs, sizes))[0].data
        else:
            outputs = self.lstm(PackedSequence(inputs, sizes))[0].data
        return torch.empty_like(outputs).index_copy(0, order, outputs)


def by_time(layout: Layout) -> tuple[Int[Tensor, " tokens"], Int[Tensor, " steps"]]:
    """Return the tokens by time step, longer sequences first, and each step's size on the CPU."""
    lengths = torch.tensor(layout.lengths, dtype=torch.int64)
    rank = torch.empty_like(lengths)
    rank[torch.argsort(lengths, descending=True, stable=True)] = torch.arange(len(lengths))
    steps, owner = layout.positions, layout.sequence_ids
    # Sort by step, then by rank: both in one number.
    key = steps * len(lengths) + rank.to(owner.device)[owner]
    return torch.argsort(key), torch.bincount(layout.positions, minlength=layout.max_seqlen).cpu()
