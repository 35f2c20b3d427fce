"""Preparation of a run on frozen features: settings, model, data, and a forecast of the time.

The encoder is timed on a sample of the data's windows. The tagger's training is timed on one batch
of random vectors with the data's numbers of words, since the features are not computed yet.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from typing_extensions import assert_never

from bothways.core.batch import pack
from bothways.core.config.checks import require_seed
from bothways.core.finding import Finding, report_findings
from bothways.core.runtime.devices import choose_device, device_of
from bothways.core.targets import TokenTargets
from bothways.core.terminal import time_text
from bothways.data.batching import ExampleBudget, TokenBudget
from bothways.finetuning.data import LabelledData, label
from bothways.finetuning.splits import parse_part, split_examples
from bothways.hub.model_folder import load_model
from bothways.hub.resolve import resolve_run
from bothways.lab.features.tagger import (
    BiLSTMTagger,
    Features,
    FeatureTagger,
    Stored,
    extract,
    holds,
)
from bothways.model.encoder import Encoder
from bothways.model.flops import BACKWARD
from bothways.model.layer_mix import LayerChoice, chosen_layers
from bothways.tasks.base import EncodedExample
from bothways.tasks.tagging.task import Tagger, TaggingTask
from bothways.training.durations import Duration, Epochs, Hours, Steps, Tokens
from bothways.training.optimizers import AdamW
from bothways.training.preflight.machine import speed
from bothways.training.preflight.text import check_model
from bothways.training.run import Training
from bothways.training.schedules import Linear

SAMPLE = 1024
"""Number of tokens that the encoder is timed on."""


def tagger_adam() -> Training:
    """Return twenty epochs of AdamW at 1e-3 in fp32.

    The paper gives no values for this run. The LSTM is small, so fp32 is fast enough.
    """
    return Training(
        until=Epochs(20.0),
        optimizer=AdamW(lr=1e-3, decay=0.0),
        schedule=Linear(0.05),
        precision="fp32",
    )


@dataclass(frozen=True, kw_only=True)
class FeatureConfig:
    """The settings of a run on frozen features.

    Attributes:
        model: a model folder, the folder of a run, or a Hub id.
        train, dev: sentences with tags: files or Hub data sets; a `dev` such as "20%" is split
            from `train`.
        layers: the encoder's layers to read, and how they become one vector.
        task: the reader of the data; the paper gives the encoder as much of the document as fits.
        length: maximum length of a sequence in tokens. None: the number of positions of the model.
        tagger: the shape of the tagger.
        training: of the tagger; the dev data is scored after every epoch, and the best weights are
            kept.
        batch: sentences or words per update.
        stored: the type of the features on the disk.
        seed: of the tagger, the order of the data and dropout.
    """

    model: str
    train: str
    dev: str
    layers: LayerChoice = "concat_last_four"
    task: TaggingTask = TaggingTask(context="document")
    length: int | None = None
    tagger: BiLSTMTagger = BiLSTMTagger()
    training: Training = field(default_factory=tagger_adam)
    batch: ExampleBudget | TokenBudget = ExampleBudget(32)
    stored: Stored = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        require_seed(seed=self.seed)


@dataclass(frozen=True)
class TaggedSentences:
    """Sentences to be read by the encoder.

    Attributes:
        learner: decodes and scores sentences; its model has no head and is on its device.
        data: checked and encoded.
        layers: all layers of the encoder that are needed.
    """

    learner: Tagger
    data: LabelledData
    layers: tuple[int, ...]

    @property
    def splits(self) -> dict[str, tuple[EncodedExample, ...]]:
        """The encoded sentences by the folder name of their features."""
        return {"train": self.data.train, "dev": self.data.dev}


def read_tagged_sentences(
    settings: FeatureConfig, choices: Iterable[LayerChoice], device: str
) -> TaggedSentences:
    """Read the model and the data, and check them.

    Raises the errors of `prepare_features`.
    """
    loaded = load_model(resolve_run(settings.model), heads=())
    model, tokenizer = loaded.model, loaded.tokenizer()
    length, depth = settings.length or model.config.max_positions, model.config.depth
    layers = tuple(sorted({layer for choice in choices for layer in chosen_layers(choice, depth)}))
    report_findings(check_model(model.config, tokenizer, length))
    reading = settings.task.read(settings.train, settings.task.columns)
    train, task = list(reading.examples), reading.task
    fraction = parse_part(settings.dev)
    if fraction is None:
        dev = list(task.read(settings.dev, settings.task.columns).examples)
    else:
        split = split_examples(settings.task, train, fraction)
        train, dev = split.train, split.dev
    data = label(task, tokenizer, train, dev, length)
    return TaggedSentences(
        Tagger(settings.task, model, tokenizer, data.labels, length)
        .to(choose_device(device))
        .eval(),
        data,
        layers,
    )


def forecast_features(sentences: TaggedSentences, settings: FeatureConfig, folder: Path) -> Finding:
    """Return a forecast of the time for features and training.

    Features that the folder holds take no time. Torch's generator is used.
    """
    steps = [*_encoding(sentences, settings, folder), _fitting(sentences, settings)]
    left = time_text(sum(seconds for _, seconds in steps))
    return Finding(
        "time", "note", f"{', '.join(text for text, _ in steps)}, as measured now: about {left}"
    )


def _encoding(
    sentences: TaggedSentences, settings: FeatureConfig, folder: Path
) -> list[tuple[str, float]]:
    """Return the description and seconds of the encoder's work; empty if there is none."""
    encoder, layers = sentences.learner.model.encoder, sentences.layers
    left = [
        sum(map(tokens_in, inputs))
        for name, inputs in sentences.splits.items()
        if not holds(folder / name, encoder, inputs, layers, settings.stored)
    ]
    if not left:
        return []
    tokens, rate = sum(left), encoder_speed(encoder, sentences.data.train)
    return [(f"{tokens:,} tokens through the encoder at {rate:,.0f} a second", tokens / rate)]


