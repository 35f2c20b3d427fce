"""LSTMs over packed tokens: a bidirectional layer stack for taggers, and ELMo's encoder.

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
from torch.utils.checkpoint import checkpoint

from bothways.core.batch import Batch
from bothways.core.layout import Layout
from bothways.model.config import LSTMConfig
from bothways.model.encoder import Encoder, Hidden
from bothways.model.init import initialise
from bothways.model.kernels.dropout import Dropout

Order = tuple[Int[Tensor, " tokens"], Int[Tensor, " longest"]]
"""The order in which tokens are read, and the number read at each step."""


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
        outputs = read_lstm(self.lstm, PackedSequence(x[order], sizes))
        return torch.empty_like(outputs).index_copy(0, order, outputs)


def read_lstm(lstm: nn.LSTM, given: PackedSequence) -> Float[Tensor, "tokens hidden"]:
    """Return an LSTM's output.

    On a GPU autocast is off: it would run cuDNN in fp16 whatever precision was asked for, and
    gradients would vanish.
    """
    if not given.data.is_cuda:
        return lstm(given)[0].data  # type: ignore[no-any-return]
    with torch.autocast("cuda", enabled=False):
        x = given.data.to(next(lstm.parameters()).dtype)
        return lstm(PackedSequence(x, given.batch_sizes))[0].data  # type: ignore[no-any-return]


def by_time(layout: Layout, back: bool = False) -> Order:
    """Return the tokens by time step, longer sequences first, and each step's size on the CPU.

    Args:
        layout: of the batch.
        back: whether sequences are read from their ends.
    """
    lengths = torch.tensor(layout.lengths, dtype=torch.int64)
    rank = torch.empty_like(lengths)
    rank[torch.argsort(lengths, descending=True, stable=True)] = torch.arange(len(lengths))
    steps, owner = layout.positions, layout.sequence_ids
    if back:
        steps = layout.cu_seqlens.diff()[owner] - 1 - steps
    # Sort by step, then by rank: both in one number.
    key = steps * len(lengths) + rank.to(owner.device)[owner]
    return torch.argsort(key), torch.bincount(layout.positions, minlength=layout.max_seqlen).cpu()


class LSTMEmbedding(nn.Module):
    """The vector of each token; order is known from the reading."""

    def __init__(self, config: LSTMConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab, config.projection)

    def forward(self, batch: Batch) -> Float[Tensor, "tokens half"]:
        """Look up the tokens; IndexError for an id outside the table, which callers check."""
        result: Tensor = self.token(batch.ids)
        return result


class LSTMBlock(nn.Module):
    """A layer: an LSTM for each direction.

    Args:
        config: the encoder's.
        residual: whether an LSTM's input is added to its output; not in the first layer.
    """

    def __init__(self, config: LSTMConfig, residual: bool) -> None:
        super().__init__()
        self.dropout = Dropout(config.dropout)
        self.residual = residual
        self.ahead, self.back = _lstm(config), _lstm(config)

    def forward(
        self, ahead: PackedSequence, back: PackedSequence
    ) -> tuple[PackedSequence, PackedSequence]:
        """Return the outputs of both directions, each in the order in which it reads."""
        return self._read(self.ahead, ahead), self._read(self.back, back)

    def _read(self, lstm: nn.LSTM, given: PackedSequence) -> PackedSequence:
        x = self.dropout(given.data)
        y = read_lstm(lstm, PackedSequence(x, given.batch_sizes))
        return PackedSequence(x + y if self.residual else y, given.batch_sizes)


class LSTMEncoder(nn.Module):
    """ELMo's encoder: two stacks of LSTMs that share the token embedding and nothing else.

    A token's vector is what the forward stack has read up to it and what the backward stack has
    read back to it, concatenated. So neither half knows the token on its far side, which it is
    trained to predict, and no layer sees both sides at once, as BERT does. Each LSTM has a
    projection (Sak et al. 2014) and, from the second layer on, a residual path. Tokens are word
    pieces, not characters.

    Source: Devlin et al. 2018, figure 3; Peters et al. 2018.

    Args:
        config: its shape. LSTMs start like torch's, with open forget gates.

    Attributes:
        recompute: as in `Encoder`.
    """

    def __init__(self, config: LSTMConfig) -> None:
        super().__init__()
        self.config = config
        self.width = config.width
        self.recompute = False
        self.embedding = LSTMEmbedding(config)
        self.blocks = nn.ModuleList(
            LSTMBlock(config, residual=layer > 0) for layer in range(config.depth)
        )
        initialise(self, config.initial_range)

    def forward(
        self, batch: Batch, keep_layers: bool = False, only: Int[Tensor, " asked"] | None = None
    ) -> Hidden:
        """Encode a packed batch; arguments as in `Encoder.forward`.

        With `keep_layers`, the embeddings are repeated for both directions. All vectors are
        returned whatever `only` says: an LSTM has to go through all of them.
        """
        x = self.embedding(batch)
        steps = by_time(batch.layout), by_time(batch.layout, back=True)
        ahead, back = (PackedSequence(x[order], sizes) for order, sizes in steps)
        layers = [torch.cat([x, x], dim=-1)] if keep_layers else []
        again = self.recompute and self.training and torch.is_grad_enabled()
        for layer, block in enumerate(self.blocks):
            if again and layer < len(self.blocks) - 1:
                ahead, back = _recomputed(block, ahead, back)
            else:
                ahead, back = block(ahead, back)
            if keep_layers:
                layers.append(_joined(ahead, back, steps))
        last = layers[-1] if keep_layers else _joined(ahead, back, steps)
        return Hidden(last, self.embedding.token.weight, tuple(layers))


AnyEncoder = Encoder | LSTMEncoder


def _lstm(config: LSTMConfig) -> nn.LSTM:
    projected = config.projection if config.cells > config.projection else 0
    return nn.LSTM(config.projection, config.cells, proj_size=projected)


def _recomputed(
    block: nn.Module, ahead: PackedSequence, back: PackedSequence
) -> tuple[PackedSequence, PackedSequence]:
    """Return a block's outputs, to be computed again in the backward pass."""

    def compute(x: Tensor, y: Tensor) -> tuple[PackedSequence, PackedSequence]:
        """Return the outputs of the block."""
        # torch 2.11's checkpoint takes only tensors here.
        result: tuple[PackedSequence, PackedSequence]
        result = block(PackedSequence(x, ahead.batch_sizes), PackedSequence(y, back.batch_sizes))
        return result

    outputs: tuple[PackedSequence, PackedSequence] = checkpoint(
        compute, ahead.data, back.data, use_reentrant=False
    )
    return outputs


def _joined(
    ahead: PackedSequence, back: PackedSequence, steps: tuple[Order, Order]
) -> Float[Tensor, "tokens width"]:
    """Concatenate the outputs of both directions, in the order of the batch."""
    halves = ((packed.data, order) for packed, (order, _) in zip((ahead, back), steps, strict=True))
    return torch.cat(
        [torch.empty_like(data).index_copy(0, order, data) for data, order in halves], dim=-1
    )
