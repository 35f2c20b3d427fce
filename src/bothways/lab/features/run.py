"""Tagging with frozen features: the encoder runs once over the data, then only a BiLSTM is trained.

Source: Devlin et al. 2018, section 5.3 and table 7. `bothways.finetuning.run` with the task `tag`
fine-tunes the encoder instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bothways.core.errors import ConfigError
from bothways.core.progress import SILENT, Part, Progress
from bothways.core.runtime.devices import choose_device, own_torch_state
from bothways.core.training_module import evaluating
from bothways.data.list_source import ListSource
from bothways.data.loader import Loader, Share, in_batches, unchanged
from bothways.lab.features.data import FeatureConfig, read_tagged_sentences
from bothways.lab.features.tagger import Features, FeatureTagger, open_features
from bothways.model.layer_mix import LayerChoice, LayerSum, chosen_layers
from bothways.tasks.base import EncodedExample, Metrics, Output
from bothways.tasks.predictions import TagPrediction
from bothways.tasks.tagging.examples import TagExample
from bothways.tasks.tagging.task import Tagger
from bothways.training.checkpoint import Best, Keep
from bothways.training.durations import Epochs
from bothways.training.parallel import Single
from bothways.training.run import TrainingPhase, TrainingRun
from bothways.training.state import RunState
from bothways.training.store import MemoryStore


@dataclass(frozen=True)
class FeatureData:
    """Frozen features of training and dev data, for any number of runs.

    Attributes:
        task_model: decodes and scores sentences; its model has no head.
        train, dev: the features.
        dev_examples: the sentences to score.
        depth: number of blocks of the encoder.
    """

    task_model: Tagger
    train: Features
    dev: Features
    dev_examples: tuple[TagExample, ...]
    depth: int


@dataclass(frozen=True)
class FeatureResult:
    """The result of a run on frozen features.

    Attributes:
        layers: the layers of the encoder that were read.
        tagger: tagger with the weights that were best on the dev data.
        metrics: metrics on the dev data, "f1" among them.
        history: (epochs, F1) of every evaluation.
        shares: learned weights of the layers in a weighted sum; empty for other choices.
        progress: counters at the end.
    """

    layers: LayerChoice
    tagger: FeatureTagger
    metrics: Metrics
    history: tuple[tuple[float, float], ...]
    shares: tuple[float, ...]
    progress: RunState


def feature_based(
    settings: FeatureConfig,
    folder: Path,
    *,
    device: str = "auto",
    progress: Progress = SILENT,
) -> FeatureResult:
    """Compute features, unless the folder has them, and train on them.

    Raises the errors of `prepare_features` and `fit_features`.
    """
    data = prepare_features(settings, folder, [settings.layers], device=device, progress=progress)
    return fit_features(data, settings, device=device, progress=progress)


def prepare_features(
    settings: FeatureConfig,
    folder: Path,
    choices: Iterable[LayerChoice],
    *,
    device: str = "auto",
    progress: Progress = SILENT,
) -> FeatureData:
    """Read the data and compute the features for all choices, or take them from the folder.

    Args:
        progress: receives stages and warnings.

    Raises:
        BothwaysError: the data has errors; one message lists all of them.
        ConfigError: the encoder has too few blocks for a choice, or too few positions for the
            length.
        FolderError: the model cannot be read.
        ResourceError: the disk is full.
    """
    progress.stage("reading the model and the data")
    sentences = read_tagged_sentences(settings, choices, device)
    for finding in sentences.data.findings:
        progress.message(f"{finding.severity}: {finding}")
    task_model, encoder = sentences.task_model, sentences.task_model.model.encoder
    train, dev = (
        open_features(
            folder / name, encoder, inputs, sentences.layers, settings.stored, Part(progress, name)
        )
        for name, inputs in (("train", sentences.data.train), ("dev", sentences.data.dev))
    )
    return FeatureData(task_model, train, dev, sentences.data.dev_examples, encoder.config.depth)


@own_torch_state(torch.float32)
def fit_features(
    data: FeatureData,
    settings: FeatureConfig,
    *,
    device: str = "auto",
    progress: Progress = SILENT,
) -> FeatureResult:
    """Train a tagger on features; only the settings of layers, tagger and training are used.

    Raises:
        BothwaysError: a loss or a gradient is not finite.
        ConfigError: the schedule does not fit the run, or the features lack a layer.
    """
    torch.manual_seed(settings.seed)
    tagger = build_tagger(data, settings).to(choose_device(device))
    source = ListSource(data.train.sequences(), settings.seed)
    budget = max(len(sequence) for sequence in source.sequences) * 64
    loader = Loader(source, unchanged, settings.batch, budget, settings.seed, Share())
    store, best = MemoryStore(), Best("f1", "highest")
    state = TrainingRun(
        tagger,
        [TrainingPhase(settings.training.end, lambda state: loader.steps(state.cursor))],
        dataclasses.replace(settings.training, evaluate=Epochs(1.0), keep=Keep(1, best)),
        Single(),
        store,
        evaluation=lambda _: data.task_model.score(tag_words(tagger, data)),
        progress=progress,
    ).train()
    store.load_best(tagger, best)
    mix = tagger.eval().mix
    shares = tuple(mix.weights.softmax(0).tolist()) if isinstance(mix, LayerSum) else ()
    history = tuple((epochs, metrics["f1"]) for epochs, metrics in store.history)
    return FeatureResult(settings.layers, tagger, store.metrics, history, shares, state)


def build_tagger(data: FeatureData, settings: FeatureConfig) -> FeatureTagger:
    """Return a tagger with random weights.

    Raises:
        ConfigError: the features lack a layer.
    """
    missing = set(chosen_layers(settings.layers, data.depth)) - set(data.train.layers) & set(
        data.dev.layers
    )
    if missing:
        message = f"the features do not hold layer {min(missing)}"
        raise ConfigError(message, where="layers", fix="Prepare them for this choice.")
    return FeatureTagger(
        [data.train, data.dev],
        settings.layers,
        data.depth,
        len(data.task_model.labels),
        settings.tagger,
    )


@torch.no_grad()
def tag_words(
    tagger: FeatureTagger, data: FeatureData, words: int = 8192
) -> list[tuple[TagExample, TagPrediction]]:
    """Return the dev sentences with their predictions, without dropout.

    The tagger's mode is restored.

    Args:
        words: maximum number of words in a batch, unless a sentence has more.
    """
    sequences, outputs = data.dev.sequences(start=len(data.train.values)), dict[int, Output]()
    with evaluating(tagger):
        for indices, batch in in_batches(sequences, words, tagger.dense.weight.device):
            logits = tagger.logits(batch).float().cpu().numpy()
            parts = np.split(logits, np.cumsum(batch.layout.lengths)[:-1])
            outputs.update(zip(indices, parts, strict=True))
    # A sentence without words has no sequence.
    rows, decode = (outputs[index] for index in range(len(sequences))), data.task_model.decode
    empty, unread = np.zeros((0, len(data.task_model.labels)), np.float32), EncodedExample((), 0, 0)
    return [
        (example, decode(example, unread, [next(rows) if example.words else empty]))
        for example in data.dev_examples
    ]
