"""Recipes: functions that return a complete `PretrainConfig` for an encoder.

`modern` and `short` are for one machine; the others are the settings of papers and of their code.
"""

from __future__ import annotations

import dataclasses

from bothways.data.batching import ExampleBudget, TokenBudget
from bothways.data.full_sentences import FullSentences
from bothways.data.masking import AnyToken, Masking
from bothways.model.config import LSTMConfig, ModelConfig
from bothways.objectives.catalogue import default_objective
from bothways.objectives.masked_lm import MaskedObjective, with_masking
from bothways.objectives.replaced_tokens import ReplacedTokens
from bothways.pretraining.config import PretrainConfig, PretrainPhase
from bothways.training.durations import Duration, Epochs, Hours, Steps
from bothways.training.optimizers import AdamW, BertAdam
from bothways.training.run import Training
from bothways.training.schedules import GoogleLinear, Linear


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
        objective=with_masking(
            default_objective(encoder),
            Masking(0.15, mask=0.8, random=0.1, replacements=AnyToken()),
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
        objective=with_masking(usual.objective, Masking(0.4)),
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


def electra(encoder: ModelConfig) -> PretrainConfig:
    """Return the settings of ELECTRA-small (Clark et al. 2020, appendix A, and its code).

    A million updates of 128 sequences of 128 tokens. The base size reads 256 sequences of 512
    tokens at 2e-4, with a generator of a third (`objective.generator_size`). In Google's code the
    warm-up multiplies the falling rate: a difference of 1 % at most, at its end.
    """
    objective = ReplacedTokens()
    return PretrainConfig(
        encoder=encoder,
        training=Training(
            until=Steps(1_000_000),
            optimizer=BertAdam(lr=5e-4, betas=(0.9, 0.999), eps=1e-6, decay=0.01),
            schedule=GoogleLinear(Steps(10_000)),
            report=Steps(100),
            evaluate=Steps(10_000),
            save=Steps(10_000),
        ),
        objective=objective,
        phases=(PretrainPhase(min(128, encoder.max_positions)),),
        batch=ExampleBudget(128),
        evaluation_masking=objective.masking,
    )


RECIPES = {"modern": modern, "paper": paper, "short": short, "electra": electra}


def recipe_for(until: Duration) -> str:
    """Return the name of the usual recipe for a budget."""
    return "short" if isinstance(until, Hours) and until.count <= SHORT_BUDGET.count else "modern"
