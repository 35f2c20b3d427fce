"""Masked spans with the span boundary objective, as SpanBERT (Joshi et al. 2019, section 3.2).

The tokens of a masked span x_s … x_e are predicted twice: each from its own vector, and each from
the two vectors next to the span and its offset in it: x_i from (x_{s−1}, x_{e+1}, p_{i−s+1}).

    [CLS] a [MASK] [MASK] d [SEP]: b from the vectors of a and d and p₁, c from them and p₂

The boundary network is needed for training alone: the saved model has a masked LM head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from bothways.core.batch import Batch, Targets, TokenTargets
from bothways.core.source import Sequence
from bothways.core.training_module import Loss
from bothways.data.masking import (
    Chosen,
    CorpusToken,
    Masking,
    Spans,
    Vocabulary,
    choose_positions,
    hide,
)
from bothways.data.segments import FullSentences
from bothways.model.block import activate
from bothways.model.config import EncoderConfig
from bothways.model.init import initialise, layer_norm
from bothways.model.kernels.cross_entropy import cross_entropy
from bothways.model.kernels.linear import to_vocabulary
from bothways.model.model import Model
from bothways.objectives.masked_lm import MaskedLMModule, MaskedObjective

OFFSETS, OFFSET_WIDTH = 15, 200
"""Offsets in a span that are predicted, and the width of their vectors (SpanBERT's commands)."""


@dataclass(frozen=True)
class BoundaryTargets(Targets):
    """Tokens to predict from the borders of their span, `(n)` each.

    `left` and `right` are the positions next to the span, `offset` counts from its first token, 0,
    and `ids` are the tokens.
    """

    POSITIONS = frozenset({"left", "right"})
    left: NDArray[np.int64] | Tensor
    right: NDArray[np.int64] | Tensor
    offset: NDArray[np.int64] | Tensor
    ids: NDArray[np.int64] | Tensor


@dataclass(frozen=True)
class MaskedLMSpanBoundary(MaskedObjective):
    """Masked LM on spans, and their tokens predicted from the span's borders, as SpanBERT.

    Attributes:
        boundary: the factor of the boundary loss.
    """

    segments: FullSentences = FullSentences()
    masking: Masking = Masking(unit=Spans(), replacements=CorpusToken(), decided_by="unit")
    boundary: float = 1.0
    z_loss: float = 0.0
    kind: Literal["masked_lm_sbo"] = "masked_lm_sbo"

    def prepare(
        self, sequence: Sequence, vocabulary: Vocabulary, rng: np.random.Generator
    ) -> Sequence:
        """Return the sequence with spans hidden, and the targets "masked" and "boundary"."""
        hidden = choose_positions(sequence.ids, self.masking, vocabulary, rng, sequence.word_starts)
        targets = {**sequence.targets, "boundary": _boundaries(sequence, hidden)}
        sequence = dataclasses.replace(sequence, targets=targets)
        return hide(sequence, hidden, self.masking, vocabulary, rng)

    def training_module(
        self, models: Mapping[str, Model], vocabulary: Vocabulary
    ) -> SpanBoundaryModule:
        return SpanBoundaryModule(models["model"], self.boundary, self.z_loss)


def _boundaries(sequence: Sequence, hidden: Chosen) -> BoundaryTargets:
    """Return the targets of all chosen tokens whose span has a token on both sides."""
    # The tokens of a span are neighbours, so it is [first, first + size); spans ascend.
    _, begins, sizes = np.unique(hidden.unit, return_index=True, return_counts=True)
    start = np.repeat(hidden.positions[begins], sizes)
    stop = np.repeat(hidden.positions[begins] + sizes, sizes)
    offset = hidden.positions - start
    bounded = (start > 0) & (stop < len(sequence)) & (offset < OFFSETS)
    ids = sequence.ids[hidden.positions].astype(np.int64)
    return BoundaryTargets(start[bounded] - 1, stop[bounded], offset[bounded], ids[bounded])


class SpanBoundary(nn.Module):
    """Two dense layers with activation and LayerNorm on two borders and an offset in the span.

    The output layer is the token embedding, transposed, with a bias of its own.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.place = nn.Embedding(OFFSETS, OFFSET_WIDTH)
        self.first = nn.Linear(2 * config.width + OFFSET_WIDTH, config.width)
        self.first_norm = layer_norm(config)
        self.second = nn.Linear(config.width, config.embedding_width)
        self.second_norm = layer_norm(config, config.embedding_width)
        self.bias = nn.Parameter(torch.zeros(config.vocab))
        initialise(self, config)

    def forward(
        self,
        left: Float[Tensor, "targets width"],
        right: Float[Tensor, "targets width"],
        offset: Tensor,
        embedding: Float[Tensor, "vocab embedded"],
    ) -> Float[Tensor, "targets vocab"]:
        """Return logits for tokens of spans."""
        x = torch.cat([left, right, self.place(offset).to(left.dtype)], 1)
        x = self.first_norm(activate(self.activation, self.first(x)))
        x = self.second_norm(activate(self.activation, self.second(x)))
        return to_vocabulary(x, embedding, self.bias)


class SpanBoundaryModule(MaskedLMModule):
    """Learns masked tokens from their own vectors and from the borders of their spans.

    Args:
        model: an encoder with a "masked" head.
        factor: factor of the loss "boundary".
        z_loss: the coefficient of the loss "z"; 0 for none.
    """

    def __init__(self, model: Model, factor: float = 1.0, z_loss: float = 0.0) -> None:
        super().__init__(model, z_loss)
        self.boundary = SpanBoundary(model.config)
        self.coefficients = {**self.coefficients, "boundary": factor}

    @property
    def allows_padding(self) -> bool:
        return False  # `pad_batch` knows no borders

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the numbers of masked tokens and of boundary predictions."""
        boundary = float(len(batch.target("boundary", BoundaryTargets).ids))
        return super().weights(batch) | {"boundary": boundary}

    def forward(self, batch: Batch) -> Mapping[str, Loss]:
        """Return the losses "masked", "z" and "boundary"."""
        masked = batch.target("masked", TokenTargets)
        spans = batch.target("boundary", BoundaryTargets)
        index, left, right = map(torch.as_tensor, (masked.index, spans.left, spans.right))
        # The last block computes only tokens that a loss reads: masked ones and span borders.
        sources = self.model.masked_sources(batch, index)
        hidden = self.model.encoder(batch, only=torch.unique(torch.cat([sources, left, right])))
        losses = self.masked_losses(batch, hidden)
        logits = self.boundary(
            hidden.last[left], hidden.last[right], torch.as_tensor(spans.offset), hidden.table
        )
        losses["boundary"] = cross_entropy(logits, torch.as_tensor(spans.ids))
        return losses
