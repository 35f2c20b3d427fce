"""What a pre-training run is, as one value, and the recipes that make it.

A recipe is a function that returns a complete `PretrainConfig`; a TOML file and dotted overrides
change it; what came out is saved with the run.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated

from bothways.core.config.checks import require_seed
from bothways.core.config.reader import Members
from bothways.core.errors import ConfigError
from bothways.data.batching import BatchSize, ExampleBudget, TokenBudget
from bothways.data.full_sentences import FullSentences
from bothways.data.masking import AnyToken, Masking
from bothways.data.next_sentence import NextSentence
from bothways.data.segments import Segments
from bothways.data.sentence_order import SentenceOrder
from bothways.model.config import LSTMConfig, ModelConfig
from bothways.objectives.catalogue import AnyObjective, default_objective
from bothways.objectives.masked_lm import MaskedLMNextSentence, MaskedObjective
from bothways.objectives.objective import Objective, segments_for
from bothways.training.durations import Duration, Epochs, Hours, Steps
from bothways.training.optimizers import AdamW, BertAdam, peak_rate
from bothways.training.run import Training
from bothways.training.schedules import GoogleLinear, Linear

AnySegments = FullSentences | NextSentence | SentenceOrder


@dataclass(frozen=True)
class PretrainPhase:
    """A part of the run with sequences of one length.

    Attributes:
        length: the longest sequence, in tokens.
        share: of the run's duration.
        segments: what a sequence is made of; None for the objective's segments.
    """

    length: int
    share: float = 1.0
    segments: Annotated[Segments | None, Members(AnySegments | None)] = None


@dataclass(frozen=True)
class PretrainConfig:
    """Everything that decides what a pre-training run computes.

    Attributes:
        encoder: the model.
        training: the optimizer, its schedule, the length of the run, and how often it is evaluated
            and saved.
        objective: what the model learns, from sequences of which segments.
        phases: one after the other; their shares add up to 1.
        batch: sequences or tokens per update, over all ranks; tokens may grow along a ramp.
        microbatch_tokens: the most tokens in memory at once; changes neither data nor update.
        held_out: the share of documents that is never trained on.
        evaluation_tokens: how many tokens of held-out text are scored each time.
        data_copies: after how many epochs segments and masks repeat (Google's dupe_factor); none
            if never.
        seed: of weights, data and dropout.
        start: a model folder or Hub id whose weights the run starts from, with `encoder` its
            configuration, except for dropout; None for random weights.
        fresh: heads that `start` lacks and that start at random, such as "masked" for a sentence
            encoder.

    Example:
        >>> from bothways.pretraining.config import modern
        >>> config = modern(bothways.preset("bert-mini"))
        >>> isinstance(config, bothways.PretrainConfig), config.objective.kind
        (True, 'masked_lm_nsp')
    """

    encoder: ModelConfig
    training: Training
    objective: Annotated[Objective, Members(AnyObjective)] = MaskedLMNextSentence()
    phases: tuple[PretrainPhase, ...] = (PretrainPhase(128),)
    batch: BatchSize = TokenBudget(8192)
    microbatch_tokens: int = 4096
    held_out: float = 0.01
    evaluation_tokens: int = 200_000
    data_copies: int | None = None
    seed: int = 0
    start: str | None = None
    fresh: tuple[str, ...] = ()

    def segments_of(self, phase: PretrainPhase) -> Segments:
        """Return the segments of a phase, with its length."""
        return segments_for(self.objective, phase.segments, phase.length)

    def __post_init__(self) -> None:
        require_seed(seed=self.seed)
        self.objective.models(self.encoder)  # raises ConfigError if they do not fit
        _ = self.training.end  # raises ConfigError if it is "auto", as for the rate
        if isinstance(self.training.optimizer, AdamW | BertAdam):
            peak_rate(self.training.optimizer)
        total = sum(phase.share for phase in self.phases)
        if abs(total - 1) > 1e-6:
            raise ConfigError(f"the shares add up to {total:g}, not to 1", where="phases")
        for number, phase in enumerate(self.phases):
            if phase.length > self.encoder.max_positions:
                raise ConfigError(
                    f"sequences of {phase.length} tokens exceed the encoder's "
                    f"{self.encoder.max_positions} positions",
                    where=f"phases.{number}.length",
                    fix="Shorten the phase, or set encoder.position.max_positions higher.",
                )


def paper(encoder: ModelConfig) -> PretrainConfig:
    """Return the paper's settings (Devlin et al. 2018, appendix A.2) with those of its code: GELU
    by tanh, Adam without bias correction.

    A million steps of 256 sequences; 90 % of them at 128 tokens, the rest at 512; ten versions of
    the data.
    """
    return PretrainConfig(
        encoder=encoder
        if isinstance(encoder, LSTMConfig)
        else dataclasses.replace(encoder, activation="gelu_tanh"),
        training=Training(
            until=Steps(1_000_000),
            optimizer=BertAdam(lr=1e-4, betas=(0.9, 0.999), eps=1e-6, decay=0.01),
            schedule=GoogleLinear(Steps(10_000)),
            report=Steps(100),
            evaluate=Steps(10_000),
            save=Steps(10_000),
        ),
        objective=_with_masking(
            default_objective(encoder), Masking(0.15, mask=0.8, random=0.1, replacements=AnyToken())
        ),
        phases=(PretrainPhase(128, 0.9), PretrainPhase(512, 0.1)),
        batch=ExampleBudget(256),
        data_copies=10,
    )


def _without_dropout(encoder: ModelConfig) -> ModelConfig:
    if isinstance(encoder, LSTMConfig):
        return dataclasses.replace(encoder, dropout=0.0)
    return dataclasses.replace(
        encoder, dropout=dataclasses.replace(encoder.dropout, hidden=0.0, attention=0.0)
    )


def modern(encoder: ModelConfig) -> PretrainConfig:
    """Return modern settings for one machine: no dropout, fresh masks in every epoch, batches by
    tokens, a higher rate.

    That short runs want no dropout and a higher rate is from Izsak et al. 2021 and Geiping &
    Goldstein 2022.
    """
    return PretrainConfig(
        encoder=_without_dropout(encoder),
        objective=default_objective(encoder),
        phases=(PretrainPhase(min(128, encoder.max_positions)),),
        training=Training(
            until=Epochs(1.0),
            optimizer=AdamW(lr=5e-4, betas=(0.9, 0.98), eps=1e-6, decay=0.01),
            schedule=Linear(0.06),
            evaluate=Steps(1000),
            save=Steps(1000),
        ),
    )


def _with_masking(objective: Objective, masking: Masking) -> Objective:
    """Return the objective with this masking, if it hides tokens."""
    if not isinstance(objective, MaskedObjective):
        return objective
    return dataclasses.replace(objective, masking=masking)  # type: ignore[type-var]


SHORT_BUDGET = Hours(0.5)
"""The longest run for which `short` is the better recipe (docs/decisions/007)."""


def short(encoder: ModelConfig) -> PretrainConfig:
    """Return a recipe for minutes on a CPU: many small updates, on short sequences at first.

    The second half reads 64 tokens; 40 % are masked. In five minutes a small BERT gets below the
    unigram baseline, which `modern` does not.
    """
    usual = modern(encoder)
    masked = isinstance(usual.objective, MaskedObjective)
    return dataclasses.replace(
        usual,
        objective=_with_masking(usual.objective, Masking(0.4)),
        training=Training(
            until=Hours(5 / 60),
            optimizer=AdamW(lr=1e-3, betas=(0.9, 0.98), eps=1e-6, decay=0.01),
            schedule=Linear(0.06),
            evaluate=Steps(1000),
            save=Steps(1000),
        ),
        phases=(
            PretrainPhase(16, 0.5, FullSentences() if masked else None),
            PretrainPhase(min(64, encoder.max_positions), 0.5),
        ),
        batch=TokenBudget(512),
        evaluation_tokens=20_000,
    )


RECIPES = {"modern": modern, "paper": paper, "short": short}


def recipe_for(until: Duration) -> str:
    """Return the name of the usual recipe for a budget."""
    return "short" if isinstance(until, Hours) and until.count <= SHORT_BUDGET.count else "modern"
