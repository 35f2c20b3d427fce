"""Masked LM on text in which a generator has replaced the masked tokens (Clark et al. 2020, section
3.4): the two objectives between BERT and ELECTRA.

    text        the  chef  cooked  the  meal
    input       the  guest   cooked  the  meal       no [MASK]
    Replace MLM      learns "chef" and "meal", the tokens that were masked
    All-Tokens MLM   learns every token

To learn every token the model has a copy probability D, the sigmoid of a score for each token:

    p(token) = D · [token is the input] + (1 − D) · softmax(logits)[token]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bothways.core.batch import Batch
from bothways.core.loss import Loss
from bothways.core.runtime.tuning import TUNING
from bothways.core.targets import TokenTargets
from bothways.data.masking import Vocabulary
from bothways.model.heads import Head, MaskedHead, ReplacedHead
from bothways.model.kernels.cross_entropy import cross_entropy
from bothways.model.model import Model
from bothways.objectives.replaced_tokens import (
    GeneratorObjective,
    ReplacedTokensModule,
    Replacements,
)


@dataclass(frozen=True)
class ReplacedLM(GeneratorObjective):
    """Masked LM by a generator, and prediction of the original tokens from what it made of them.

    With `judged="masked"` it is "Replace MLM" of the paper, with "all" "All-Tokens MLM".
    """

    kind: Literal["replaced_lm"] = "replaced_lm"

    @property
    def model_heads(self) -> tuple[Head, ...]:
        """The head that predicts tokens and, for all tokens, the score of not copying."""
        copies: tuple[Head, ...] = (ReplacedHead(),) if self.judged == "all" else ()
        return (MaskedHead(), *copies)

    def training_module(
        self, models: Mapping[str, Model], vocabulary: Vocabulary
    ) -> ReplacedLMModule:
        """Return the module to train."""
        return ReplacedLMModule(
            models["model"], models["generator"], self.replaced, self.temperature, self.sharing
        )


class ReplacedLMModule(ReplacedTokensModule):
    """Trains a generator, and a model that restores the tokens which it replaced.

    A model with a "replaced" head has a copy probability, 1 − sigmoid(score). The model's loss is
    named "replaced", as that of a discriminator.
    """

    def forward(self, batch: Batch) -> Mapping[str, Loss]:
        """Return the generator's loss "masked" and the restored tokens', "replaced"."""
        loss, index, drawn, _ = self.generate(batch)
        judged = torch.as_tensor(batch.target("replaced", Replacements).judged)
        masked = batch.target("masked", TokenTargets)
        original = batch.ids.index_copy(0, index, torch.as_tensor(masked.ids))[judged]
        changed, hidden = self.read_replaced(batch, index, drawn)
        x = self.model.before_masked(changed, hidden, judged)[judged]
        head = self.model.heads["masked"]
        if "replaced" not in self.model.heads:
            return {"masked": loss, "replaced": cross_entropy(head(x, hidden.table), original)}
        scores = self.model.heads["replaced"](hidden.last, changed.layout)[judged]
        copied = changed.ids[judged] == original
        elements = TUNING.loss_chunk_elements_cuda if x.is_cuda else TUNING.loss_chunk_elements_cpu
        rows = max(1, elements // len(hidden.table))

        def likelihood(vectors: Tensor, *targets: Tensor) -> Tensor:
            """Return the log-likelihood of some tokens."""
            return restored(head(vectors, hidden.table), *targets)

        split = (torch.split(values, rows) for values in (x, scores, copied, original))
        # Computed again in the backward pass: logits of all tokens are not kept.
        sums = [
            checkpoint(likelihood, *chunk, use_reentrant=False)
            for chunk in zip(*split, strict=True)
        ]
        return {"masked": loss, "replaced": Loss(-torch.stack(sums).sum())}


def restored(
    logits: Float[Tensor, "rows vocab"],
    scores: Float[Tensor, " rows"],
    copied: Tensor,
    original: Int[Tensor, " rows"],
) -> Float[Tensor, ""]:
    """Return Σ over rows of log p(original), in fp32 or finer; D = sigmoid(−score).

    Args:
        copied: True where the input is the original.
    """
    exact = torch.promote_types(logits.dtype, torch.float32)
    z, s = logits.to(exact), scores.to(exact)
    predicted = F.logsigmoid(s) - F.cross_entropy(z, original, reduction="none")
    copy = F.logsigmoid(-s).masked_fill(~copied, -torch.inf)
    return torch.logaddexp(predicted, copy).sum()
