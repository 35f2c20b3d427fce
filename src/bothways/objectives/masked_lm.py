"""Masked language modelling, alone or with a loss on sentence pairs.

Idea: hide 15 % of the tokens and predict them from both sides; with pairs, also classify the pair
from the vector of [CLS]. The loss is the mean over masked tokens plus the mean over pairs (Devlin
et al. 2018, section 3.1 and appendix A.2). RoBERTa's pre-training is masked LM alone (Liu et al.
2019, section 4.2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from bothways.core.batch import IGNORED, Batch, LabelTargets, TokenTargets
from bothways.core.config.values import require_at_least
from bothways.core.errors import Finding, argument, setting
from bothways.core.source import Sequence, rng
from bothways.core.training_module import Loss, TrainingModule
from bothways.data.corpus import Corpus
from bothways.data.masking import (
    Masking,
    Vocabulary,
    WholeWords,
    mask_tokens,
    masked_share,
    word_starts,
)
from bothways.data.segments import FullSentences, NextSentence
from bothways.data.sentences import chinese_share, unpack_words
from bothways.model.config import EncoderConfig
from bothways.model.heads import Head, MaskedHead, PairHead, PoolerHead
from bothways.model.kernels.cross_entropy import cross_entropy
from bothways.model.model import Hidden, Model
from bothways.objectives.losses import z_loss
from bothways.objectives.objective import ModelSpec, Objective, require_head

WORDS_CHECKED = 100_000
"""Tokens of a corpus from which the masking of whole words is measured, at most."""
FEWEST_MASKED = 0.9
"""The share of the asked predictions below which a warning is reported."""
CHINESE = 0.2
"""The share of tokens with Chinese characters from which a text counts as Chinese."""


class MaskedObjective(Objective):
    """Base class of objectives that hide tokens: they add the fields `masking` and `z_loss`."""

    masking: Masking
    z_loss: float = 0.0
    """The coefficient of `losses.z_loss` on the logits of masked tokens; 0 for none."""
    pairs = False
    """True if the segments are pairs with a label."""

    def __post_init__(self) -> None:
        require_at_least(0, "objective", z_loss=self.z_loss)

    def models(self, encoder: EncoderConfig) -> dict[str, ModelSpec]:
        """Return the encoder with a masked LM head and, for pairs, a pooler and a pair head."""
        require_head(self, encoder, MaskedHead())
        heads: tuple[Head, ...] = (PoolerHead(), PairHead()) if self.pairs else ()
        return {"model": ModelSpec(encoder, (MaskedHead(), *heads))}

    def check(self, corpus: Corpus) -> list[Finding]:
        """Return the findings about the corpus.

        Among them are whole words that are single tokens, or too long to be masked as often as
        asked.
        """
        findings = super().check(corpus)
        if not isinstance(self.masking.unit, WholeWords) or not len(corpus.tokens):
            return findings
        vocabulary = Vocabulary.of(corpus.tokenizer)
        tokens = setting("objective.masking.unit", "tokens")
        fix = f"Set {tokens}."
        ids = corpus.tokens[:WORDS_CHECKED].astype(np.int32)
        opens = None if corpus.words is None else unpack_words(corpus.words, 0, len(ids))
        if opens is None and (chinese := chinese_share(ids, corpus.tokenizer)) >= CHINESE:
            message = (
                f"{chinese:.0%} of the tokens contain Chinese characters, and the vocabulary does "
                "not show where Chinese words begin"
            )
            fix = (
                f"Build the corpus with {argument(words='jieba')} or "
                f"{argument(words='spaces')}, or set {tokens}."
            )
        elif (word_starts(ids, vocabulary) if opens is None else opens).all():
            message = "every word of this corpus is one token: the same as masking tokens"
        else:
            length, draw = self.segments.length, rng(0, "whole-words")
            share = masked_share(ids, length, self.masking, vocabulary, draw, opens)
            if share >= FEWEST_MASKED:
                return findings
            message = (
                f"words of this corpus are so long that {share * self.masking.rate:.1%} of the "
                f"tokens are masked, not {self.masking.rate:.1%}"
            )
        finding = Finding("masking", "warning", message, "objective.masking.unit", fix)
        return [*findings, finding]

    def prepare(
        self, sequence: Sequence, vocabulary: Vocabulary, rng: np.random.Generator
    ) -> Sequence:
        """Return the sequence with tokens hidden."""
        return mask_tokens(sequence, self.masking, vocabulary, rng)

    def training_module(
        self, models: Mapping[str, Model], vocabulary: Vocabulary
    ) -> TrainingModule:
        return MaskedLMModule(models["model"], self.z_loss)


def with_masking(objective: Objective, masking: Masking | None) -> Objective:
    """Return the objective with another masking, if one is given and it hides tokens."""
    if masking is None or objective.masking is None:
        return objective
    return dataclasses.replace(objective, masking=masking)  # type: ignore[type-var]


@dataclass(frozen=True)
class MaskedLM(MaskedObjective):
    """Masked LM on running text, as RoBERTa."""

    segments: FullSentences = FullSentences()
    masking: Masking = Masking()
    z_loss: float = 0.0
    kind: Literal["masked_lm"] = "masked_lm"


@dataclass(frozen=True)
class MaskedLMNextSentence(MaskedObjective):
    """Masked LM and next sentence prediction on sentence pairs, as BERT."""

    segments: NextSentence = NextSentence()
    masking: Masking = Masking()
    z_loss: float = 0.0
    kind: Literal["masked_lm_nsp"] = "masked_lm_nsp"
    pairs = True


class MaskedLMModule(TrainingModule):
    """Learns masked tokens and, if the model has a pair head, the labels of pairs.

    Args:
        model: an encoder with a "masked" head and perhaps a "pooler" and a "pair" head.
        z_loss: the coefficient of the loss "z"; 0 for none.
    """

    predicts: tuple[str, ...] = ("masked",)

    def __init__(self, model: Model, z_loss: float = 0.0) -> None:
        super().__init__()
        self.model = model
        self.coefficients = {"z": z_loss} if z_loss else {}

    def saved(self) -> Mapping[str, Model]:
        return {"model": self.model}

    @property
    def allows_padding(self) -> bool:
        config = self.model.config
        plain = not (config.readout.shifted or config.has_global_attention)
        return plain and "z" not in self.coefficients

    def is_static(self, batch: Batch) -> bool:
        return self.model.encoder.is_static(batch)

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the number of masked tokens, also for "z", and of pairs with a pair head."""
        ids = torch.as_tensor(batch.target("masked", TokenTargets).ids)
        weights = {"masked": float((ids != IGNORED).sum())}
        if "z" in self.coefficients:
            weights["z"] = weights["masked"]
        if "pair" in self.model.heads:
            weights["pair"] = float((_pair_labels(batch) != IGNORED).sum())
        return weights

    def forward(self, batch: Batch) -> Mapping[str, Loss]:
        """Return the losses "masked", "z" and "pair"."""
        heads = self.model.heads
        index = torch.as_tensor(batch.target("masked", TokenTargets).index)
        only = self.model.masked_sources(batch, index)
        if "pair" in heads:
            only = torch.cat([batch.layout.first_tokens, only])
            # [CLS] is never masked, but the token after it may be predicted from its vector.
            only = torch.unique(only) if self.model.config.readout.shifted else only
        hidden = self.model.encoder(batch, only=only)
        losses = self.masked_losses(batch, hidden)
        if "pair" in heads:
            logits = heads["pair"](heads["pooler"](hidden.last, batch.layout))
            losses["pair"] = cross_entropy(logits, _pair_labels(batch))
        return losses

    def masked_losses(self, batch: Batch, hidden: Hidden) -> dict[str, Loss]:
        """Return the losses "masked" and "z", given the encoder's vectors."""
        masked, logits = masked_prediction(self.model, batch, hidden)
        losses = {"masked": masked}
        if "z" in self.coefficients:
            losses["z"] = z_loss(logits)
        return losses


def masked_prediction(
    model: Model, batch: Batch, hidden: Hidden
) -> tuple[Loss, Float[Tensor, "masked vocab"]]:
    """Return the loss of the masked tokens and their logits, given the encoder's vectors."""
    masked = batch.target("masked", TokenTargets)
    x = model.masked_vectors(batch, hidden, torch.as_tensor(masked.index))
    logits = model.heads["masked"](x, hidden.table)
    return cross_entropy(logits, torch.as_tensor(masked.ids)), logits


def _pair_labels(batch: Batch) -> Tensor:
    """Return the labels of pairs; all `IGNORED` in a phase without pairs.

    So the pair head takes part in every backward pass, on every rank.
    """
    if "pair" not in batch.targets:
        return batch.ids.new_full((batch.layout.sequences,), IGNORED)
    return torch.as_tensor(batch.target("pair", LabelTargets).labels)
