"""The feature-based approach: a BiLSTM reads a frozen encoder's vectors of words.

The encoder runs once over the data: the vector of each word's first token is kept on the disk. Only
a two-layer BiLSTM over the words of a sentence and a dense layer are trained. The task `tag` of
`bothways.finetuning.run` fine-tunes the encoder instead.

The paper gives the BiLSTM 768 dimensions; here each direction has 768. The paper does not specify
the dropout; here it is applied to the features, between the layers and before the dense layer.

Source: Devlin et al. 2018, section 5.3, table 7.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence as Many
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int64
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils import rnn

from bothways.core.batch import IGNORED, Batch, Layout, TokenTargets
from bothways.core.config.values import require_at_least, require_range, require_seed
from bothways.core.errors import BothwaysError, ConfigError, report_findings
from bothways.core.files import create_array, read_object, replace_folder
from bothways.core.progress import SILENT, Part, Progress
from bothways.core.runtime.devices import choose_device, device_of, own_torch_state
from bothways.core.source import Sequence
from bothways.core.training_module import Loss, TrainingModule, evaluating
from bothways.data.loader import (
    ExampleBudget,
    ListSource,
    Loader,
    TokenBudget,
    in_batches,
    unchanged,
)
from bothways.finetuning.config import FinetuneConfig
from bothways.finetuning.data import label, read_examples
from bothways.hub.model_folder import check_replaceable, load_model
from bothways.hub.resolve import resolve_run
from bothways.lab.features import LayerChoice
from bothways.model.kernels.cross_entropy import cross_entropy
from bothways.model.kernels.dropout import Dropout
from bothways.model.model import Encoder
from bothways.tasks.base import EncodedExample, Metrics, Output
from bothways.tasks.predictions import TagPrediction
from bothways.tasks.tagging.examples import TagExample
from bothways.tasks.tagging.task import Tagger, TaggingTask
from bothways.training.checkpoint import Best, Keep, MemoryStore
from bothways.training.encoding_checks import check_model
from bothways.training.optimizers import AdamW
from bothways.training.parallel import Plan
from bothways.training.run import Training, TrainingPhase, TrainingRun
from bothways.training.schedules import Epochs, Linear, RunState


class BiLSTM(nn.Module):
    """Layers of bidirectional LSTMs over packed tokens, with torch's own initialisation.

    Source: Hochreiter and Schmidhuber 1997; Graves and Schmidhuber 2005 for both directions.

    Args:
        width: features of the input.
        hidden: features of each direction; the output has twice as many, forward first.
    """

    def __init__(self, width: int, hidden: int, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        rate = dropout if layers > 1 else 0.0
        self.lstm = nn.LSTM(width, hidden, layers, dropout=rate, bidirectional=True)
        self.width = 2 * hidden

    def forward(
        self, x: Float[Tensor, "tokens width"], layout: Layout
    ) -> Float[Tensor, "tokens hidden"]:
        """Read each sequence by itself."""
        sequences, number = x.split(layout.lengths), layout.sequences
        # The longest first, as torch packs them; of equal lengths dropout needs one order.
        order = sorted(range(number), key=lambda index: -layout.lengths[index])
        packed = rnn.pack_sequence([sequences[index] for index in order])
        if packed.is_cuda:
            packed = packed.to(next(self.lstm.parameters()).dtype)
        # Autocast would run cuDNN in fp16 whatever precision was asked for, and gradients would
        # vanish.
        with torch.autocast("cuda", enabled=False):
            outputs = rnn.unpack_sequence(self.lstm(packed)[0])
        return torch.cat([outputs[order.index(index)] for index in range(number)])


def chosen_layers(choice: LayerChoice, depth: int) -> tuple[int, ...]:
    """Return the layers that a choice reads: 0 for the embeddings, `depth` for the last block.

    Raises:
        ConfigError: the encoder has too few blocks.
    """
    first, last = {
        "embeddings": (0, 0),
        "second_to_last": (depth - 1, depth - 1),
        "last": (depth, depth),
        "weighted_last_four": (depth - 3, depth),
        "concat_last_four": (depth - 3, depth),
        "weighted_all": (1, depth),
    }[choice]
    if first < 1 and choice != "embeddings":
        message = f"{choice!r} needs more blocks than the encoder's {depth}"
        raise ConfigError(message, where="layers", fix="Choose last.")
    return tuple(range(first, last + 1))


class LayerSum(nn.Module):
    """γ · Σ softmax(w)ₖ · layerₖ, at first the mean: as ELMo's (Peters et al. 2018, section 3.2),
    without its layer normalisation.
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(layers))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Float[Tensor, "tokens layers width"]) -> Float[Tensor, "tokens width"]:
        """Return one vector of each token's layers."""
        return self.scale * torch.einsum("tlw,l->tw", x, self.weights.softmax(0))


