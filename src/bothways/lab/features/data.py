"""Preparation of a run on frozen features: settings, model and data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from bothways.core.config.checks import require_seed
from bothways.core.finding import report_findings
from bothways.core.runtime.devices import choose_device
from bothways.data.batching import ExampleBudget, TokenBudget
from bothways.finetuning.data import LabelledData, label
from bothways.finetuning.splits import parse_part, split_examples
from bothways.hub.model_folder import load_model
from bothways.hub.resolve import resolve_run
from bothways.lab.features.tagger import BiLSTMTagger, Stored
from bothways.model.layer_mix import LayerChoice, chosen_layers
from bothways.tasks.tagging.task import Tagger, TaggingTask
from bothways.training.durations import Epochs
from bothways.training.optimizers import AdamW
from bothways.training.preflight.text import check_model
from bothways.training.run import Training
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
        stored: the type of the features on the disk.
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
    stored: Stored = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        require_seed(seed=self.seed)


@dataclass(frozen=True)
class TaggedSentences:
    """Sentences to be read by the encoder.

    Attributes:
        task_model: decodes and scores sentences; its model has no head and is on its device.
        data: checked and encoded.
        layers: all layers of the encoder that are needed.
    """

    task_model: Tagger
    data: LabelledData
    layers: tuple[int, ...]


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
    tagger = Tagger(settings.task, model, tokenizer, data.labels, length)
    return TaggedSentences(tagger.to(choose_device(device)).eval(), data, layers)
