"""Preparation of a fine-tuning run: its data and model, open settings, and the preflight.

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
import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bothways.core.config import reader as configs
from bothways.core.errors import ConfigError, Finding, FolderError, report_findings, setting
from bothways.core.progress import SILENT, Progress, track
from bothways.core.terminal import listed, quantity
from bothways.data.loader import ExampleBudget
from bothways.finetuning import data as labelled
from bothways.finetuning.config import FinetuneConfig
from bothways.finetuning.data import DataSource, LabelledData, Rows
from bothways.finetuning.distillation import guide_of, with_guide_vectors, with_teacher_scores
from bothways.finetuning.few_shot import check_few_shot, with_vector_head
from bothways.finetuning.lora import LoRA, add_changes, scale_outputs
from bothways.finetuning.splits import SplitResult
from bothways.finetuning.stability import apply_stability
from bothways.hub import sentence_transformers
from bothways.hub.hf_config import RECORD, open_model, read_hf_config
from bothways.hub.model_folder import LoadedModel, check_adapter_only, heads_of, load_model
from bothways.hub.provenance import digest_of_model, without_places
from bothways.hub.resolve import resolve, resolve_run
from bothways.hub.static_embedding import StaticEncoder
from bothways.model.config import EncoderConfig
from bothways.model.heads import Head
from bothways.model.kernels.library import runs_on
from bothways.model.model import Model
from bothways.model.parameters import parameter_table
from bothways.prediction.opening import FolderRecord, open_task_model
from bothways.prediction.session_model import open_static
from bothways.tasks.base import TaskModel, examples_fingerprint, naming_advice
from bothways.tasks.reranking.task import RerankingTask
from bothways.tasks.sentence_embedding.losses import SupervisedContrastive
from bothways.tasks.sentence_embedding.task import Embedder, SentenceEmbeddingTask, sentence_config
from bothways.training.checkpoint import Best
from bothways.training.encoding_checks import check_model
from bothways.training.optimizers import AdamW, BertAdam, OptimizerConfig, OptimizerFactory
from bothways.training.run import Training, compute_as
from bothways.training.schedules import Epochs
from bothways.training.step_cost import LossFloats, MemoryDemand, check_machine


@dataclass(frozen=True)
class PreparedRun:
    """A run that can begin.

    Attributes:
        task_model: the model with its fresh heads, on its device.
        fresh: kinds of heads that start at random.
        findings: warnings and notes of the preflight.
        sources: the records of the data; empty for a run from a model in memory.
        base: the sha256 of the model that the run starts from; empty for one in memory.
        split: the examples of a source that dev data was split from.
    """

    settings: FinetuneConfig
    task_model: TaskModel[Any, Any]
    data: LabelledData
    fresh: tuple[str, ...]
    findings: tuple[Finding, ...]
    sources: Mapping[str, DataSource]
    base: str
    split: SplitResult | None

    def identity(self) -> dict[str, Any]:
        """Return the settings of the run and the digests of its data and models, without paths.

        Empty for a run from a model in memory, which has no checkpoints.
        """
        if not self.sources:
            return {}
        data = {name: source.sha256 for name, source in self.sources.items()} | {"model": self.base}
        if self.settings.teacher is not None:
            data["teacher"] = digest_of_model(self.settings.teacher.folder)
        if (guide := guide_of(self.settings.task)) is not None:
            data["guide"] = digest_of_model(guide)
        return without_places(configs.to_dict(self.settings)) | {"data": data}

    def origin(self) -> dict[str, Any]:
        """Return the data and the model of the run, for the record in `bothways.json`."""
        settings = self.settings
        result: dict[str, Any] = {
            "data": {name: dataclasses.asdict(source) for name, source in self.sources.items()},
            "base": {"name": settings.model, "sha256": self.base},
        }
        if self.split is not None:  # read again by `bothways evaluate`
            source = {"train": settings.train, "dev": settings.dev}
            digest = examples_fingerprint(self.split.examples())
            result["split"] = source | dataclasses.asdict(settings.split) | {"sha256": digest}
        return result


def load_for(
    settings: FinetuneConfig, heads: Iterable[Head], device: str = "cpu", *, keep: bool = False
) -> LoadedModel:
    """Load the model that a run starts from, with its own pooler if it has one, and fresh heads.

    Raises the errors of `load_model`; for static vectors ConfigError unless the device is the CPU.

    Args:
        keep: keep the folder's head for the task.
    """
    required, source = tuple(heads), resolve_run(settings.model)
    if not required and (static := open_static(source, device)) is not None:
        return static
    fresh = {"pooler"} & {*settings.fresh}
    fresh |= set() if keep else {head.kind for head in required} - {"pooler"}
    loaded = load_model(source, required, fresh)
    if settings.lora is not None and settings.lora.adapter_only:
        check_adapter_only(settings.model, loaded.model, loaded.tokenizer)
    return loaded


def start_from(start: Model | EncoderConfig, heads: Iterable[Head], seed: int) -> Model:
    """Return a model with new heads and the encoder of `start`.

    The pooler of `start` is copied if both have one. A configuration gives random weights.
    """
    torch.manual_seed(seed)
    if not isinstance(start, Model):
        return Model(start, heads)
    model = Model(start.config, heads, copy.deepcopy(start.encoder))
    if "pooler" in model.heads and "pooler" in start.heads:
        model.heads["pooler"].load_state_dict(start.heads["pooler"].state_dict())
    return model


def prepare_run(
    settings: FinetuneConfig,
    folder: Path | None,
    device: torch.device,
    progress: Progress = SILENT,
    *,
    train: Rows | LabelledData | None = None,
    dev: Rows | None = None,
    start: Model | EncoderConfig | None = None,
) -> PreparedRun:
    """Read model and data, check all that could fail later; arguments and errors as `finetune`.

    A resumed run passes here, too: pull reads its targets from the model again.
    """
    _check_start(settings, folder, train, start)
    findings, sources, base, split = list[Finding](), dict[str, DataSource](), "", None
    if isinstance(train, LabelledData):
        assert start is not None
        data, name = train, "the model"
        model = start_from(start, data.task.heads(data.labels, settings.dropout), settings.seed)
        tokens, had = (math.inf, {*start.heads}) if isinstance(start, Model) else (0.0, set[str]())
        fresh = tuple({*model.heads} - ({"pooler"} & had))
        unpooled, location = {*fresh} if isinstance(start, Model) else set[str](), None
    else:
        inputs = labelled.read_examples(settings, train, dev, progress)
        task, examples, name = inputs.task, inputs.examples, settings.model
        progress.stage("reading the model")
        base = digest_of_model(settings.model)
        torch.manual_seed(settings.seed)
        keep, labels, head_notes = _head_to_keep(settings, task, task.labels(examples["train"]))
        loaded = load_for(settings, task.heads(labels, settings.dropout), device.type, keep=keep)
        model, tokenizer, read = loaded.model, loaded.tokenizer, loaded.extra.get("tokens")
        tokens = float(read) if isinstance(read, int | float) else math.inf  # in pre-training
        task, settings, usual_length, findings = _as_folder(task, settings, loaded)
        data = labelled.examine(
            task, tokenizer, examples["train"], examples.get("dev", []), settings.length,
            model.config.max_positions, progress, usual_length=usual_length, labels=labels,
        )  # fmt: skip
        if source := settings.teacher and settings.teacher.unlabelled:
            rows = labelled.read_rows(source, data.task, "unlabelled", progress, labelled=False)
            examples["unlabelled"] = rows.examples
            encoded = data.task.encode(rows.examples, tokenizer, data.labels, data.length)
            data = dataclasses.replace(data, unlabelled=tuple(encoded))
        settings = dataclasses.replace(settings, length=data.length)
        fresh, location = loaded.report.fresh_heads, loaded.folder
        unpooled = {*fresh, *loaded.untrained} - {*settings.fresh}
        checks = check_model(model.config, tokenizer, data.length)
        findings += [*head_notes, *inputs.findings, *checks, *data.findings]
        names, split = {**settings.sources, "unlabelled": str(source)}, inputs.split
    if settings.few_shot is not None:
        model, fresh, unpooled = with_vector_head(model, location), ("labels",), set()
    settings, choices = choose_automatic(
        settings, model.config, data, tokens, static=isinstance(model.encoder, StaticEncoder)
    )
    notes = [
        *check_few_shot(data.sequences, settings.few_shot),
        *check_positives(data, settings),
        *scale_outputs(model, data.task.output_scale(data.train_examples), "labels" not in fresh),
    ]
    apply_stability(model, settings.stability, settings.seed, fresh)
    add_changes(model, settings.lora, settings.seed, settings.stability.frozen)
    if "pooler" in unpooled:
        message = f"{name} has no pooler to start from, so that of this run starts at random"
        notes.append(Finding("heads", "note", message))
    if start is None:
        machine = check_machine(_memory_demand(settings, model, data), folder, device)
        notes = report_findings([*findings, *machine, *choices, *notes])
        data = _with_targets(data, settings, device, progress)
        for side, items in examples.items():
            tracked = track(items, progress, f"fingerprint of {names[side]}", labelled.REPORTED)
            sources[side] = DataSource(names[side], len(items), examples_fingerprint(tracked))
    task_model = _task_model(model, data, settings, device)
    return PreparedRun(settings, task_model, data, fresh, tuple(notes), sources, base, split)


def _head_to_keep(
    settings: FinetuneConfig, task: Any, labels: tuple[str, ...]
) -> tuple[bool, tuple[str, ...], list[Finding]]:
    """Decide if the run trains the folder's head further; return this, the labels, and a note.

    It does where the folder opens for the task, with the labels of the data.
    """
    kinds = {head.kind for head in task.heads(labels, None)} - {"pooler"}
    if not kinds or "head" in settings.fresh or settings.few_shot is not None:
        return False, labels, []
    folder = resolve_run(settings.model)
    config, weights = open_model(resolve(folder))
    if not kinds <= {head.kind for head in heads_of(config, weights.shapes)}:
        return False, labels, []
    try:
        folder_labels = open_task_model(folder, task.name, device="cpu").labels
    except FolderError as error:
        reason, fix = error.what, None
    else:
        # A task that names its output itself reads a score, whatever its name.
        is_score = len(folder_labels) == 1 and labels == task.labels(())
        if {*folder_labels} == {*labels} or is_score:
            message = "the head of the model is trained further"
            if len(folder_labels) > 1:
                message += f", with the labels {listed(folder_labels, 5)}"
            message += f"; {setting('fresh', 'head')} starts it at random"
            return True, labels if is_score else folder_labels, [Finding("heads", "note", message)]
        reason = f"its labels are {listed(folder_labels, 5)}, and the data has {listed(labels, 5)}"
        fix = naming_advice(folder_labels) if len(folder_labels) == len(labels) else None
    message = f"the head of the model is not used, and a new one starts at random: {reason}"
    return False, labels, [Finding("heads", "note", message, fix=fix)]


def _as_folder(
    task: Any, settings: FinetuneConfig, loaded: LoadedModel
) -> tuple[Any, FinetuneConfig, int | None, list[Finding]]:
    """Return the task, the run's settings, the usual length, and a note, as a folder has them.

    Of a folder of sentence-transformers for the same task, they are those for which `task` has the
    default, and its Dense layers are added to the heads of the model. Others record their length.

    Raises:
        FolderError: the folder's settings cannot be read.
        ConfigError: its length is no number.
    """
    config: Any = None
    if isinstance(task, SentenceEmbeddingTask | RerankingTask):
        positions = loaded.model.config.max_positions
        config = sentence_transformers.read_program_config(loaded.folder, positions)
    match task, config:
        case SentenceEmbeddingTask(), sentence_transformers.SentenceEncoderConfig():
            if (projection := sentence_transformers.read_projection(loaded.folder)) is not None:
                loaded.model.heads[sentence_transformers.PROJECTION] = projection
            values = dict(vars(config))
        case RerankingTask(), sentence_transformers.CrossEncoderConfig() if (
            len(read_hf_config(loaded.folder).labels()) == 1
        ):
            values = dict(vars(config))
        case _:
            recorded = loaded.extra.get("task")
            same = isinstance(recorded, Mapping) and recorded.get("kind") == task.name
            fields = {"length": loaded.extra.get("length") if same else None}
            values = {"length": configs.read(FolderRecord, fields, where=RECORD).length}
    usual_length, default = values.pop("length"), type(task)()
    inherited = {
        name: value
        for name, value in values.items()
        if getattr(task, name) == getattr(default, name) != value
    }
    texts = [f"{name} = {value!r:.80}" for name, value in inherited.items()]
    if usual_length is not None and settings.length is None:
        texts.append(f"length = {usual_length} or more")
    note = Finding("training", "note", f"as in the folder: {', '.join(texts)}")
    settings = dataclasses.replace(settings, task=dataclasses.replace(settings.task, **inherited))
    task = dataclasses.replace(task, **inherited)
    return task, settings, usual_length, [note] if texts else []


def _with_targets(
    data: LabelledData, settings: FinetuneConfig, device: torch.device, progress: Progress
) -> LabelledData:
    """Return the data with what a teacher and a guide compute of it, where the run has them."""
    precision = settings.training.precision
    if settings.teacher is not None:
        data = with_teacher_scores(data, settings.teacher, device, precision, progress)
    if (guide := guide_of(data.task)) is not None:
        data = with_guide_vectors(data, guide, device, precision, progress)
    return data


def _check_start(
    settings: FinetuneConfig,
    folder: Path | None,
    train: Rows | LabelledData | None,
    start: Model | EncoderConfig | None,
) -> None:
    """Raise ConfigError for a model in memory without examples of `data.label`, and for settings
    that need a folder or pre-trained weights.
    """
    if isinstance(train, LabelledData) != (start is not None) or (start and folder):
        message = "a model in memory and examples of data.label belong together, without a folder"
        raise ConfigError(message, where="start", fix="Give both, or a folder as model, and rows.")
    if start is not None and settings.lora is not None and settings.lora.adapter_only:
        message = "an adapter names the folder of its model, and this model is in memory"
        raise ConfigError(message, where="lora.adapter_only", fix="Leave it out.")
    if not isinstance(start, EncoderConfig):
        return
    for name in ("reinitialise", "frozen", "pull"):
        if getattr(settings.stability, name):
            message = "needs pre-trained weights, and this run starts from random ones"
            fix = "Start from a model, or set it to 0."
            raise ConfigError(message, where=f"stability.{name}", fix=fix)
    if settings.lora is not None:
        message = "keeps the encoder's weights, and those of this run are random"
        raise ConfigError(message, where="lora", fix="Start from a model, or leave it out.")


def _task_model(
    model: Model, data: LabelledData, settings: FinetuneConfig, device: torch.device
) -> TaskModel[Any, Any]:
    """Return the task bound to its model, on its device.

    Raises:
        ConfigError: the metric that selects the best weights is unknown, or one is twice; a head
            has more or fewer outputs than there are labels; vectors are of other layers than the
            last one.
    """
    task, labels = data.task, data.labels
    for name in settings.own_metrics.keys() & task.directions(labels).keys():
        message = f"{name!r} is a metric of the task {task.name}"
        raise ConfigError(message, where=f"metrics.{name}", fix="Give yours another name.")
    directions, count = settings.directions(task, labels), quantity(len(labels), "label(s)")
    if settings.chosen_by not in directions:
        lacks = f"{task.name} with {count} does not have the metric {settings.chosen_by!r}"
        message = f"{lacks}: it must be one of {', '.join(directions)}"
        raise ConfigError(message, where="metric", fix=f"Set {setting('metric', task.metric)}.")
    for head in task.heads(labels, None):
        outputs = head.label_count
        if labels and outputs is not None and outputs != len(labels):
            message = f"{task.name} has {count}, and its head {head.kind!r} "
            message += quantity(outputs, "output(s)")
            raise ConfigError(message, where="task", fix="A task names each output by a label.")
    if isinstance(task, SentenceEmbeddingTask) and task.compares and settings.batch.n == 1:
        message = "the loss compares the examples of a batch, and this has one"
        fix = f"Set {setting('batch.n', 32)}, or more."
        raise ConfigError(message, where="batch.n", fix=fix)
    compute_as(model.encoder, settings.training, device)
    task_model = task.bind(model, data.tokenizer, labels, data.length).to(device)
    if isinstance(task_model, Embedder):
        sentence_config(task_model)  # layers that the saved folder cannot have
    return task_model


def check_positives(data: LabelledData, settings: FinetuneConfig) -> list[Finding]:
    """Warn if most texts of a step have no positive, another text of their class."""
    loss = data.task.loss if isinstance(data.task, SentenceEmbeddingTask) else None
    if not isinstance(loss, SupervisedContrastive) or not isinstance(settings.batch, ExampleBudget):
        return []
    counts, total = Counter(e.label for e in data.train_examples), len(data.train_examples)
    others = min(settings.batch.n, total) - 1
    alone = sum(n * (1 - (n - 1) / max(1, total - 1)) ** others for n in counts.values()) / total
    if alone < MOST_ALONE:
        return []
    message = f"in {alone:.0%} of the cases a text is alone in its class in a step of "
    message += f"{settings.batch.n:,} texts, and adds nothing to the loss"
    fix = f"Set {setting('batch.n', len(counts))}, or more."
    return [Finding("pairs", "warning", message, where="batch.n", fix=fix)]


def _memory_demand(settings: FinetuneConfig, model: Model, data: LabelledData) -> MemoryDemand:
    """Return the demands of the run; labels need logits, probabilities, gradients and targets."""
    count, per_token = len(data.labels), 3.0 * len(data.labels)
    if all(head.of_sequences for head in model.specification):
        # Without sequences, the findings say why there are none.
        per_token *= len(data.sequences) / max(1, data.tokens)
    dense = data.task.problem == "multi_label_classification"
    return MemoryDemand(
        ((model.config, model.specification),),
        max((len(sequence) for sequence in data.sequences), default=1),
        settings.microbatch_tokens,
        settings.training,
        losses=LossFloats(per_token, fixed=dense * count * (len(data.train) + len(data.dev))),
        trained=sum(weight.numel() for weight in model.parameters() if weight.requires_grad),
    )


def remarks(run: PreparedRun) -> list[str]:
    """Return the warnings and notes of the preflight, guessed columns, and missing dev data."""
    lines = [f"{finding.severity}: {finding}" for finding in run.findings]
    if not run.sources:
        return lines
    settings, data = run.settings, run.data
    columns = data.task.columns
    if columns != settings.task.columns:
        lines.append(f"note: the columns are guessed: {columns}")
    for name, value in vars(data.task).items():
        if isinstance(value, str) and value != getattr(settings.task, name):
            lines.append(f"note: task.{name} is chosen by the training data: {value}")
    if settings.chosen_by == "f1" and len(data.labels) == 2:
        positive = data.labels[1]
        lines.append(f"note: f1 is that of {positive!r}, the second of the two labels in order")
    if settings.dev is None:
        lines.append("note: without dev data the last weights are kept, and nothing is measured")
    return lines


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
MOST_ALONE = 0.8
"""The share of texts that may be alone in their class in a step of vectors of classes."""
FEWEST_EPOCHS, MOST_EPOCHS = 3, 20
ENOUGH_UPDATES, UPDATES_PER_LABEL = 400, 10
"""The updates that a run should have: of any, and in addition for each label."""


def default_rate(
    encoder: EncoderConfig, tokens: float = math.inf, lora: LoRA | None = None
) -> float:
    """Return the default peak rate for an encoder, to two digits.

    Args:
        tokens: the tokens that its weights have read in pre-training; 0 for random weights,
            infinite for those of unknown origin.
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
    tokens: float = math.inf,
    static: bool = False,
) -> tuple[FinetuneConfig, list[Finding]]:
    """Return the settings with numbers for `auto`, and notes of what was chosen.

    Args:
        tokens: as for `default_rate`.
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
