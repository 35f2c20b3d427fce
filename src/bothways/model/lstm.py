"""A bidirectional LSTM over packed tokens: what stands on frozen features (Devlin et al. 2018, section 5.3).

torch's LSTM reads time step by time step, sequences sorted by length; packed tokens lie sequence by sequence. Two gathers lead
from one order to the other, so that nothing is padded.

Source: Hochreiter and Schmidhuber 1997; Graves and Schmidhuber 2005 for both directions.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from bothways.core.layout import Layout

Order = tuple[Int[Tensor, " tokens"], Int[Tensor, " longest"]]
"""The order in which tokens are read, and how many are read at each step."""


class BiLSTM(nn.Module):
    """Layers of LSTMs in both directions, with torch's own initialisation.

    Args:
        width: of the input.
        hidden: of each direction; the output is twice as wide, first the one that reads forward.
        layers: how many.
        dropout: between layers.
    """

    def __init__(self, width: int, hidden: int, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.lstm = nn.LSTM(
            width, hidden, layers, dropout=dropout if layers > 1 else 0.0, bidirectional=True
        )
        self.width = 2 * hidden

    def forward(
        self, x: Float[Tensor, "tokens width"], layout: Layout
    ) -> Float[Tensor, "tokens hidden"]:
        """Each sequence is read by itself."""
        order, sizes = by_time(layout)
        found = read_lstm(self.lstm, PackedSequence(x[order], sizes))
        return torch.empty_like(found).index_copy(0, order, found)


def read_lstm(lstm: nn.LSTM, given: PackedSequence) -> Float[Tensor, "tokens hidden"]:
    """What an LSTM gives; on a GPU without autocast, which gives cuDNN's fp16, whatever it was asked for: gradients vanish."""
    if not given.data.is_cuda:
        return lstm(given)[0].data  # type: ignore[no-any-return]
    with torch.autocast("cuda", enabled=False):
        x = given.data.to(next(lstm.parameters()).dtype)
        return lstm(PackedSequence(x, given.batch_sizes))[0].data  # type: ignore[no-any-return]


def by_time(layout: Layout, back: bool = False) -> Order:
    """The tokens by time step, in a step those of longer sequences first; and how many each step has, on the CPU.

    Args:
        back: whether sequences are read from their ends.
    """
    lengths = torch.tensor(layout.lengths, dtype=torch.int64)
    rank = torch.empty_like(lengths)
    rank[torch.argsort(lengths, descending=True, stable=True)] = torch.arange(len(lengths))
    places = (
        layout.cu_seqlens.diff()[layout.sequence_ids] - 1 - layout.positions
        if back
        else layout.positions
    )
    key = places * len(lengths) + rank.to(layout.sequence_ids.device)[layout.sequence_ids]
    return torch.argsort(key), torch.bincount(layout.positions, minlength=layout.max_seqlen).cpu()
