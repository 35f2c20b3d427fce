"""The objective of a pre-training run, as a value in its configuration.

A new objective is a frozen dataclass that derives from `Objective`, and a `TrainingModule`. Python
users set it as `PretrainConfig.objective`; members of `pretraining.config.AnyObjective` can also
be named in a TOML file and on the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from bothways.core.errors import ConfigError, Finding, setting
from bothways.core.source import Sequence
from bothways.core.training_module import TrainingModule, perplexity
from bothways.data.corpus import Corpus
from bothways.data.masking import Masking, Vocabulary
from bothways.data.segments import Segments
from bothways.model.config import EncoderConfig
from bothways.model.heads import Head, token_head
from bothways.model.model import Model
from bothways.training.meter import EvaluationScores


class ModelSpec(NamedTuple):
    """A model to build: the shape of its encoder and its heads."""

    encoder: EncoderConfig
    heads: tuple[Head, ...]


class Objective:
    """Base class of frozen dataclasses with the fields `segments` and `kind`.

    Subclasses define `models`, `prepare` and `training_module`, and a field `masking` if they hide
    tokens.
    """

    kind: str
    segments: Segments
    masking: Masking | None = None

    def models(self, encoder: EncoderConfig) -> dict[str, ModelSpec]:
        """Return the models by role for a run on `encoder`; "model" is the one that is saved.

        Raises:
            ConfigError: this encoder cannot be trained with the objective.
        """
        raise NotImplementedError

    def prepare(
        self, sequence: Sequence, vocabulary: Vocabulary, rng: np.random.Generator
    ) -> Sequence:
        """Return the sequence with the objective's targets. Pure: equal draws, equal results."""
        raise NotImplementedError

    def training_module(
        self, models: Mapping[str, Model], vocabulary: Vocabulary
    ) -> TrainingModule:
        """Return the module to train, made of the models of these roles."""
        raise NotImplementedError

    @property
    def copied_tables(self) -> Mapping[str, str]:
        """The roles whose new models begin with the embedding tables of another role: that role."""
        return {}

    def check(self, corpus: Corpus) -> list[Finding]:
        """Return the findings of the preflight about the corpus and its tokenizer."""
        return self.segments.check(corpus)

    @property
    def evaluated(self) -> Objective:
        """The objective whose losses on held-out text are reported: this one."""
        return self

    def metrics(self, scores: EvaluationScores, predicts: tuple[str, ...]) -> dict[str, float]:
        """Return further metrics of an evaluation, from its means by the name of the loss."""
        losses = [scores.losses[name] for name in predicts if name in scores.losses]
        return {"perplexity": perplexity(float(np.mean(losses)))} if losses else {}

    @property
    def frozen_models(self) -> Mapping[str, str]:
        """The folders of models that stay as they are, such as a teacher's, by role.

        Of such a folder the run reads the first layers, as many as `models` says.
        """
        return {}


def require_head(objective: Objective, encoder: EncoderConfig, head: Head) -> None:
    """Raise ConfigError unless `head` is the one that predicts tokens from this encoder."""
    if token_head(encoder) == head:
        return
    reads, kind = "lets each token see both sides", "masked_lm"
    if encoder.is_causal:
        reads, kind = "reads from left to right", "causal_lm"
    message = f"{objective.kind!r} does not fit this encoder, which {reads}"
    fix = f"Set {setting('objective', kind)}, or another encoder."
    raise ConfigError(message, where="objective", fix=fix)
