"""Preparation of a fine-tuning run: its settings, its model and data, and the preflight."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from bothways.core.config import reader as configs
from bothways.core.config.checks import require_seed
from bothways.core.config.tree import Tree
from bothways.core.errors import ConfigError
from bothways.core.finding import Finding, report_findings
from bothways.core.stages import OnStage, followed, followed_reading, unseen
from bothways.finetuning.automatic import choose, tokens_read
from bothways.finetuning.config import FinetuneSettings, check_paths, expand_shorthands
from bothways.finetuning.data import LabelledData, check_metric, examine
from bothways.finetuning.forecast import forecast
from bothways.finetuning.stability import steady
from bothways.hub.model_folder import LoadedModel, load_model
from bothways.hub.provenance import digest_of_model, stamp
from bothways.hub.resolve import resolve_run
from bothways.model.heads import Head
from bothways.model.model import Model
from bothways.preflight.machine import Load, check_machine, compute_as
from bothways.preflight.text import check_model
from bothways.tasks.base import Direction, Reading, TaskLearner, examples_fingerprint
from bothways.tasks.catalogue import Trainable
from bothways.training.checkpoint import Best
from bothways.training.run import Training

REPORTED = 256
"""Number of examples between two reports of progress."""


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(FinetuneSettings):
    """The settings of a fine-tuning run on files.

    Attributes:
        model: a model folder, the folder of a pre-training run, or a Hub id.
        train, dev: files or Hub data sets ("hub:owner/name:configuration:split"); without `dev`
            the last weights are kept.
        fresh: heads that start at random in addition to the task's own: "pooler", for a model that
            was trained without one.
        seed: of the fresh heads and all other random weights.
        order_seed: of the order of the data, dropout and mixout. None: the same as `seed`.

    Example:
        >>> config = bothways.FinetuneConfig(model="my-bert", train="train.tsv", dev="dev.tsv")
        >>> config.task.name
        'classify'
    """

    model: str
    train: str
    dev: str | None = None
    fresh: tuple[Literal["pooler"], ...] = ()
    seed: int = 0
    order_seed: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_seed(seed=self.seed, order_seed=self.order_seed)
        if self.training.early_stopping is not None and self.dev is None:
            what = "early stopping needs dev data to measure improvement"
            raise ConfigError(
                what,
                where="training.early_stopping",
                fix="Give --dev, or leave early_stopping out.",
            )

    @property
    def ordered_by(self) -> int:
        """The seed of the order of the data, dropout and mixout."""
        return self.seed if self.order_seed is None else self.order_seed


def load_config(
    base: FinetuneConfig, overrides: Tree | Iterable[str] = (), file: Path | None = None
) -> FinetuneConfig:
    """Return `base` changed by a TOML file, then by overrides, which may use `config.SHORTHANDS`.

    Raises:
        ConfigError: an unknown setting, or a value that is not allowed.
    """
    tree = expand_shorthands(overrides)
    check_paths(tree, [field.name for field in dataclasses.fields(FinetuneConfig)])
    return configs.load(FinetuneConfig, base=base, file=file, overrides=tree)


@dataclass(frozen=True)
class ModelSource:
    """The data that a model was trained on: its name, number of examples, and their sha256."""

    name: str
    examples: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.name}, {self.examples:,} examples, sha256 {self.sha256}"


@dataclass(frozen=True)
class PreparedRun:
    """A run that can begin.

    Attributes:
        task: the model with its fresh heads, on its device.
        data: the examples, checked and encoded.
        sources: of the training and dev data.
        base: the sha256 of the model that the run starts from.
        findings: warnings and notes of the preflight.
    """

    settings: FinetuneConfig
    task: TaskLearner[Any, Any]
    data: LabelledData
    sources: Mapping[str, ModelSource]
    base: str
    findings: tuple[Finding, ...]


def load_for(settings: FinetuneConfig, heads: Iterable[Head]) -> LoadedModel:
    """Load the model that a run starts from: its own pooler, if it has one, and fresh heads.

    Raises the errors of `load_model`.
    """
    wanted = tuple(heads)
    return load_model(
        resolve_run(settings.model),
        wanted,
        {head.kind for head in wanted} - {"pooler"} | {*settings.fresh},
    )


def make_ready(
    settings: FinetuneConfig, folder: Path, device: torch.device, on_stage: OnStage = unseen
) -> PreparedRun:
    """Read model and data, and check all that could fail later; errors as `finetune`."""
    train, dev, definition = _examples(settings, on_stage)
    on_stage("reading the model", None)
    base = digest_of_model(settings.model)
    heads = definition.heads(definition.labels(train), settings.dropout)
    torch.manual_seed(settings.seed)
    loaded = load_for(settings, heads)
    tokenizer = loaded.tokenizer()
    positions = loaded.model.config.max_positions
    data = examine(definition, tokenizer, train, dev, settings.length, on_stage, positions)
    settings, chosen = choose(
        dataclasses.replace(settings, length=data.length),
        loaded.model.config,
        data,
        tokens_read(loaded),
    )
    findings = report_findings(
        [
            *check_model(loaded.model.config, data.tokenizer, data.length),
            *data.findings,
            *check_machine(_load(settings, loaded.model, data), folder, device),
            *chosen,
        ]
    )
    check_metric(settings.chosen_by, data)
    # A resumed run passes here, too: mixout and pull read their targets from the model again.
    steady(loaded.model, settings.stability, settings.seed, settings.fresh)
    compute_as(loaded.model.encoder, settings.training, device)
    task = definition.learner(loaded.model, data.tokenizer, data.labels, data.length).to(device)
    training = training_of(settings, data.definition.directions(data.labels))
    on_share = partial(on_stage, "measuring the speed of training")
    if (time := forecast(task, data, settings, training, folder, on_share)) is not None:
        findings.append(time)
    read = {"train": (settings.train, train)} | (
        {"dev": (settings.dev, dev)} if settings.dev else {}
    )
    sources = {name: _source(*source, on_stage) for name, source in read.items()}
    return PreparedRun(settings, task, data, sources, base, tuple(findings))


def fingerprints(settings: FinetuneConfig) -> dict[str, str]:
    """Return the sha256 of the examples of the training and dev data, as in `make_ready`.

    Raises:
        DataError: the data cannot be read.
    """
    written = [
        stamp(Path(source).expanduser())
        for source in (settings.train, settings.dev)
        if source is not None
    ]
    return dict(_fingerprints(settings.train, settings.dev, settings.task, *written))


@functools.lru_cache
def _fingerprints(
    train: str, dev: str | None, task: Trainable, *written: tuple[int, int] | None
) -> dict[str, str]:
    """Read the data once for the runs of a series, unless a file changes."""
    settings = FinetuneConfig(model="", train=train, dev=dev, task=task)
    of_train, of_dev, _ = _examples(settings, unseen)
    return {"train": examples_fingerprint(of_train)} | (
        {} if dev is None else {"dev": examples_fingerprint(of_dev)}
    )


def _examples(
    settings: FinetuneConfig, on_stage: OnStage
) -> tuple[list[Any], list[Any], Trainable]:
    """Return training and dev examples, and the task with the columns that were read."""
    train, definition = _read(settings.train, settings.task, on_stage)
    return train, _read(settings.dev, definition, on_stage)[0] if settings.dev else [], definition


def _read(source: str, definition: Trainable, on_stage: OnStage) -> tuple[list[Any], Trainable]:
    columns: Any = definition.columns
    reading: Reading[Any] = definition.read(source, columns)
    examples = list(followed_reading(reading, f"reading {source}", on_stage, REPORTED).examples)
    return examples, reading.task  # type: ignore[return-value]


def _source(name: str, examples: list[Any], on_stage: OnStage) -> ModelSource:
    return ModelSource(
        name,
        len(examples),
        examples_fingerprint(
            followed(examples, partial(on_stage, f"fingerprint of {name}"), REPORTED)
        ),
    )


def _load(settings: FinetuneConfig, model: Model, data: LabelledData) -> Load:
    longest = max(len(sequence) for sequence in data.sequences)
    return Load(
        model.config,
        model.specification,
        longest,
        settings.microbatch_tokens,
        settings.training,
    )


def training_of(settings: FinetuneConfig, directions: Mapping[str, Direction]) -> Training:
    """Return the training with what depends on dev data: evaluations and best checkpoint."""
    if settings.dev is None:
        return dataclasses.replace(
            settings.training,
            evaluate=None,
            keep=dataclasses.replace(settings.training.keep, best=None),
        )
    best = Best(dev_name(settings.chosen_by), directions[settings.chosen_by])
    return dataclasses.replace(
        settings.training, keep=dataclasses.replace(settings.training.keep, best=best)
    )


def dev_name(metric: str) -> str:
    """Return the name of a dev metric in the run's records.

    The names of losses and accuracies include their target: "loss" → "dev/loss/label".
    """
    return f"dev/{metric}/label" if metric in {"loss", "accuracy"} else f"dev/{metric}"


def remarks(ready: PreparedRun) -> list[str]:
    """Return the warnings and notes of the preflight, guessed columns, and missing dev data."""
    lines = [f"{finding.severity}: {finding}" for finding in ready.findings]
    if ready.data.definition != ready.settings.task:
        columns = ready.data.definition.columns  # type: ignore[attr-defined]
        lines.append(f"note: the columns are guessed: {columns}")
    if ready.settings.chosen_by == "f1" and len(ready.data.labels) == 2:
        lines.append(
            f"note: f1 is that of {ready.data.labels[1]!r}, the second of the two labels in order"
        )
    if ready.settings.dev is None:
        lines.append("note: without dev data the last weights are kept, and nothing is measured")
    return lines
