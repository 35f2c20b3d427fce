"""Language modelling: the next token from those before it, and in two directions also the reverse.

Idea: an encoder that reads left to right predicts at each token the next one (GPT: Radford et al.
2018, equation 1). One that reads both ways, without the two ever meeting, predicts the next token
from the forward vectors and the previous one from the backward vectors, and the losses are added
(ELMo: Peters et al. 2018, section 3.1). Devlin et al. 2018, figure 3, contrasts BERT with both.

[CLS] and [SEP] are read and predicted like all others, so that the ends of a text are learned.
The softmax is over the whole vocabulary, where ELMo's training sampled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch

from bothways.core.batch import Batch
from bothways.core.config.checks import require_at_least
from bothways.core.learner import Learner
from bothways.core.loss import Loss
from bothways.core.sequence import Sequence
from bothways.core.targets import TokenTargets
from bothways.data.full_sentences import FullSentences
from bothways.data.masking import Vocabulary
from bothways.model.config import ModelConfig
from bothways.model.heads import BiLMHead, Neighbour, NextTokenHead
from bothways.model.kernels.cross_entropy import cross_entropy
from bothways.model.model import Model
from bothways.model.neighbours import neighbour_logits, with_neighbours
from bothways.objectives.losses import z_loss
from bothways.objectives.objective import ModelSpec, Objective, require_head


class LMObjective(Objective):
    """Base class of objectives that predict the neighbours of each token.

    They add the field `z_loss`, the coefficient of `losses.z_loss`; 0 for none.
    """

    head: ClassVar[NextTokenHead | BiLMHead]
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        require_at_least(0, "objective", z_loss=self.z_loss)

    def models(self, encoder: ModelConfig) -> dict[str, ModelSpec]:
        """Return the encoder with the head that predicts neighbours."""
        require_head(self, encoder, self.head)
        return {"model": ModelSpec(encoder, (self.head,))}

    def prepare(
        self, sequence: Sequence, vocabulary: Vocabulary, rng: np.random.Generator
    ) -> Sequence:
        """Return the sequence with the neighbours of its tokens as targets."""
        return with_neighbours(sequence, self.head.neighbours)

    def learner(self, models: Mapping[str, Model], vocabulary: Vocabulary) -> LMLearner:
        """Return the module to train."""
        return LMLearner(models["model"], self.head.neighbours, self.z_loss)


@dataclass(frozen=True)
class CausalLM(LMObjective):
    """The next token, left to right, as GPT."""

    head = NextTokenHead()
    segments: FullSentences = FullSentences()
    z_loss: float = 0.0
    kind: Literal["causal_lm"] = "causal_lm"


@dataclass(frozen=True)
class BiLM(LMObjective):
    """The next token from the left and the previous one from the right, as ELMo."""

    head = BiLMHead()
    segments: FullSentences = FullSentences()
    z_loss: float = 0.0
    kind: Literal["bilm"] = "bilm"


class LMLearner(Learner):
    """Learns the neighbours of each token; its losses are named by the neighbour.

    Args:
        model: an encoder with a "causal" or a "bilm" head.
        neighbours: those that are predicted.
        z_loss: the coefficient of the loss "z", over all neighbours; 0 for none.
    """

    def __init__(
        self, model: Model, neighbours: tuple[Neighbour, ...], z_loss: float = 0.0
    ) -> None:
        super().__init__()
        self.model = model
        self.coefficients = {"z": z_loss} if z_loss else {}
        self.neighbours = self.predicts = neighbours

    def saved(self) -> Mapping[str, Model]:
        """Return the model."""
        return {"model": self.model}

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the number of predictions of each neighbour, and their sum for "z"."""
        weights = {
            name: float(len(batch.target(name, TokenTargets).ids)) for name in self.neighbours
        }
        return weights | ({"z": sum(weights.values())} if "z" in self.coefficients else {})

    def forward(self, batch: Batch) -> Mapping[str, Loss]:
        """Return the loss of each neighbour, and "z"."""
        hidden = self.model.encoder(batch)
        targets = {name: batch.target(name, TokenTargets) for name in self.neighbours}
        logits = {
            name: neighbour_logits(self.model, hidden, torch.as_tensor(targets[name].index), name)
            for name in self.neighbours
        }
        losses: dict[str, Loss] = {
            name: cross_entropy(logits[name], torch.as_tensor(targets[name].ids))
            for name in self.neighbours
        }
        if "z" in self.coefficients:
            losses["z"] = z_loss(torch.cat([*logits.values()]))
        return losses