_VALUES, _ABOUT = "features.npy", "features.json"
AT_ONCE = 8192
"""Maximum number of tokens of the encoder, or words of the tagger, in a batch without gradients,
unless a sequence has more."""


@dataclass(frozen=True)
class BiLSTMTagger:
    """The shape of the tagger that is trained on the features.

    Attributes:
        hidden: width of each direction.
        depth: number of layers.
        dropout: rate on the features, between layers, and before the dense layer.
    """

    hidden: int = 768
    depth: int = 2
    dropout: float = 0.5

    def __post_init__(self) -> None:
        require_at_least(1, "tagger", hidden=self.hidden, depth=self.depth)
        require_range("[0, 1)", "tagger", dropout=self.dropout)


@dataclass(frozen=True, eq=False)
class Features:
    """Frozen vectors of the words of some sentences.

    Attributes:
        values: `(words, layers, width)`, mapped from the disk.
        layers: the encoder's layers in `values`; 0 is the embeddings.
        offsets: sentence i is the words `[offsets[i], offsets[i+1])`.
        labels: label of every word; `IGNORED` if unknown.
    """

    values: NDArray[np.floating]
    layers: tuple[int, ...]
    offsets: Int64[np.ndarray, " bounds"]
    labels: Int64[np.ndarray, " words"]

    def sequences(self, start: int = 0) -> list[Sequence]:
        """Return the sentences that have a word, with their labels as targets.

        The ids are the rows of the values, counted from `start`.
        """
        return [
            Sequence(
                np.arange(begin + start, end + start, dtype=np.int32),
                np.zeros(end - begin, dtype=np.int8),
                {"tag": TokenTargets(np.arange(end - begin), self.labels[begin:end])},
            )
            for begin, end in itertools.pairwise(self.offsets.tolist())
            if end > begin
        ]


def open_features(
    folder: Path,
    encoder: Encoder,
    inputs: Many[EncodedExample],
    layers: tuple[int, ...],
    progress: Progress = SILENT,
) -> Features:
    """Return the features of tagged sentences, from the folder or computed.

    In the folder, one for each data set, those of other encoders or tokens are replaced, and
    missing layers are added.

    Raises:
        FolderError: the folder holds other files.
        ResourceError: the disk is full, or permission is denied.
    """
    words = [
        np.concatenate([np.asarray(s.target("tag", TokenTargets).ids) for s in item.sequences])
        for item in inputs
    ]
    offsets = np.cumsum([0, *(len(labels) for labels in words)], dtype=np.int64)
    labels = np.concatenate([*words, np.zeros(0, dtype=np.int64)])
    if not len(labels):
        nothing = np.zeros((0, len(layers), encoder.config.width), "float32")
        return Features(nothing, layers, offsets, labels)
    # What features depend on: weights, tokens and first tokens of words.
    key = hashlib.sha256(repr(encoder.config).encode())
    for name, tensor in sorted(encoder.state_dict().items()):
        key.update(name.encode())
        key.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    for sequence in (sequence for item in inputs for sequence in item.sequences):
        word_index = np.asarray(sequence.target("tag", TokenTargets).index)
        for array in (sequence.ids, sequence.segments, word_index):
            key.update(np.int64(array.size).tobytes() + array.tobytes())
    digest, cached = key.hexdigest(), tuple[int, ...]()
    with contextlib.suppress(BothwaysError):  # no features, or unreadable ones
        record = read_object(folder / _ABOUT)
        cached = tuple(record.get("layers", ())) if record.get("key") == digest else ()
    missing = tuple(layer for layer in layers if layer not in cached)
    if missing:
        check_replaceable(folder, [_ABOUT, _VALUES], "features")
        with replace_folder(folder) as hidden:
            shape = (len(labels), len(cached) + len(missing), encoder.config.width)
            table = create_array(hidden / _VALUES, np.float32, shape)
            if cached:
                table[:, : len(cached)] = np.load(folder / _VALUES, mmap_mode="r")
            extract(encoder, inputs, missing, table[:, len(cached) :], progress)
            table.flush()
            cached += missing
            about = json.dumps({"key": digest, "layers": list(cached)})
            (hidden / _ABOUT).write_text(f"{about}\n", encoding="utf8")
    return Features(np.load(folder / _VALUES, mmap_mode="r"), cached, offsets, labels)


