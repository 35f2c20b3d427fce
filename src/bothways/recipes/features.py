"""Tagging with frozen features: the encoder runs once over the data, then only a BiLSTM is trained.

Devlin et al. 2018, section 5.3 and table 7. Its fine-tuned counterpart is `recipes.finetune` with the task tag.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from bothways.core.batch import pack
from bothways.core.errors import ConfigError
from bothways.core.hardware import choose_device
from bothways.core.learner import Cursor
from bothways.core.sequence import Sequence
from bothways.data.listed import ListSource, Shuffled
from bothways.data.loader import Loader, Share
from bothways.data.packing import Examples, Tokens, deal
from bothways.interop.folder import load_model
from bothways.interop.hub import model_folder
from bothways.model.layers import LayerChoice, LayerSum, chosen_layers
from bothways.recipes.labelled import label
from bothways.tasks.definition import Metrics
from bothways.tasks.features import BiLSTMTagger, Features, FeatureTagger, Stored, open_features
from bothways.tasks.predictions import TagPrediction
from bothways.tasks.preflight import check_model, settle
from bothways.tasks.tag import Tag, Tagging
from bothways.tasks.tagged import TagExample
from bothways.tasks.task import Output
from bothways.text.tokenizer import Tokenizer
from bothways.training.checkpoint import Best
from bothways.training.memory import train
from bothways.training.optim import AdamW
from bothways.training.run import Training
from bothways.training.schedule import Linear
from bothways.training.state import Epochs, Progress


def adam() -> Training:
    """Twenty epochs of AdamW at 1e-3: the paper says nothing of it. The LSTM is small, so it is trained in fp32."""
    return Training(until=Epochs(20.0), optimiser=AdamW(lr=1e-3, decay=0.0), schedule=Linear(0.05), precision="fp32")


@dataclass(frozen=True, kw_only=True)
class FeatureConfig:
    """Everything that decides what a run on frozen features computes.

    Attributes:
        model: a model folder, the folder of a run, or a Hub id.
        train, dev: sentences with tags: files or Hub data sets.
        layers: which of the encoder's, and how they become one vector.
        task: how the data is read; the paper gives the encoder all of the document that fits.
        length: the longest sequence in tokens; none means as many as the model has positions.
        tagger: what is trained.
        training: of it; the dev data is scored after every epoch, and the best weights are kept.
        batch: sentences or words per update.
        stored: the type of the features on the disk.
        seed: of the tagger, the order of the data and dropout.
    """

    model: str
    train: str
    dev: str
    layers: LayerChoice = "concat_last_four"
    task: Tagging = Tagging(context="document")
    length: int | None = None
    tagger: BiLSTMTagger = BiLSTMTagger()
    training: Training = field(default_factory=adam)
    batch: Examples | Tokens = Examples(32)
    stored: Stored = "float32"
    seed: int = 0


@dataclass(frozen=True)
class FeatureData:
    """Frozen features of training and dev data, for any number of runs.

    Attributes:
        task: how sentences are decoded and scored; its model has no head.
        train, dev: the features.
        dev_examples: the sentences to score.
        depth: blocks of the encoder.
    """

    task: Tag
    train: Features
    dev: Features
    dev_examples: tuple[TagExample, ...]
    depth: int


@dataclass(frozen=True)
class FeatureBased:
    """What a run came to.

    Attributes:
        layers: what was read of the encoder.
        tagger: with the weights that were best on the dev data.
        metrics: of the dev data, "f1" among them.
        history: (epochs, F1) of every evaluation.
        shares: of the layers in a weighted sum, as learned; empty for other choices.
        progress: at the end.
    """

    layers: LayerChoice
    tagger: FeatureTagger
    metrics: Metrics
    history: tuple[tuple[float, float], ...]
    shares: tuple[float, ...]
    progress: Progress


def feature_based(
    settings: FeatureConfig,
    folder: Path,
    *,
    device: str = "auto",
    on_share: Callable[[float], None] = lambda share: None,
    on_step: Callable[[Progress], None] = lambda progress: None,
) -> FeatureBased:
    """Compute features, unless the folder has them, and train on them; errors as `prepare_features` and `fit_features`."""
    data = prepare_features(settings, folder, [settings.layers], device=device, on_share=on_share)
    return fit_features(data, settings, device=device, on_step=on_step)


def prepare_features(
    settings: FeatureConfig,
    folder: Path,
    choices: Iterable[LayerChoice],
    *,
    device: str = "auto",
    on_share: Callable[[float], None] = lambda share: None,
) -> FeatureData:
    """Read the data and compute the features for all of these choices, or take them from the folder.

    Args:
        on_share: told the share of all tokens that is done, where there is something to compute.

    Raises:
        BothwaysError: what is wrong with the data, all in one message.
        ConfigError: the encoder has too few blocks for a choice, or too few positions for the length.
        FolderError: the model cannot be read.
        ResourceError: there is no room for the features.
    """
    loaded = load_model(model_folder(settings.model), heads=())
    model, tokenizer = loaded.model, Tokenizer.load(loaded.folder).for_segments(loaded.model.config.segments)
    length, depth = settings.length or model.config.most, model.config.depth
    layers = tuple(sorted({layer for choice in choices for layer in chosen_layers(choice, depth)}))
    settle(check_model(model.config, tokenizer, length))
    reading = settings.task.read(settings.train, settings.task.columns)
    train, definition = list(reading.examples), reading.definition
    dev = list(definition.read(settings.dev, settings.task.columns).examples)
    data = label(definition, tokenizer, train, dev, length)
    task = Tag(settings.task, model, tokenizer, data.labels, length).to(choose_device(device)).eval()
    encoder = task.model.encoder
    part = sum(item.tokens for item in data.train) / max(1, sum(item.tokens for item in (*data.train, *data.dev)))
    stored = [
        open_features(folder / "train", encoder, data.train, layers, settings.stored, lambda share: on_share(part * share)),
        open_features(
            folder / "dev", encoder, data.dev, layers, settings.stored, lambda share: on_share(part + (1 - part) * share)
        ),
    ]
    return FeatureData(task, stored[0], stored[1], data.dev_examples, depth)


def fit_features(
    data: FeatureData,
    settings: FeatureConfig,
    *,
    device: str = "auto",
    on_step: Callable[[Progress], None] = lambda progress: None,
) -> FeatureBased:
    """Train a tagger on features; of `settings` counts what concerns the layers and the training.

    Raises:
        BothwaysError: a loss or a gradient is not finite.
        ConfigError: the schedule does not fit the run, or the features lack a layer.
    """
    torch.manual_seed(settings.seed)
    tagger = build_tagger(data, settings).to(choose_device(device))
    source = ListSource(data.train.sequences(), Shuffled(settings.seed))
    budget = max(len(sequence) for sequence in source.sequences) * 64
    trained = train(
        tagger,
        Loader(source, tagger.prepare, settings.batch, budget, settings.seed, Share()).steps(Cursor()),
        dataclasses.replace(settings.training, evaluate=Epochs(1.0)),
        Best("f1", "highest"),
        lambda: data.task.score(tag_words(tagger, data)),
        on_step=on_step,
    )
    mix = tagger.eval().mix
    shares = tuple(mix.weights.softmax(0).tolist()) if isinstance(mix, LayerSum) else ()
    history = tuple((epochs, metrics["f1"]) for epochs, metrics in trained.history)
    return FeatureBased(settings.layers, tagger, trained.metrics, history, shares, trained.progress)


def build_tagger(data: FeatureData, settings: FeatureConfig) -> FeatureTagger:
    """A tagger with random weights. ConfigError for a layer that the features lack."""
    missing = set(chosen_layers(settings.layers, data.depth)) - set(data.train.layers) & set(data.dev.layers)
    if missing:
        raise ConfigError(f"the features do not hold layer {min(missing)}", where="layers", fix="Prepare them for this choice.")
    return FeatureTagger([data.train, data.dev], settings.layers, data.depth, len(data.task.labels), settings.tagger)


def tag_words(tagger: FeatureTagger, data: FeatureData, words: int = 8192) -> Iterator[tuple[TagExample, TagPrediction]]:
    """The dev sentences with their predictions, without dropout; the tagger keeps the mode it had.

    Args:
        words: the most that go through the tagger at once, unless a sentence has more.
    """
    outputs = iter(_outputs(tagger, data.dev.sequences(start=len(data.train.values)), words))
    empty = np.zeros((0, len(data.task.labels)), dtype=np.float32)
    for example in data.dev_examples:
        yield example, data.task.decode(example, [next(outputs) if example.words else empty])


@torch.no_grad()
def _outputs(tagger: FeatureTagger, sequences: Many[Sequence], words: int) -> list[Output]:
    """The logits of each sentence `(words, labels)`."""
    outputs: dict[int, Output] = {}
    training, device = tagger.training, tagger.dense.weight.device
    tagger.eval()
    for places in deal([len(sequence) for sequence in sequences], 1, words)[0] if sequences else []:
        batch = pack([sequences[place] for place in places]).to(device)
        logits = tagger.logits(batch).float().cpu().numpy()
        outputs.update(zip(places, np.split(logits, np.cumsum(batch.layout.lengths)[:-1]), strict=True))
    tagger.train(training)
    return [outputs[place] for place in range(len(sequences))]


def restarts(data: FeatureData, settings: FeatureConfig, seeds: Many[int], *, device: str = "auto") -> list[FeatureBased]:
    """The same run from several seeds: the paper reports the mean of five."""
    return [fit_features(data, dataclasses.replace(settings, seed=seed), device=device) for seed in seeds]
