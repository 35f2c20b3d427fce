"""The settings of fine-tuning, with a modern recipe and the paper's.

Source: Devlin et al. 2018, sections 4 and 5.3, appendix A.3.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence as Many
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args

from bothways.core.config import reader as configs, values
from bothways.core.config.reader import CHANGEABLE, Members
from bothways.core.errors import ConfigError, argument, setting
from bothways.data.loader import ExampleBudget, TokenBudget
from bothways.finetuning.lora import LoRA
from bothways.finetuning.splits import DevPart, Split, parse_part
from bothways.finetuning.stability import Stability
from bothways.objectives.distillation import Teacher
from bothways.prediction.opening import open_finetuned
from bothways.tasks.base import MIN_LENGTH, Direction, Task
from bothways.tasks.catalogue import Trainable
from bothways.tasks.classification.task import ClassificationTask
from bothways.training.checkpoint import Keep
from bothways.training.optimizers import AdamW, BertAdam
from bothways.training.run import PEER_NAMES, SAME_SETTINGS, TRAINING_NAMES, Training, expand_names
from bothways.training.schedules import Epochs, GoogleLinear, Linear


def finetune_adam() -> Training:
    """Return three epochs of AdamW at 5e-5 with a tenth of warm-up.

    The values are from the paper's grid; the bias correction, which the paper's code lacks, makes
    fine-tuning on small sets stable (Zhang et al. 2020, Mosbach et al. 2020).
    """
    return Training(
        until=Epochs(3.0),
        optimizer=AdamW(lr=5e-5),
        schedule=Linear(0.1),
        evaluate=Epochs(1.0),
        keep=Keep(1),
    )


@dataclass(frozen=True)
class FewShot:
    """The settings of few-shot training.

    Attributes:
        pairs: the pairs that each text begins, each with a random other text of its class. None:
            20, or fewer for 2,000 pairs in all, but at least one.
        temperature: of the loss that separates the texts of a step by their classes.
        inverse_regularisation: C of the logistic regression; more fits the texts more closely.
    """

    pairs: int | None = None
    temperature: float = 0.07
    inverse_regularisation: float = 30.0

    def __post_init__(self) -> None:
        values.require_at_least(1, "few_shot", pairs=self.pairs)
        values.require_range(
            "(0, inf)",
            "few_shot",
            temperature=self.temperature,
            inverse_regularisation=self.inverse_regularisation,
        )

    def per_text(self, texts: int) -> int:
        """Return the pairs that each of some texts begins."""
        return self.pairs or min(20, max(1, 2000 // texts))


MetricFunction = Callable[[list[Any], list[Any]], float | Mapping[str, float]]
"""Takes predictions and their examples, in the same order; returns a number, or numbers by name."""


@dataclass(frozen=True)
class Metric:
    """A metric of the dev data, for `bothways.finetune(metrics=…)`.

    Attributes:
        function: takes the list of predictions and the list of examples, in the same order, and
            returns a number, or a dict of numbers by name.
        better: the direction in which it improves, "highest" or "lowest".

    Examples:
        >>> def mistakes(predictions, examples):
        ...     pairs = zip(predictions, examples)
        ...     return sum(prediction.label != example.label for prediction, example in pairs)
        >>> bothways.Metric(mistakes, better="lowest").better
        'lowest'
    """

    function: MetricFunction
    better: Direction = "highest"


OwnMetrics = Mapping[str, Metric | MetricFunction]
"""Metrics by name; a function stands for a metric that is better when it is higher."""


def named_metrics(metrics: Any) -> dict[str, Metric]:
    """Return the metrics by name.

    Raises:
        ConfigError: they are not functions by name, or a direction is unknown.
    """
    if not isinstance(metrics or {}, Mapping):
        fix = 'Give a dict of functions by name, such as metrics={"mistakes": mistakes}.'
        raise ConfigError(f"is of type {type(metrics).__name__}", where="metrics", fix=fix)
    result = {}
    for name, value in (metrics or {}).items():
        location = f"metrics.{name}"
        function = value.function if isinstance(value, Metric) else value
        if not callable(function):
            fix = "Give a function of predictions and examples."
            raise ConfigError(f"{function!r} is not a function", where=location, fix=fix)
        # A function that would fail at the first evaluation is refused now.
        with contextlib.suppress(ValueError):  # some functions of C have no signature
            signature = inspect.signature(function)
            try:
                signature.bind([], [])
            except TypeError as error:
                message = f"its function cannot be called with predictions and examples: {error}"
                fix = "Write it as def metric(predictions, examples), which returns a number."
                raise ConfigError(message, where=location, fix=fix) from error
        metric = result[str(name)] = value if isinstance(value, Metric) else Metric(value)
        if metric.better not in {"highest", "lowest"}:
            message = f'better must be "highest" or "lowest", not {metric.better!r}'
            raise ConfigError(message, where=location)
    return result


@dataclass(frozen=True)
class FinetuneConfig:
    """The settings of a fine-tuning run.

    Attributes:
        training: the optimizer, its schedule, the length of the run, and the interval of
            evaluations on the dev data. A rate or a length of "auto" is chosen by the model and
            the data (`finetuning.prepare`).
        length: maximum length of a sequence in tokens, special tokens included. None: the length of
            a model for the same task, else the task's own; or the length that holds 95 % of the
            training texts whole, if it is more.
        batch: sequences or tokens per update.
        microbatch_tokens: maximum number of tokens in memory at once, unless one sequence is
            longer; changes neither data nor update.
        metric: metric of the dev data that selects the best weights: the task's, or one of
            `metrics`. None: the task's default.
        metrics: further metrics of the dev data, functions by name; in Python only.
        dropout: dropout on the vectors that the new head reads. None: the encoder's.
        stability: measures that keep fine-tuning stable.
        lora: low-rank changes of the encoder's matrices, trained in place of its weights. None: all
            weights are trained.
        task: the task to fine-tune for.
        model: a model folder, the folder of a pre-training run, or a Hub id; empty for a model in
            memory.
        train, dev: files or Hub data sets ("hub:owner/name:configuration:split"); without `dev`
            the last weights are kept. A `dev` such as "20%" or "0.2" is split from `train`.
        fresh: what starts at random though the folder has it: "head", the task's own, which is
            kept where it has the labels of the data; "pooler", also one of which it has a part.
        seed: random seed for the fresh heads and all other random weights.
        order_seed: random seed for the order of the data and dropout. None: `seed`.
        split: rules for splitting dev data from the training data, if `dev` is a share of it.
        teacher: a fine-tuned model whose outputs are learned in addition to the labels.
        few_shot: train on pairs of texts of a class, and fit the head to the vectors; None for
            training on the labels.

    Examples:
        >>> config = bothways.FinetuneConfig(model="my-bert", train="train.tsv", dev="dev.tsv")
        >>> config.task.name
        'classify'
    """

    training: Training = dataclasses.replace(
        finetune_adam(), until="auto", optimizer=AdamW(lr="auto")
    )
    length: int | None = None
    batch: ExampleBudget | TokenBudget = ExampleBudget(32)
    microbatch_tokens: int = field(default=8192, metadata=CHANGEABLE)
    metric: str | None = None
    metrics: Annotated[OwnMetrics | None, Members(NoneType)] = None
    dropout: float | None = None
    stability: Stability = Stability()
    lora: LoRA | None = None
    task: Trainable = ClassificationTask()
    model: str = ""
    train: str = ""
    dev: str | None = None
    fresh: tuple[Literal["pooler", "head"], ...] = ()
    seed: int = 0
    order_seed: int | None = None
    split: Split = Split()
    teacher: Teacher | None = None
    few_shot: FewShot | None = None

    def __post_init__(self) -> None:
        if self.length is not None and self.length < MIN_LENGTH:
            least = f"{MIN_LENGTH} ([CLS], a token, [SEP], a token, [SEP])"
            raise ConfigError(f"must be at least {least}, not {self.length}", where="length")
        values.require_at_least(1, microbatch_tokens=self.microbatch_tokens)
        if self.training.keep.best is not None:
            message = "which checkpoint is the best is decided by metric"
            fix = f"Set metric instead, such as {setting('metric', 'mcc')}."
            raise ConfigError(message, where="training.keep.best", fix=fix)
        values.require_range("[0, 1)", dropout=self.dropout)
        named_metrics(self.metrics)
        values.require_seed(seed=self.seed, order_seed=self.order_seed)
        self._check_sources()
        self._check_few_shot()
        if self.lora is not None and self.lora.adapter_only and self.task.name == "embed":
            message = "is not for embed: the folder of a sentence encoder holds all weights"
            raise ConfigError(message, where="lora.adapter_only", fix="Leave it out.")
        fix = "Leave out one of the two."
        for name in ("reinitialise", "pull") if self.lora is not None else ():
            if getattr(self.stability, name):
                message = "changes the encoder's own weights, which lora leaves as they are"
                raise ConfigError(message, where=f"stability.{name}", fix=fix)

    def _check_sources(self) -> None:
        """Raise ConfigError for settings of dev data that a run on files does not have."""
        if self.split != Split() and self.dev_part is None:
            message = "is of a split, and dev is no share of the training data"
            fix = f"Give {argument(dev='20%')}, or leave it out."
            name = "group" if self.split.group is not None else "seed"
            raise ConfigError(message, where=f"split.{name}", fix=fix)
        if not self.train or self.dev is not None:
            return
        if self.training.early_stopping is not None:
            message = "early stopping needs dev data to measure improvement"
            fix = f"Give {argument(dev='FILE')}, or leave early_stopping out."
            raise ConfigError(message, where="training.early_stopping", fix=fix)
        if self.metrics:
            fix = "Give dev, or leave metrics out."
            raise ConfigError("are of dev data, and there is none", where="metrics", fix=fix)

    def _check_few_shot(self) -> None:
        """Raise ConfigError for settings that few-shot training cannot use."""
        if self.few_shot is None:
            return
        if not isinstance(self.task, ClassificationTask):
            message = f"is for one class a text, and the task is {self.task.name}"
            fix = f"Set {argument(task='classify')}, or {argument(recipe='modern')}."
            raise ConfigError(message, where="few_shot", fix=fix)
        unused = {
            "teacher": self.teacher is not None,
            "dropout": self.dropout is not None,
            "lora.adapter_only": self.lora is not None and self.lora.adapter_only,
            "task.smoothing": self.task.smoothing > 0,
        }
        for name in filter(unused.__getitem__, unused):
            message = "has no effect in few-shot training, whose head is a logistic regression"
            raise ConfigError(message, where=name, fix="Leave it out.")

    @property
    def dev_part(self) -> DevPart | None:
        """The part of the training data that is dev data; None if it has a source of its own."""
        return None if self.dev is None else parse_part(self.dev)

    @property
    def sources(self) -> dict[str, str]:
        """The names of the training and dev data, for people."""
        if (share := self.dev_part) is not None:
            return {"train": f"{self.train} without {share}", "dev": f"{share} of {self.train}"}
        return {"train": self.train} | ({} if self.dev is None else {"dev": self.dev})

    @property
    def ordered_by(self) -> int:
        """The seed of the order of the data and dropout."""
        return self.seed if self.order_seed is None else self.order_seed

    @property
    def chosen_by(self) -> str:
        """The metric by which the best weights are chosen."""
        return self.metric or self.task.metric

    @property
    def own_metrics(self) -> dict[str, Metric]:
        """The further metrics by name."""
        return named_metrics(self.metrics)

    def directions(self, task: Task[Any, Any], labels: Many[str]) -> dict[str, Direction]:
        """Return the metrics that can choose the best weights, each with its better direction."""
        directions = {name: metric.better for name, metric in self.own_metrics.items()}
        # A metric that returns several numbers is chosen by "metric/name".
        metric = self.own_metrics.get(self.chosen_by.partition("/")[0])
        chosen = {} if metric is None else {self.chosen_by: metric.better}
        return {**directions, **chosen, **task.directions(labels)}


def paper_finetuning(task: Trainable) -> FinetuneConfig:
    """Return the recipe of the paper, with the optimizer and schedule of google-research/bert.

    Source: Devlin et al. 2018, sections 4 and 5.3, appendix A.3.
    """
    rate, batch = (2e-5, 16) if task.name == "choice" else (5e-5, 32)  # of SWAG
    training = dataclasses.replace(
        finetune_adam(), optimizer=BertAdam(lr=rate), schedule=GoogleLinear(0.1)
    )
    return FinetuneConfig(training, task.length, ExampleBudget(batch), task=task)


def electra_finetuning(task: Trainable) -> FinetuneConfig:
    """Return the settings of ELECTRA small and base: lower layers are trained at lower rates.

    The large size has a rate of 5e-5 and the factor 0.9 from layer to layer; RTE has ten epochs.

    Source: google-research/electra, configure_finetuning.py. Its schedule multiplies warm-up and
    decay, which differs by 10 % at most, at the end of the warm-up. The paper (Clark et al. 2020,
    appendix B) differs in the rate of the small size, 3e-4, and has no weight decay.
    """
    epochs = {"regress": 10.0, "answer": 2.0}.get(task.name, 3.0)
    training = dataclasses.replace(
        paper_finetuning(task).training, until=Epochs(epochs), optimizer=BertAdam(lr=1e-4)
    )
    length = 512 if task.name == "answer" else task.length
    return FinetuneConfig(training, length, ExampleBudget(32), stability=Stability(0.8), task=task)


def few_shot_finetuning(task: Trainable) -> FinetuneConfig:
    """Return few-shot training: one epoch of pairs, in the batches of SetFit."""
    training = dataclasses.replace(finetune_adam(), until=Epochs(1.0))
    return FinetuneConfig(training, batch=ExampleBudget(16), task=task, few_shot=FewShot())


RECIPES: dict[str, Callable[[Trainable], FinetuneConfig]] = {
    "modern": lambda task: FinetuneConfig(task=task),  # the rate and the length are chosen
    "paper": paper_finetuning,
    "electra": electra_finetuning,
    "few-shot": few_shot_finetuning,
}


def taught_finetuning(
    teacher: str,
    train: str,
    student: str | None,
    recipe: str | None,
    dev: str | None,
) -> FinetuneConfig:
    """Return the settings of a run in which a student learns the task of its teacher.

    Names and recipes are as in `bothways.distil`.

    Raises:
        ConfigError: no student, an unknown recipe, or the teacher's task has no teachers.
        FolderError: the teacher cannot be read, or was not fine-tuned for a task.
    """
    if student is None:
        message = f"is missing: {train} is no corpus, and labelled data needs a pre-trained student"
        fix = "Name one with the teacher's vocabulary, or give a corpus folder to pre-train one."
        raise ConfigError(message, where="student", fix=fix)
    if recipe is not None and recipe not in RECIPES:
        message = f"{recipe!r} is for a corpus, and the data is labelled"
        raise ConfigError(message, where="recipe", fix=f"Choose one of {', '.join(RECIPES)}.")
    task = open_finetuned(teacher).task
    if not isinstance(task, get_args(Trainable)) or task.model_class.scale is None:
        message = f"{teacher} is for the task {task.name!r}, which is not learned from a teacher"
        fix = "Choose a fine-tuned teacher, or give a corpus folder instead of labelled data."
        raise ConfigError(message, where="teacher", fix=fix)
    settings = RECIPES[recipe or "modern"](type(task)())
    taught_by = Teacher(teacher)
    return dataclasses.replace(settings, model=student, train=train, dev=dev, teacher=taught_by)


SHORTHANDS: Mapping[str, str] = {
    **TRAINING_NAMES, "batch_size": "batch.n", "max_length": "length",
    "early_stopping": "training.early_stopping", "columns": "task.columns", "group": "split.group",
    "text": "task.columns.text", "text_b": "task.columns.text_b", "label": "task.columns.label",
    "adapter_only": "lora.adapter_only",
}  # fmt: skip
"""Common names of settings → their dotted paths; `load_config` reads `batch=16`, too."""

SAME: Mapping[str, tuple[str, str]] = {
    **SAME_SETTINGS, "max_seq_length": ("length", "{}"),
    "metric_for_best_model": ("metric", "{}"), "label_smoothing": ("task.smoothing", "{}"),
    "label_smoothing_factor": ("task.smoothing", "{}"), "class_weight": ("task.weighting", "{}"),
    "class_weights": ("task.weighting", "{}"), "train_batch_size": ("batch_size", "{}"),
    "per_device_train_batch_size": ("batch_size", "{}"),
    "text_column": ("text", "{}"), "label_column": ("label", "{}"),
}  # fmt: skip
"""Names of other libraries with the same meaning, as in `SAME_SETTINGS`."""


def load_config(
    base: FinetuneConfig, overrides: values.Tree | Iterable[str] = (), file: Path | None = None
) -> FinetuneConfig:
    """Return `base` changed by a TOML file, then by overrides, which may use `SHORTHANDS`.

    Raises:
        ConfigError: an unknown setting, or a value that is not allowed.
    """
    tree = values.parse_overrides(overrides)
    if "batch" in tree and not isinstance(tree["batch"], Mapping):
        tree["batch"] = {"n": tree["batch"]}
    tree = expand_names(tree, SHORTHANDS, SAME)
    in_file = file is not None and "sharding" in values.read_toml(file)
    if in_file or "sharding" in tree:
        message = "fine-tuning holds the whole model in each rank, and has no such setting"
        less = f"{setting('training.recompute', True)}, {setting('lora.rank', 8)}"
        where = f"{file}: sharding" if in_file else "sharding"
        raise ConfigError(message, where=where, fix=f"Leave it out; less memory: {less}.")
    same = {name: SHORTHANDS.get(common, common) for name, (common, _) in SAME.items()}
    aliases = {**same, **SHORTHANDS}
    return configs.load(
        FinetuneConfig, base=base, file=file, overrides=tree, aliases=aliases, peers=PEER_NAMES
    )