@torch.no_grad()
def extract(
    encoder: Encoder,
    inputs: Many[EncodedExample],
    layers: tuple[int, ...],
    table: NDArray[np.floating],
    progress: Progress = SILENT,
) -> None:
    """Write the vectors of each word's first token into a table `(words, layers, width)`, without
    dropout."""
    sequences = [sequence for item in inputs for sequence in item.sequences]
    counts = [len(sequence.target("tag", TokenTargets).index) for sequence in sequences]
    starts = np.cumsum([0, *counts])
    done = 0
    progress.stage("computing features", sum(map(len, sequences)))
    with evaluating(encoder):
        for indices, batch in in_batches(sequences, AT_ONCE, device_of(encoder)):
            index = torch.as_tensor(batch.target("tag", TokenTargets).index)
            hidden = encoder(batch, keep_layers=True).layers
            chosen = torch.stack([hidden[layer][index] for layer in layers], dim=1)
            vectors = chosen.float().cpu().numpy()
            # Batches are ordered by length; rows go back to the place of their sentence.
            table[np.concatenate([np.arange(starts[n], starts[n + 1]) for n in indices])] = vectors
            done += batch.layout.tokens
            progress.advance(done)


class FeatureTagger(TrainingModule):
    """A BiLSTM on frozen features, with an output for each tag.

    Args:
        tables: the features; the ids of a batch are rows of their concatenation.
        choice: the layers that it reads, and how they become one vector.
    """

    def __init__(
        self,
        tables: Many[Features],
        choice: LayerChoice,
        depth: int,
        labels: int,
        shape: BiLSTMTagger = BiLSTMTagger(),
    ) -> None:
        super().__init__()
        layers = chosen_layers(choice, depth)
        if missing := [n for n in layers for table in tables if n not in table.layers]:
            message = f"the features do not hold layer {min(missing)}"
            raise ConfigError(message, where="layers", fix="Prepare them for this choice.")
        self._tables = tuple(tables)
        # Columns per table: one may hold more layers than another.
        self._columns = [[table.layers.index(layer) for layer in layers] for table in tables]
        width = tables[0].values.shape[2]
        weighted = choice.startswith("weighted")
        self.mix = LayerSum(len(layers)) if weighted else nn.Flatten()
        self.input_dropout = Dropout(shape.dropout)
        self.lstm = BiLSTM(
            width * len(layers) if choice == "concat_last_four" else width,
            shape.hidden,
            shape.depth,
            shape.dropout,
        )
        self.output_dropout = Dropout(shape.dropout)
        self.dense = nn.Linear(self.lstm.width, labels)

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the number of tagged words."""
        return {"tag": float((_labels(batch) != IGNORED).sum())}

    def forward(self, batch: Batch) -> Mapping[str, Loss]:
        """Return the cross-entropy of the tags."""
        return {"tag": cross_entropy(self.logits(batch), _labels(batch))}

    def logits(self, batch: Batch) -> Float[Tensor, "words labels"]:
        """Return one logit per label for each word."""
        mixed = self.input_dropout(self.mix(self.read(batch)))
        result: Tensor = self.dense(self.output_dropout(self.lstm(mixed, batch.layout)))
        return result

    def read(self, batch: Batch) -> Float[Tensor, "words layers width"]:
        """Return the features of a batch, on its device."""
        rows, start = batch.ids.cpu().numpy(), 0
        shape = (len(rows), len(self._columns[0]), self._tables[0].values.shape[2])
        result = np.empty(shape, dtype=np.float32)
        for table, columns in zip(self._tables, self._columns, strict=True):
            # Ids count the rows of all tables one after another.
            inside = (rows >= start) & (rows < start + len(table.values))
            result[inside] = table.values[rows[inside] - start][:, columns]
            start += len(table.values)
        return torch.from_numpy(result).to(batch.ids.device)


def _labels(batch: Batch) -> Tensor:
    return torch.as_tensor(batch.target("tag", TokenTargets).ids)


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
        training: training of the tagger; the weights that are best on the dev data are kept.
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
    # The paper gives no values for this run. The LSTM is small, so fp32 is fast enough.
    training: Training = Training(
        Epochs(20.0),
        AdamW(lr=1e-3, decay=0.0),
        Linear(0.05),
        evaluate=Epochs(1.0),
        precision="fp32",
    )
    batch: ExampleBudget | TokenBudget = ExampleBudget(32)
    seed: int = 0

    def __post_init__(self) -> None:
        require_seed(seed=self.seed)


@dataclass(frozen=True)
class FeatureData:
    """Frozen features of training and dev data, for any number of runs.

    Attributes:
        task_model: decodes and scores sentences; its model has no head.
    """

    task_model: Tagger
    train: Features
    dev: Features
    dev_examples: tuple[TagExample, ...]


@dataclass(frozen=True)
class FeatureResult:
    """The result of a run on frozen features.

    Attributes:
        tagger: tagger with the weights that were best on the dev data.
        history: (epochs, F1) of every evaluation.
        shares: learned weights of the layers in a weighted sum; empty for other choices.
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
    model, tokenizer = loaded.model, loaded.tokenizer
    length, depth = settings.length or model.config.max_positions, model.config.depth
    layers = tuple(sorted({layer for choice in choices for layer in chosen_layers(choice, depth)}))
    report_findings(check_model(model.config, tokenizer, length))
    sources = FinetuneConfig(train=settings.train, dev=settings.dev, task=settings.task)
    data_read = read_examples(sources, progress=progress)
    examples = data_read.examples
    data = label(data_read.task, tokenizer, examples["train"], examples["dev"], length)
    for finding in (*data_read.findings, *data.findings):
        progress.message(f"{finding.severity}: {finding}")
    tagger = Tagger(settings.task, model, tokenizer, data.labels, length)
    tagger.to(choose_device(device)).eval()
    vectors, dev_vectors = (
        open_features(folder / name, model.encoder, inputs, layers, Part(progress, name))
        for name, inputs in (("train", data.train), ("dev", data.dev))
    )
    return FeatureData(tagger, vectors, dev_vectors, data.dev_examples)


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
    loader = Loader(source, unchanged, settings.batch, budget, settings.seed)
    store, best = MemoryStore(), Best("f1", "highest")
    training_run = TrainingRun(
        tagger,
        [TrainingPhase(settings.training.end, lambda state: loader.steps(state.cursor))],
        dataclasses.replace(settings.training, keep=Keep(1, best)),
        Plan(),
        store,
        evaluation=lambda _: data.task_model.score(tag_words(tagger, data)),
        progress=progress,
    )
    state = training_run.train()
    store.load_best(tagger, best)
    mix = tagger.eval().mix
    shares = tuple(mix.weights.softmax(0).tolist()) if isinstance(mix, LayerSum) else ()
    history = tuple((epochs, metrics["f1"]) for epochs, metrics in training_run.history)
    return FeatureResult(settings.layers, tagger, store.metrics, history, shares, state)


def build_tagger(data: FeatureData, settings: FeatureConfig) -> FeatureTagger:
    """Return a tagger with random weights; ConfigError if the features lack a layer."""
    depth, labels = data.task_model.model.config.depth, len(data.task_model.labels)
    return FeatureTagger([data.train, data.dev], settings.layers, depth, labels, settings.tagger)


@torch.no_grad()
def tag_words(tagger: FeatureTagger, data: FeatureData) -> list[tuple[TagExample, TagPrediction]]:
    """Return the dev sentences with their predictions, without dropout.

    The tagger's mode is restored.
    """
    sequences, outputs = data.dev.sequences(start=len(data.train.values)), dict[int, Output]()
    with evaluating(tagger):
        for indices, batch in in_batches(sequences, AT_ONCE, tagger.dense.weight.device):
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
