"""Bidirectional LSTMs over packed tokens, for taggers and heads.

cuDNN and torch read sequences one time step at a time, the tokens of all sequences at one step next
to each other. Tokens are put in that order, so that nothing is padded.

    sequences  a0 a1 a2 | b0 b1      by time  a0 b0 | a1 b1 | a2      sizes 2 2 1

Source: Hochreiter and Schmidhuber 1997; Graves and Schmidhuber 2005 for both directions.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from bothways.core.batch import Layout


class BiLSTM(nn.Module):
    """Layers of bidirectional LSTMs, with torch's own initialisation.

    Args:
        width: features of the input.
        hidden: features of each direction; the output has twice as many, forward first.
        layers: how many.
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
