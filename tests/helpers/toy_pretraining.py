"""Settings of small runs of pre-training."""

from typing import Any

from bothways.data.corpus import Corpus
from bothways.data.loader import ExampleBudget
from bothways.model.config import Dropouts, EncoderConfig
from bothways.pretraining.config import PretrainConfig, PretrainPhase
from bothways.training.optimizers import AdamW
from bothways.training.run import Training
from bothways.training.schedules import Duration, Linear


def small_encoder(corpus: Corpus, depth: int = 2, dropout: float = 0.0) -> EncoderConfig:
    rates = Dropouts(dropout, dropout)
    return EncoderConfig(corpus.tokenizer.size, 32, depth, 2, 64, dropout=rates)


def small_run(
    corpus: Corpus,
    until: Duration,
    *,
    training: dict[str, Any] | None = None,
    **settings: Any,
) -> PretrainConfig:
    """A run in fp32 of a small encoder, of eight sequences of at most 32 tokens an update.

    Args:
        training: settings of `Training`.
        settings: of `PretrainConfig`.
    """
    values: dict[str, Any] = {"optimizer": AdamW(lr=5e-3), "schedule": Linear(0.1)}
    values |= {"until": until, "precision": "fp32"} | (training or {})
    common: dict[str, Any] = {"encoder": small_encoder(corpus), "phases": (PretrainPhase(32),)}
    common |= {"batch": ExampleBudget(8), "held_out": 0.1, "evaluation_tokens": 400}
    return PretrainConfig(training=Training(**values), **(common | settings))
