"""Masked next-token prediction and language modelling from left to right, in one model.

A sequence is of one kind, drawn at random. A masked one is read from both sides, a causal one from
left to right; in both, the output at a token predicts the token after it, so that one head serves
both:

    [CLS] a [MASK] c [SEP]    the output at a, which has seen c, predicts b
    [CLS] a b c [SEP]         the output at a, which has seen [CLS] and a, predicts b

Source: Charpentier and Samuel 2024, "GPT or BERT: why not both?", section 3. A part of the ranks
has causal sequences there, and each rank the mean of its loss: the factors of the two means are the
shares of the sequences, as here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from bothways.core.batch import Batch, TokenTargets
from bothways.core.config.values import require_range
from bothways.core.source import Sequence
from bothways.core.training_module import Loss, perplexity
from bothways.data.masking import Masking, Vocabulary
from bothways.data.segments import FullSentences
from bothways.model.config import EncoderConfig
from bothways.model.kernels.cross_entropy import cross_entropy
from bothways.model.model import Model
from bothways.objectives.losses import z_loss
from bothways.objectives.masked_lm import MaskedLMModule, MaskedObjective
from bothways.objectives.objective import ModelSpec
from bothways.training.meter import EvaluationScores

LOSSES = ("masked", "next")


@dataclass(frozen=True)
class GPTBERT(MaskedObjective):
    """Masked next-token prediction, and language modelling of a part of the sequences.

    Attributes:
        causal: the share of the sequences that are read from left to right, and the factor of
            their loss; the masked sequences have the rest.
    """

    segments: FullSentences = FullSentences()
    masking: Masking = Masking()
    causal: float = 1 / 16
    z_loss: float = 0.0
    kind: Literal["gpt_bert"] = "gpt_bert"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_range("[0, 1]", "objective", causal=self.causal)

    def models(self, encoder: EncoderConfig) -> dict[str, ModelSpec]:
        """Return the encoder with a masked LM head that predicts the next token."""
        encoder.require_causal("objective")
        readout = dataclasses.replace(encoder.readout, shifted=True)
        return super().models(dataclasses.replace(encoder, readout=readout))

    def prepare(
        self, sequence: Sequence, vocabulary: Vocabulary, rng: np.random.Generator
    ) -> Sequence:
        """Return the sequence with the targets "masked" and "next", one of which is empty.

        A masked sequence has the masks that masked LM draws for it.
        """
        masked, ids = super().prepare(sequence, vocabulary, rng), sequence.ids.astype(np.int64)
        following = TokenTargets(np.arange(1, len(ids)), ids[1:])
        none = following.without_weight()
        if rng.random() < self.causal:
            targets = {**sequence.targets, "masked": none, "next": following}
            return dataclasses.replace(sequence, targets=targets, causal=True)
        return dataclasses.replace(masked, targets={**masked.targets, "next": none})

    def training_module(self, models: Mapping[str, Model], vocabulary: Vocabulary) -> GPTBERTModule:
        return GPTBERTModule(models["model"], self.causal, self.z_loss)

    @property
    def evaluated(self) -> GPTBERT:
        """The same with half of the sequences of each kind, whatever is trained on."""
        return dataclasses.replace(self, causal=0.5)

    def metrics(self, scores: EvaluationScores, predicts: tuple[str, ...]) -> dict[str, float]:
        """Return a perplexity for each kind of sequence: their mean would mean nothing."""
        losses = {name: scores.losses[name] for name in LOSSES if name in scores.losses}
        return {f"perplexity/{name}": perplexity(loss) for name, loss in losses.items()}


class GPTBERTModule(MaskedLMModule):
    """Learns the tokens after others: masked ones, and those of causal sequences.

    Args:
        model: an encoder with a "masked" head that is shifted.
        causal: the factor of the loss "next"; that of "masked" is the rest of 1.
        z_loss: the coefficient of both losses on normalisers; 0 for none.
    """

    predicts = LOSSES

    def __init__(self, model: Model, causal: float, z_loss: float = 0.0) -> None:
        super().__init__(model)
        self.coefficients = {"masked": 1 - causal, "next": causal}
        if z_loss:
            self.coefficients |= {
                f"z/{name}": z_loss * share for name, share in self.coefficients.items()
            }

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the number of predictions of each kind, also for its loss on the normaliser."""
        return {
            name: float(len(batch.target(name.removeprefix("z/"), TokenTargets).ids))
            for name in self.coefficients
        }

    def forward(self, batch: Batch) -> Mapping[str, Loss]:
        """Return the losses "masked" and "next" and, if asked for, "z/masked" and "z/next"."""
        targets = [batch.target(name, TokenTargets) for name in LOSSES]
        index = torch.cat([torch.as_tensor(target.index) for target in targets])
        # A sequence is of one kind: no token is asked for twice.
        sources = self.model.masked_sources(batch, index)
        hidden = self.model.encoder(batch, only=sources)
        logits = self.model.heads["masked"](hidden.last[sources], hidden.table)
        losses = {}
        for name, target, rows in zip(
            LOSSES, targets, logits.split([len(target.ids) for target in targets]), strict=True
        ):
            losses[name] = cross_entropy(rows, torch.as_tensor(target.ids))
            if f"z/{name}" in self.coefficients:
                losses[f"z/{name}"] = z_loss(rows)
        return losses
