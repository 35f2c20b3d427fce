"""Tagging with frozen features: the encoder runs once over the data, then only a BiLSTM is trained.

Source: Devlin et al. 2018, section 5.3 and table 7. `bothways.finetuning.run` with the task `tag`
fine-tunes the encoder instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from bothways.core.config.checks import require_seed
from bothways.core.finding import report_findings
from bothways.core.progress import SILENT, Part, Progress
from bothways.core.runtime.devices import choose_device, own_torch_state
from bothways.core.training_module import evaluating
from bothways.data.batching import ExampleBudget, TokenBudget
from bothways.data.list_source import ListSource
from bothways.data.loader import Loader, Share, in_batches, unchanged
from bothways.finetuning.data import label
from bothways.finetuning.splits import parse_part, split_examples
from bothways.hub.model_folder import load_model
from bothways.hub.resolve import resolve_run
from bothways.lab.features.tagger import BiLSTMTagger, Features, FeatureTagger, open_features
from bothways.model.layer_mix import LayerChoice, LayerSum, chosen_layers
from bothways.tasks.base import EncodedExample, Metrics, Output
from bothways.tasks.predictions import TagPrediction
from bothways.tasks.tagging.examples import TagExample
from bothways.tasks.tagging.task import Tagger, TaggingTask
from bothways.training.checkpoint import Best, Keep, MemoryStore
from bothways.training.durations import Epochs, RunState
from bothways.training.encoding_checks import check_model
from bothways.training.optimizers import AdamW
from bothways.training.parallel import Single
from bothways.training.run import Training, TrainingPhase, TrainingRun
from bothways.training.schedules import Linear


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
        training: training of the tagger; the dev data is scored after every epoch, and the best
            weights are kept.
        batch: sentences or words per update.
        seed: random seed for the tagger, the order of the data and dropout.
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
    seed: int = 0

    def __post_init__(self) -> None:
        require_seed(seed=self.seed)


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


def prepare_features(
    settings: FeatureConfig,
    folder: Path,
    choices: Iterable[LayerChoice],
    *,
    device: str = "auto",
    progress: Progress = SILENT,
) -> FeatureData:
    """Read the data and compute the features for all choices, or take them from the folder.

    Raises:
        BothwaysError: the data has errors; one message lists all of them.
        ConfigError: the encoder has too few blocks for a choice, or too few positions for the
            length.
        FolderError: the model cannot be read.
        ResourceError: the disk is full.
    """
    progress.stage("reading the model and the data")
    loaded = load_model(resolve_run(settings.model), heads=())
    model, tokenizer = loaded.model, loaded.tokenizer()
    length, depth = settings.length or model.config.max_positions, model.config.depth
    layers = tuple(sorted({layer for choice in choices for layer in chosen_layers(choice, depth)}))
    report_findings(check_model(model.config, tokenizer, length))
    reading = settings.task.read(settings.train, settings.task.columns)
    train, task = list(reading.examples), reading.task
    dev_part = parse_part(settings.dev)
    if dev_part is None:
        dev = list(task.read(settings.dev, settings.task.columns).examples)
    else:
        split = split_examples(settings.task, train, dev_part)
        train, dev = split.train, split.dev
    data = label(task, tokenizer, train, dev, length)
    for finding in data.findings:
        progress.message(f"{finding.severity}: {finding}")
    tagger = Tagger(settings.task, model, tokenizer, data.labels, length)
    tagger.to(choose_device(device)).eval()
    vectors, dev_vectors = (
        open_features(folder / name, model.encoder, inputs, layers, Part(progress, name))
        for name, inputs in (("train", data.train), ("dev", data.dev))
    )
    return FeatureData(tagger, vectors, dev_vectors, data.dev_examples, depth)


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
    """Return a tagger with random weights; ConfigError if the features lack a layer."""
    tables, labels = [data.train, data.dev], len(data.task_model.labels)
    return FeatureTagger(tables, settings.layers, data.depth, labels, settings.tagger)


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