def _fitting(sentences: TaggedSentences, settings: FeatureConfig) -> tuple[str, float]:
    """Return the description and seconds of the tagger's training."""
    data, until = sentences.data, settings.training.end
    if isinstance(until, Hours):
        return f"{until} of training", 3600 * until.count
    train, dev = (sum(map(words_in, inputs)) for inputs in (data.train, data.dev))
    words = words_read(settings, train, dev, len(data.train))
    assert words is not None
    rate = tagger_speed(settings, sentences.learner.model.encoder, data.train, len(data.labels))
    return (
        f"{words:,.0f} words through the tagger at {rate:,.0f} a second in training",
        words / rate,
    )


def words_read(
    settings: FeatureConfig, train: int | float, dev: int | float, sentences: int
) -> float | None:
    """Return the number of words that a run's training reads.

    Words of evaluations count by their cost relative to training.

    Args:
        train, dev: number of words of the data.
        sentences: number of sentences of the training data.

    Returns:
        None if the number depends on the speed of the run.
    """
    amount = _amount_read(settings.training.end, settings.batch, train, sentences)
    return None if amount is None else amount * (1 + dev / train / (1 + BACKWARD))


def _amount_read(
    until: Duration, batch: ExampleBudget | TokenBudget, words: int | float, sequences: int
) -> int | float | None:
    """Return the number of words that a run reads; None if it depends on the run's speed.

    Args:
        words, sequences: number of words and of sentences in the data.
    """
    match until, batch:
        case Epochs(count), _:
            return count * words
        case Tokens(count), _:
            return count
        case Steps(count), ExampleBudget(n):
            return count * n * words / sequences
        case Steps(count), TokenBudget(n):
            return count * n
        case _:
            return None


def tokens_in(item: EncodedExample) -> int:
    """Return the number of tokens that the encoder reads for a sentence, with special tokens and
    context.
    """
    return sum(map(len, item.sequences))


def words_in(item: EncodedExample) -> int:
    """Return the number of words that have a vector."""
    return sum(len(sequence.target("tag", TokenTargets).index) for sequence in item.sequences)


def encoder_speed(encoder: Encoder, inputs: Many[EncodedExample]) -> float:
    """Return the tokens per second of the encoder, timed on a sample of the data."""
    ordered = sorted((item for item in inputs if item.sequences), key=tokens_in)
    stride = max(1, sum(map(tokens_in, ordered)) // SAMPLE)
    sample = ordered[min(stride, len(ordered)) // 2 :: stride]
    table = np.empty((sum(map(words_in, sample)), 1, encoder.width), dtype=np.float32)
    seconds = 0.0
    for _ in range(2):  # the first pass is slower than the others
        start = time.perf_counter()
        extract(encoder, sample, (0,), table)  # the encoder computes all layers in any case
        seconds = time.perf_counter() - start
    return sum(map(tokens_in, sample)) / seconds


def tagger_speed(
    settings: FeatureConfig, encoder: Encoder, inputs: Many[EncodedExample], labels: int
) -> float:
    """Return the words per second in training, timed on one batch; torch's generator is used."""
    counts = _batch_of(sorted(filter(None, map(words_in, inputs))), settings.batch)
    depth = encoder.config.depth
    layers, words = chosen_layers(settings.layers, depth), sum(counts)
    values = np.random.default_rng(0).standard_normal(
        (words, len(layers), encoder.width), dtype=np.float32
    )
    features = Features(values, layers, np.cumsum([0, *counts]), np.zeros(words, dtype=np.int64))
    tagger = FeatureTagger([features], settings.layers, depth, labels, settings.tagger).to(
        device_of(encoder)
    )
    return speed(tagger, pack(features.sequences()), settings.training.precision)


def _batch_of(counts: list[int], batch: ExampleBudget | TokenBudget) -> list[int]:
    """Return an even sample of these sorted numbers of words, about as large as a batch."""
    match batch:
        case ExampleBudget(n):
            stride = len(counts) // n
        case TokenBudget(n):
            stride = sum(counts) // n
        case _:
            assert_never(batch)
    stride = min(max(1, stride), len(counts))
    return counts[stride // 2 :: stride]
