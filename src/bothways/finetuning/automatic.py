"""Settings that a run leaves open, chosen by the model and the data: rate, length, evaluation.

The rate is 5e-5 at the width of BERT-base and in inverse proportion to the width: 3.75e-5 for
BERT-large, 1e-4 for a width of 384, 3e-4 for one of 128 and less. Published rates are in these
ranges: 2e-5 to 5e-5 (Devlin et al. 2018, appendix A.3), 3e-5 to 3e-4 for narrow models (Turc et al.
2019). Yang et al. 2022 show that the best rate of Adam falls with the width. Weights that are
random or have read little text take twice that rate: they have less to lose. Low-rank changes take
ten times the rate: 5e-4 at the width of BERT-base, as in Hu et al. 2021, table 9.

The length is three epochs, or as many as give enough updates, up to 20: on small data sets more
epochs help more than any other measure (Zhang et al. 2020, Mosbach et al. 2020), and each further
label needs updates of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator

import torch

from bothways.core.errors import Finding
from bothways.core.terminal import quantity
from bothways.data.loader import ExampleBudget
from bothways.finetuning.config import FinetuneConfig
from bothways.finetuning.data import LabelledData
from bothways.finetuning.lora import LoRA
from bothways.hub.model_folder import LoadedModel
from bothways.model.config import EncoderConfig
from bothways.model.kernels.library import runs_on
from bothways.model.model import Model
from bothways.model.parameters import parameter_table
from bothways.training.checkpoint import Best
from bothways.training.optimizers import AdamW, BertAdam, OptimizerConfig, OptimizerFactory
from bothways.training.run import Training
from bothways.training.schedules import Epochs

BASE_RATE, BASE_WIDTH, HIGHEST_RATE = 5e-5, 768, 3e-4
"""The rate of BERT-base, its width, and the highest rate of pre-trained weights."""
LITTLE_TRAINED = 10.0
"""Tokens read in pre-training per parameter, below which weights count as little trained."""
LITTLE_TRAINED_FACTOR = 2.0
"""Their rate as a multiple of the rate of well-trained weights."""
STATIC_RATE = 2e-3
"""The rate of a table of vectors: no layer above multiplies a change (docs/log.md)."""
LORA_FACTOR = 10.0
"""The rate of low-rank changes as a multiple of that of all weights."""
FEWEST_EPOCHS, MOST_EPOCHS = 3, 20
ENOUGH_UPDATES, UPDATES_PER_LABEL = 400, 10
"""The updates that a run should have: of any, and in addition for each label."""

UNKNOWN = math.inf
"""The number of tokens that weights of unknown origin have read."""


def tokens_read(loaded: LoadedModel) -> float:
    """Return the tokens that a folder's weights have read in pre-training, as far as recorded."""
    tokens = loaded.extra.get("tokens")
    return float(tokens) if isinstance(tokens, int | float) else UNKNOWN


def default_rate(
    encoder: EncoderConfig, tokens: float = UNKNOWN, lora: LoRA | None = None
) -> float:
    """Return the default peak rate for an encoder, to two digits.

    Args:
        tokens: the tokens that its weights have read in pre-training; 0 for random weights.
        lora: the low-rank changes that are trained; None for all weights.
    """
    rate = min(BASE_RATE * BASE_WIDTH / encoder.width, HIGHEST_RATE)
    if tokens < LITTLE_TRAINED * parameter_table(encoder, ()).total:
        rate *= LITTLE_TRAINED_FACTOR
    return float(f"{rate if lora is None else rate * LORA_FACTOR:.2g}")


def enough_epochs(updates: float, labels: int) -> int:
    """Return the epochs of a run, given the updates per epoch and the number of labels."""
    needed = ENOUGH_UPDATES + UPDATES_PER_LABEL * labels
    return min(max(FEWEST_EPOCHS, math.ceil(needed / updates)), MOST_EPOCHS)


def choose_automatic(
    settings: FinetuneConfig,
    encoder: EncoderConfig,
    data: LabelledData,
    tokens: float = UNKNOWN,
    static: bool = False,
) -> tuple[FinetuneConfig, list[Finding]]:
    """Return the settings with numbers for `auto`, and notes of what was chosen.

    Args:
        tokens: the tokens that the weights have read in pre-training; 0 for random weights.
        static: whether the model is a table of vectors.
    """
    training, notes = settings.training, []
    metric = data.task.metric_for(data.dev_examples) if data.dev else data.task.metric
    if settings.metric is None and metric != settings.chosen_by:
        settings = dataclasses.replace(settings, metric=metric)
    optimizer = training.optimizer
    if isinstance(optimizer, AdamW | BertAdam) and optimizer.lr == "auto":
        rate = default_rate(encoder, tokens, settings.lora)
        rate_of_trained = default_rate(encoder, lora=settings.lora)
        pretrained = "" if rate == rate_of_trained else " and little or no pre-training"
        low_rank = "" if settings.lora is None else " and low-rank changes"
        message = f"{rate:g}, for a width of {encoder.width}{pretrained}{low_rank}"
        if static:
            rate, message = STATIC_RATE, f"{STATIC_RATE:g}, for static vectors"
        training = dataclasses.replace(training, optimizer=dataclasses.replace(optimizer, lr=rate))
        notes.append(Finding("training", "note", message, "training.optimizer.lr"))
    if training.until == "auto":
        of_examples = isinstance(settings.batch, ExampleBudget)
        size = len(data.sequences) if of_examples else data.tokens
        updates = max(1.0, size / settings.batch.n)
        epochs = enough_epochs(updates, len(data.labels))
        training = dataclasses.replace(training, until=Epochs(float(epochs)))
        labels = f" and {quantity(len(data.labels), 'label(s)')}" if data.labels else ""
        message = f"{epochs} epochs, for {quantity(round(updates), 'update(s) an epoch')}{labels}"
        notes.append(Finding("training", "note", message, "training.until"))
    return dataclasses.replace(settings, training=training), notes


def training_of(settings: FinetuneConfig, data: LabelledData) -> Training:
    """Return the training with what depends on dev data: evaluations and best checkpoint."""
    evaluate, best = None, None
    if data.dev:
        direction = settings.directions(data.task, data.labels)[settings.chosen_by]
        evaluate, best = settings.training.evaluate, Best(f"dev/{settings.chosen_by}", direction)
    keep = dataclasses.replace(settings.training.keep, best=best)
    return dataclasses.replace(settings.training, evaluate=evaluate, keep=keep)


@contextlib.contextmanager
def learning_by_rows(
    model: Model, device: torch.device, world: int, optimizer: OptimizerConfig | OptimizerFactory
) -> Iterator[None]:
    """Update only the rows of the embedding that the data uses, where that is faster.

    This needs the compiled kernels, a single process (ranks exchange all rows), and an optimizer of
    the library: others do not take sparse gradients. Task heads use the embedding for lookups only.
    """
    table = model.encoder.embedding.token
    table.sparse = runs_on(device) and world == 1 and isinstance(optimizer, OptimizerConfig)
    try:
        yield
    finally:
        table.sparse = False
