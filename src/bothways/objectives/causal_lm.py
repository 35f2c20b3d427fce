"""Language modelling: the token that follows, from those before it; in two directions also the one before, from those after.

Idea: an encoder that reads left to right predicts at each token the next one (GPT: Radford et al. 2018, equation 1); one that
reads both ways, without the two ever meeting, predicts the next one from what reads forward and the previous one from what
reads back, and the losses are added (ELMo: Peters et al. 2018, section 3.1). BERT is set apart from both in Devlin et al. 2018,
figure 3.

Data it reads: any sequences. It makes `targets["next"]` and `targets["previous"]` itself; [CLS] and [SEP] are read and
predicted like all others, so that the ends of a text are learned. Notable choice: the softmax is over the whole vocabulary,
where ELMo's training sampled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, cast

import numpy as np
import torch

from bothways.core.batch import Batch
from bothways.core.learner import Learner
from bothways.core.loss import Loss
from bothways.core.sequence import Sequence
from bothways.core.targets import TokenTargets
from bothways.kernels.cross_entropy import cross_entropy
from bothways.model.encoder import Hidden
from bothways.model.model import Model

Direction = Literal["next", "previous"]


class CausalLMLearner(Learner):
    """A model with the head "causal" or "bilm", as a learner; its losses are named by the token that is predicted.

    Args:
        model: the encoder with its head.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.predicts: tuple[Direction, ...] = (
            ("next", "previous") if "bilm" in model.heads else ("next",)
        )

    def prepare(self, sequence: Sequence, rng: np.random.Generator) -> Sequence:
        """The sequence with the neighbours of its tokens as targets."""
        ids, places = sequence.ids.astype(np.int64), np.arange(len(sequence))
        neighbours = {
            "next": TokenTargets(places[:-1], ids[1:]),
            "previous": TokenTargets(places[1:], ids[:-1]),
        }
        return dataclasses.replace(
            sequence, targets={name: neighbours[name] for name in self.predicts}
        )

    def weights(self, batch: Batch) -> dict[str, float]:
        """The number of predictions in each direction."""
        return {name: float(len(_neighbours(batch, name).ids)) for name in self.predicts}

    def forward(self, batch: Batch) -> Mapping[str, Loss]:
        """The loss of each direction."""
        hidden = self.model.encoder(batch)
        return {name: self._loss(hidden, _neighbours(batch, name), name) for name in self.predicts}

    def _loss(self, hidden: Hidden, targets: TokenTargets, name: Direction) -> Loss:
        embedding, rows = hidden.table, hidden.last[targets.index]
        if "bilm" in self.model.heads:
            logits = self.model.heads["bilm"](rows, embedding, name)
        else:
            logits = self.model.heads["causal"](rows, embedding)
        return cross_entropy(logits, cast(torch.Tensor, targets.ids))


def _neighbours(batch: Batch, name: Direction) -> TokenTargets:
    return cast(TokenTargets, batch.targets[name])
