"""The recurrent encoder: embeddings, then layers of LSTMs, each direction by itself, over packed tokens (ELMo).

Left to right and right to left are two stacks that share the token embedding and nothing else: the vector of a token is what
one has read up to it and what the other has read back to it, side by side. So neither half knows the token on its far side,
which is what each is trained to predict; and no layer sees both sides at once, which is what BERT does otherwise.

As in ELMo each LSTM has a projection, and from the second layer on adds what it read to what it gives. Tokens come from the
same vocabulary of word pieces as everywhere here, not from characters.

Source: Devlin et al. 2018, figure 3; Peters et al. 2018; the projection is that of Sak et al. 2014.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.checkpoint import checkpoint

from bothways.core.batch import Batch
from bothways.kernels.dropout import Dropout
from bothways.model.encoder import Encoder, Hidden
from bothways.model.init import initialise
from bothways.model.lstm import Order, by_time, read_lstm
from bothways.model.lstm_config import LSTMConfig


class LSTMEmbedding(nn.Module):
    """The vector of each token; order is known from the reading."""

    def __init__(self, config: LSTMConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab, config.projection)

    def forward(self, batch: Batch) -> Float[Tensor, "tokens half"]:
        """Raises IndexError for an id outside the table; the caller checks inputs before."""
        result: Tensor = self.token(batch.ids)
        return result


class LSTMBlock(nn.Module):
    """A layer: an LSTM for each direction.

    Args:
        config: the encoder's.
        residual: whether what an LSTM reads is added to what it gives; in the first layer it is not.
    """

    def __init__(self, config: LSTMConfig, residual: bool) -> None:
        super().__init__()
        self.dropout = Dropout(config.dropout)
        self.residual = residual
        self.ahead, self.back = _lstm(config), _lstm(config)

    def forward(
        self, ahead: PackedSequence, back: PackedSequence
    ) -> tuple[PackedSequence, PackedSequence]:
        """What each direction reads, in the order in which it reads → what it gives."""
        return self._read(self.ahead, ahead), self._read(self.back, back)

    def _read(self, lstm: nn.LSTM, given: PackedSequence) -> PackedSequence:
        x = self.dropout(given.data)
        y = read_lstm(lstm, PackedSequence(x, given.batch_sizes))
        return PackedSequence(x + y if self.residual else y, given.batch_sizes)


class LSTMEncoder(nn.Module):
    """Two stacks of LSTMs; what `Encoder` is to a Transformer.

    Args:
        config: its shape. Weights of an LSTM start as torch's do, its forget gates open.

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
        """Encode a packed batch; `keep_layers` also returns the embeddings, twice side by side, and what each layer gave.

        All vectors are given, whichever tokens are asked for: an LSTM has to go through every one.
        """
        x = self.embedding(batch)
        steps = by_time(batch.layout), by_time(batch.layout, back=True)
        ahead, back = (PackedSequence(x[order], sizes) for order, sizes in steps)
        layers = [torch.cat([x, x], dim=-1)] if keep_layers else []
        again = self.recompute and self.training and torch.is_grad_enabled()
        for layer, block in enumerate(self.blocks):
            if again and layer < len(self.blocks) - 1:
                ahead, back = _computed_again(block, ahead, back)
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


def _computed_again(
    block: nn.Module, ahead: PackedSequence, back: PackedSequence
) -> tuple[PackedSequence, PackedSequence]:
    """Both directions after a block, which is computed once more in the backward pass."""

    def compute(
        x: Tensor, y: Tensor
    ) -> tuple[PackedSequence, PackedSequence]:  # torch 2.11 takes tensors alone here
        result: tuple[PackedSequence, PackedSequence]
        result = block(PackedSequence(x, ahead.batch_sizes), PackedSequence(y, back.batch_sizes))
        return result

    found: tuple[PackedSequence, PackedSequence] = checkpoint(
        compute, ahead.data, back.data, use_reentrant=False
    )
    return found


def _joined(
    ahead: PackedSequence, back: PackedSequence, steps: tuple[Order, Order]
) -> Float[Tensor, "tokens width"]:
    """What the two directions gave, side by side, in the order of the batch."""
    halves = ((packed.data, order) for packed, (order, _) in zip((ahead, back), steps, strict=True))
    return torch.cat(
        [torch.empty_like(data).index_copy(0, order, data) for data, order in halves], dim=-1
    )
