"""Language modelling from left to right: the next token from those before it.

Source: Radford et al. 2018, equation 1; Devlin et al. 2018, figure 3, contrasts BERT with it.

[CLS] and [SEP] are read and predicted like all others, so that the ends of a text are learned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from bothways.core.batch import Batch, TokenTargets
from bothways.core.config.values import require_at_least
from bothways.core.source import Sequence
from bothways.core.training_module import Loss, TrainingModule
from bothways.data.masking import Vocabulary
from bothways.data.segments import FullSentences
from bothways.model.config import EncoderConfig
from bothways.model.heads import NextTokenHead
from bothways.model.kernels.cross_entropy import cross_entropy
from bothways.model.model import Model
from bothways.objectives.losses import z_loss
from bothways.objectives.objective import ModelSpec, Objective, require_head


@dataclass(frozen=True)
class CausalLM(Objective):
    """The next token, left to right, as GPT.

    Attributes:
        segments: the segments of running text.
        z_loss: coefficient of `losses.z_loss`; 0 for none.
    """

    segments: FullSentences = FullSentences()
    z_loss: float = 0.0
    kind: Literal["causal_lm"] = "causal_lm"

    def __post_init__(self) -> None:
        require_at_least(0, "objective", z_loss=self.z_loss)

    def models(self, encoder: EncoderConfig) -> dict[str, ModelSpec]:
        """Return the encoder with the head that predicts the next token."""
        require_head(self, encoder, NextTokenHead())
        return {"model": ModelSpec(encoder, (NextTokenHead(),))}

    def prepare(
        self, sequence: Sequence, vocabulary: Vocabulary, rng: np.random.Generator
    ) -> Sequence:
        """Return the sequence with the target "next": at each token but the last, the next one."""
        ids = sequence.ids
        targets = {"next": TokenTargets(np.arange(len(ids) - 1), ids[1:].astype(np.int64))}
        return dataclasses.replace(sequence, targets=targets)

    def training_module(
        self, models: Mapping[str, Model], vocabulary: Vocabulary
    ) -> CausalLMModule:
        return CausalLMModule(models["model"], self.z_loss)


class CausalLMModule(TrainingModule):
    """Learns the next tokens; its loss is named "next".

    Args:
        model: an encoder with a "causal" head.
        z_loss: coefficient of the loss "z"; 0 for none.
    """

    predicts = ("next",)

    def __init__(self, model: Model, z_loss: float = 0.0) -> None:
        super().__init__()
        self.model = model
        self.coefficients = {"z": z_loss} if z_loss else {}

    def saved(self) -> Mapping[str, Model]:
        return {"model": self.model}

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the number of predictions, for "next" and for "z"."""
        count = float(len(batch.target("next", TokenTargets).ids))
        return dict.fromkeys(("next", *self.coefficients), count)

    def forward(self, batch: Batch) -> Mapping[str, Loss]:
        """Return the loss of the next tokens, and "z"."""
        hidden, targets = self.model.encoder(batch), batch.target("next", TokenTargets)
        rows = torch.as_tensor(targets.index)
        logits = self.model.heads["causal"](hidden.last[rows], hidden.table)
        losses = {"next": cross_entropy(logits, torch.as_tensor(targets.ids))}
        return losses | ({"z": z_loss(logits)} if "z" in self.coefficients else {})
