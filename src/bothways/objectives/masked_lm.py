"""BERT's pre-training: masked language modelling and, by choice, next sentence prediction on one encoder.

Idea: hide 15 % of the tokens and predict them from both sides; tell whether segment B follows segment A in the text. The loss
is the mean over masked tokens plus the mean over pairs (Devlin et al. 2018, section 3.1 and appendix A.2).

Data it reads: sequences with `targets["pair"]` (0 = next, 1 = random), where it is to learn from pairs. It makes
`targets["masked"]` itself, anew in each epoch. RoBERTa's pre-training is the same without the pair head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
import torch

from bothways.core.batch import Batch
from bothways.core.learner import Learner
from bothways.core.loss import Loss
from bothways.core.sequence import Sequence
from bothways.core.targets import IGNORED, LabelTargets, TokenTargets
from bothways.data.masking import Masking, Vocabulary, mask_tokens
from bothways.kernels.cross_entropy import cross_entropy
from bothways.model.model import Model


class MaskedLMLearner(Learner):
    """A model with a "masked" head and perhaps a "pooler" and a "pair" head, as a learner.

    Args:
        model: the encoder with its heads.
        masking: how tokens are hidden.
        vocabulary: what masking has to know of the vocabulary.
    """

    def __init__(self, model: Model, masking: Masking, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.model = model
        self.masking, self.vocabulary = masking, vocabulary
        self.predicts = ("masked",)

    def prepare(self, sequence: Sequence, rng: np.random.Generator) -> Sequence:
        """The sequence with tokens hidden."""
        return mask_tokens(sequence, self.masking, self.vocabulary, rng)

    def weights(self, batch: Batch) -> dict[str, float]:
        """The number of masked tokens, and of pairs if the model has a pair head."""
        weights = {"masked": float(len(_masked(batch).ids))}
        if "pair" in self.model.heads:
            weights["pair"] = float((_pair(batch) != IGNORED).sum())
        return weights

    def forward(self, batch: Batch) -> Mapping[str, Loss]:
        """The masked language model's loss, and next sentence prediction's."""
        encoder, heads, masked = self.model.encoder, self.model.heads, _masked(batch)
        index = cast(torch.Tensor, masked.index)
        only = (
            torch.cat([batch.layout.first_tokens, index]) if "pair" in heads else index
        )  # [CLS] is never masked
        hidden = encoder(batch, only=only)
        x = self.model.before_masked(batch, hidden, index)
        logits = heads["masked"](x[index], hidden.table)
        losses = {"masked": cross_entropy(logits, cast(torch.Tensor, masked.ids))}
        if "pair" in heads:
            logits = heads["pair"](heads["pooler"](hidden.last, batch.layout))
            losses["pair"] = cross_entropy(logits, _pair(batch))
        return losses


def _masked(batch: Batch) -> TokenTargets:
    return cast(TokenTargets, batch.targets["masked"])


def _pair(batch: Batch) -> torch.Tensor:
    """The labels of the pairs; all ignored in a phase without pairs, so that the head takes part on every rank all the same."""
    if "pair" not in batch.targets:
        return batch.ids.new_full((batch.layout.sequences,), IGNORED)
    return cast(torch.Tensor, cast(LabelTargets, batch.targets["pair"]).labels)
