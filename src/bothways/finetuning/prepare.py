"""Preparation of a fine-tuning run: its settings, its model and data, and the preflight."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch

from bothways.core.advice import argument, render
from bothways.core.config import reader as configs
from bothways.core.config.checks import require_seed
from bothways.core.config.toml import read_toml
from bothways.core.config.tree import Tree
from bothways.core.errors import ConfigError, DataError
from bothways.core.finding import Finding, report_findings
from bothways.core.progress import SILENT, Progress, track
from bothways.core.terminal import listed
from bothways.core.urls import local_path
from bothways.data.given_rows import Given, given_rows, is_example, plain_value
from bothways.data.hub_rows import class_names
from bothways.data.tables import TableRow
from bothways.finetuning.automatic import choose_automatic, tokens_read
from bothways.finetuning.config import (
    ELSEWHERE,
    RECIPES,
    SHORTHANDS,
    FinetuneSettings,
    expand_shorthands,
    tinybert_finetuning,
)
from bothways.finetuning.data import LabelledData, check_metric, check_outputs, examine
from bothways.finetuning.fit import training_of
from bothways.finetuning.forecast import forecast
from bothways.finetuning.layer_stage import LayerStage, objective_of
from bothways.finetuning.lora import add_changes
from bothways.finetuning.scaled_head import scale_outputs, scaled_scores
from bothways.finetuning.splits import DevPart, Split, SplitResult, parse_part, split_examples
from bothways.finetuning.stability import apply_stability, fresh_pooler
from bothways.finetuning.teacher import Teacher, with_teacher_scores
from bothways.hub.model_folder import LoadedModel, check_adapter_only, load_model
from bothways.hub.provenance import digest_of_model, stamp
from bothways.hub.resolve import resolve_run
from bothways.model.flops import LossFloats
from bothways.model.heads import Head
from bothways.model.model import Model
from bothways.prediction.predictor import open_learner
from bothways.tasks.base import Reading, TaskModel, examples_fingerprint
from bothways.tasks.catalogue import Trainable
from bothways.tasks.columns import asked_columns, is_absent, require_columns
from bothways.tasks.question_answering.examples import QuestionColumns
from bothways.training.preflight.machine import check_machine, compute_as
from bothways.training.preflight.memory import Load
from bothways.training.preflight.text import check_model
from bothways.training.shorthands import check_names

Rows = str | Path | Given
"""A file or Hub data set, or rows: dicts, examples, a DataFrame, a `datasets.Dataset`."""

REPORTED = 256
"""Number of examples between two reports of progress."""


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(FinetuneSettings):
    """The settings of a fine-tuning run on files.

    `bothways.finetuning.config.FinetuneSettings` documents the inherited fields, such as `task`,
    `training`, `batch` and `length`.

    Attributes:
        model: a model folder, the folder of a pre-training run, or a Hub id.
        train, dev: files or Hub data sets ("hub:owner/name:configuration:split"); without `dev`
            the last weights are kept. A `dev` such as "20%" or "0.2" is split from `train`.
        fresh: heads that start at random in addition to the task's own: "pooler", for one that the
            folder has, or has a part of. A model that was saved without one needs no setting.
        seed: of the fresh heads and all other random weights.
        order_seed: of the order of the data, dropout and mixout. None: the same as `seed`.
        split: how dev data is split from the training data, if `dev` is a share of it.
        teacher: a fine-tuned model whose outputs are learned in addition to the labels.

    Examples:
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
    split: Split = Split()
    teacher: Teacher | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_seed(seed=self.seed, order_seed=self.order_seed)
        if self.split.group is not None and self.dev_part is None:
            what = "groups the rows for a split, and dev is no share of the training data"
            raise ConfigError(what, where="split.group", fix="Give dev=0.2, or leave it out.")
        if self.training.early_stopping is not None and self.dev is None:
            what = "early stopping needs dev data to measure improvement"
            raise ConfigError(
                what,
                where="training.early_stopping",
                fix=f"Give {argument(dev='FILE')}, or leave early_stopping out.",
            )
        if self.stage and (self.stability.mixout or self.stability.pull):
            what = "pulls weights back to those before teacher.stage"
            raise ConfigError(what, where="stability", fix="Leave out one of the two.")
        if self.stage and self.lora is not None:
            what = "trains all weights of the student, which lora leaves as they are"
            raise ConfigError(what, where="teacher.stage", fix="Leave out one of the two.")
        if self.metrics and self.dev is None:
            fix = "Give dev, or leave metrics out."
            raise ConfigError("are of dev data, and there is none", where="metrics", fix=fix)

    @property
    def stage(self) -> LayerStage | None:
        """The stage in which the teacher's layers are learned; None without one."""
        return None if self.teacher is None else self.teacher.stage

    @property
    def dev_part(self) -> DevPart | None:
        """The part of the training data that is dev data; None if it has a source of its own."""
        return None if self.dev is None else parse_part(self.dev)

    @property
    def sources(self) -> dict[str, str]:
        """The names of the training and dev data, for people."""
        if (part := self.dev_part) is not None:
            return {"train": f"{self.train} without {part}", "dev": f"{part} of {self.train}"}
        return {"train": self.train} | ({} if self.dev is None else {"dev": self.dev})

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
    if "sharding" in {**(read_toml(file) if file else {}), **tree}:
        what = "fine-tuning holds the whole model in each rank, and has no such setting"
        fix = (
            "Leave it out; less memory: training.recompute=true, microbatch_tokens=…, lora.rank=8."
        )
        raise ConfigError(what, where="sharding", fix=fix)
    check_names(tree, ELSEWHERE)
    return configs.load(FinetuneConfig, base=base, file=file, overrides=tree, aliases=SHORTHANDS)


@dataclass(frozen=True)
class DataSource:
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
        learner: the model with its fresh heads, on its device.
        data: the examples, checked and encoded.
        sources: of the training and dev data.
        base: the sha256 of the model that the run starts from.
        fresh: kinds of heads that start at random.
        findings: warnings and notes of the preflight.
    """

    settings: FinetuneConfig
    learner: TaskModel[Any, Any]
    data: LabelledData
    sources: Mapping[str, DataSource]
    base: str
    fresh: tuple[str, ...]
    findings: tuple[Finding, ...]


def load_for(settings: FinetuneConfig, heads: Iterable[Head]) -> LoadedModel:
    """Load the model that a run starts from, with its own pooler if it has one, and fresh heads.

    Raises the errors of `load_model`.
    """
    wanted = tuple(heads)
    return load_model(
        resolve_run(settings.model),
        wanted,
        {head.kind for head in wanted} - {"pooler"} | {*settings.fresh},
    )


def prepare_run(
    settings: FinetuneConfig,
    folder: Path | None,
    device: torch.device,
    progress: Progress = SILENT,
    *,
    train: Rows | None = None,
    dev: Rows | None = None,
) -> PreparedRun:
    """Read model and data, check all that could fail later; arguments and errors as `finetune`."""
    task, examples, read_notes, _ = _labelled(settings, train, dev, progress)
    first = examples["train"]
    progress.stage("reading the model")
    base = digest_of_model(settings.model)
    torch.manual_seed(settings.seed)
    loaded = load_for(settings, task.heads(task.labels(first), settings.dropout))
    model, tokenizer = loaded.model, loaded.tokenizer()
    if settings.lora is not None and settings.lora.adapter_only:
        check_adapter_only(settings.model, model, tokenizer)
    data = examine(
        task, tokenizer, first, examples.get("dev", []), settings.length,
        model.config.max_positions, progress,
    )  # fmt: skip
    learned = data.task
    if source := settings.teacher and settings.teacher.unlabelled:
        more = _examples(source, task, "unlabelled", progress, labelled=False).examples
        examples["unlabelled"] = more
        encoded = task.encode(more, tokenizer, data.labels, data.length)
        data = dataclasses.replace(data, unlabelled=tuple(encoded))
    settings, chosen = choose_automatic(
        dataclasses.replace(settings, length=data.length),
        model.config,
        data,
        tokens_read(loaded),
    )
    fresh = loaded.report.fresh_heads
    scale = task.output_scale(first)
    scale_outputs(model, scale)
    # A resumed run passes here, too: mixout and pull read their targets from the model again.
    apply_stability(model, settings.stability, settings.seed, fresh)
    add_changes(model, settings.lora, settings.seed, settings.stability.frozen)
    findings = report_findings(
        [
            *read_notes,
            *check_model(model.config, tokenizer, data.length),
            *data.findings,
            *check_machine(_load(settings, model, data), folder, device),
            *chosen,
            *scaled_scores(scale),
            *fresh_pooler({*fresh, *loaded.untrained} - {*settings.fresh}, settings.model),
        ]
    )
    if settings.teacher is not None:
        precision = settings.training.precision
        data = with_teacher_scores(data, settings.teacher, device, precision, folder, progress)
    check_metric(settings, data)
    check_outputs(data)
    compute_as(model.encoder, settings.training, device)
    learner = learned.learner(model, tokenizer, data.labels, data.length).to(device)
    training = training_of(settings, data)
    if (time := forecast(learner, data, settings, training, folder, progress)) is not None:
        findings.append(time)
    named = {**settings.sources, "unlabelled": str(source)}
    sources = {name: _source(named[name], each, progress) for name, each in examples.items()}
    return PreparedRun(settings, learner, data, sources, base, fresh, tuple(findings))


class _Labelled(NamedTuple):
    """Training and dev examples by name, their task, notes on the reading, and the split."""

    task: Trainable
    examples: dict[str, list[Any]]
    findings: list[Finding]
    split: SplitResult | None = None


def _labelled(
    settings: FinetuneConfig, train: Rows | None, dev: Rows | None, progress: Progress
) -> _Labelled:
    """Read training and dev data, or split the second from the first."""
    part = settings.dev_part
    rows: dict[str, Rows] = {"train": settings.train if train is None else train}
    if settings.dev is not None and part is None:
        rows["dev"] = settings.dev if dev is None else dev
    task, examples, groups = settings.task, dict[str, list[Any]](), None
    findings: list[Finding] = []
    for name, each in rows.items():
        group = settings.split.group if name == "train" else None
        read = _examples(each, task, name, progress, group=group)
        examples[name] = read.examples
        task = read.task
        if name == "train" and part is None:  # for the dev data; else `examine` adapts it
            task = task.adapted(read.examples)
        if not read.examples:
            fix = "Give at least one example."
            raise DataError("there is no example", where=f"{name} rows", fix=fix)
        if name == "train":
            groups = read.groups if group is not None else None
            findings += _unused(read, each)
    if part is None:
        return _Labelled(task, examples, findings)
    done = split_examples(task, examples["train"], part, settings.split, groups)
    parts = {"train": done.train, "dev": done.dev}
    return _Labelled(task, parts, [*findings, *done.findings], done)


def _unused(read: _Read, rows: Rows) -> Iterator[Finding]:
    """Yield notes on columns of training data that are not read, and on classes without rows."""
    if read.unused:
        what = f"columns that are not used: {listed(read.unused, 20)}"
        yield Finding("rows", "note", what)
    features = getattr(rows, "features", None)
    names = class_names(features) if isinstance(features, Mapping) else {}
    column = getattr(read.task.columns, "label", None)
    listed_names = names.get(column or "label") or names.get("labels") or []
    known = {*read.task.labels(read.examples)}
    if known and (never := [name for name in listed_names if name not in known]):
        what = f"no row has one of the classes {listed(never, 20)}, which the data set lists"
        yield Finding("labels", "warning", what, fix="They are not learned, and have no output.")


def read_split(settings: FinetuneConfig, train: Rows | None = None) -> SplitResult:
    """Return the training and dev data of a run whose dev data is split from its training data.

    Raises:
        ConfigError: the run has another dev data.
        DataError: the data cannot be read.
    """
    done = _labelled(settings, train, None, SILENT).split
    if done is None:
        raise ConfigError("is no share of the training data", where="dev", fix="Give dev=0.2.")
    return done


def fingerprints(task: Trainable, sources: Mapping[str, str]) -> dict[str, str]:
    """Return the sha256 of the examples of each source by name; the first has the columns.

    Raises:
        DataError: the data cannot be read.
    """
    written = (stamp(local_path(source)) for source in sources.values())
    return dict(_fingerprints(task, tuple(sources.items()), *written))


@functools.lru_cache
def _fingerprints(
    task: Trainable, sources: tuple[tuple[str, str], ...], *written: tuple[int, int] | None
) -> dict[str, str]:
    """Read the data once for the runs of a series, unless a file changes."""
    result = {}
    for name, source in sources:
        read = _examples(source, task, name, SILENT)
        task = read.task
        result[name] = examples_fingerprint(read.examples)
    return result


def _examples(
    rows: Rows,
    task: Trainable,
    name: str,
    progress: Progress,
    labelled: bool = True,
    group: str | None = None,
) -> _Read:
    """Return the examples in rows, the task with the columns that were read, and the groups.

    Args:
        group: the column of the groups; None for none.
    """
    columns: Any = task.columns
    groups: list[Hashable] = []
    watched = _WatchedRow({})
    if not isinstance(rows, str | Path):

        def parse_row(row: TableRow) -> Any:
            """Return the example in a row, and note its group."""
            if group is not None:
                groups.append(_group(row.values, group, row.where))
            nonlocal watched
            if not watched and isinstance(row.values, Mapping):
                watched = _WatchedRow(row.values)
                row = dataclasses.replace(row, values=watched)
            return _example(row, task)

        given = task.read_rows(_numbered(rows, task, name), parse_row, labelled=labelled)
        examples = list(given.examples)
        for note in given.notes:
            progress.message(render(f"note: {note}"))
        if group is not None and len(groups) != len(examples):
            raise _no_groups(group, name)
        return _Read(examples, task, groups, watched.unused(group))
    reading: Reading[Any] = task.read(str(rows), columns, labelled=labelled)
    share = reading.share
    progress.stage(f"reading {rows}", None if share is None else 1.0)
    examples, table, parse = list[Any](), reading.table, reading.parse
    if group is not None and (table is None or parse is None):
        raise _no_groups(group, str(rows))
    if table is None or parse is None:
        examples += _tracked(reading.examples, share, progress)
    else:
        for row in _tracked(table.rows, share, progress):
            if group is not None:
                groups.append(_group(row.values, group, row.where))
            if not examples:
                watched = _WatchedRow(row.values)
                row = dataclasses.replace(row, values=watched)  # noqa: PLW2901 – noted, as above
            examples.append(parse(row))
    for note in reading.notes:
        progress.message(render(f"note: {note}"))
    chosen: Trainable = reading.task  # type: ignore[assignment]
    return _Read(examples, chosen, groups, [*watched.unused(group), *reading.unused])


def _tracked(
    items: Iterable[Any], share: Callable[[], float] | None, progress: Progress
) -> Iterator[Any]:
    """Yield items, and advance the progress by the share of a file that is read."""
    for number, item in enumerate(items):
        if number % REPORTED == 0:
            progress.advance(number if share is None else share())
        yield item


class _Read(NamedTuple):
    """Examples in order, the task with their columns, the group of each, and unused columns."""

    examples: list[Any]
    task: Trainable
    groups: list[Hashable]
    unused: list[str]


class _WatchedRow(Mapping[str, Any]):
    """A row that knows which of its values have been read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values, self._read = values, set[str]()

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        self._read.add(name)
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def unused(self, group: str | None) -> list[str]:
        """Return the names of values that have not been read; unnamed columns do not count."""
        return [name for name in self._values if name and name not in {*self._read, group}]


def _no_groups(group: str, where: str) -> DataError:
    what = f"has no column {group!r}: only tables of one example a row have groups"
    return DataError(what, where=where, fix=f"Leave {argument(group=group)} out.")


def _numbered(rows: Given, task: Trainable, name: str) -> Iterator[TableRow]:
    """Yield rows in memory with their numbers."""
    columns: Any = task.columns
    for number, item in enumerate(given_rows(rows, name), 1):
        where = f"{name} row {number}"
        if number == 1 and name == "train" and isinstance(item, Mapping):
            fix = 'Name its columns: columns={"text": NAME, …}.'
            table = getattr(task, "column_table", ())
            require_columns(asked_columns(columns, table, [*item]), [*item], where, fix)
        if isinstance(columns, QuestionColumns) and isinstance(item, Mapping):
            yield TableRow({columns.id: number, **item}, where)  # as in a file
        else:
            yield TableRow(item, where)


def _group(row: Any, column: str, where: str) -> Hashable:
    """Return the group of a row; one without a value is a group of its own."""
    if not isinstance(row, Mapping) or column not in row:
        names = [*row] if isinstance(row, Mapping) else []
        require_columns([column], names, where, f"Name one: {argument(group='NAME')}.")
    value = plain_value(row[column])
    return where if is_absent(value) or value == "" else str(value)


def _example(row: TableRow, task: Trainable) -> Any:
    """Return the example in an item of rows: a dict with its columns, or an example."""
    item, where = row.values, row.where
    if isinstance(item, Mapping):
        return task.example(item, where=where)
    if is_example(item):
        return item
    fix = 'Give dicts such as {"text": "a good film", "label": "positive"}.'
    raise DataError(f"is of type {type(item).__name__}, not a dict by column", where=where, fix=fix)


def _source(name: str, examples: list[Any], progress: Progress) -> DataSource:
    tracked = track(examples, progress, f"fingerprint of {name}", REPORTED)
    return DataSource(name, len(examples), examples_fingerprint(tracked))


def _load(settings: FinetuneConfig, model: Model, data: LabelledData) -> Load:
    """Return the demands of the run, or of its first stage, which holds a teacher, too."""
    longest = max(len(sequence) for sequence in data.sequences)
    load = Load(
        ((model.config, model.specification),),
        longest,
        settings.microbatch_tokens,
        settings.training,
        losses=_label_floats(data),
        trained=sum(weight.numel() for weight in model.parameters() if weight.requires_grad),
    )
    if settings.teacher is None or settings.stage is None:
        return load
    objective = objective_of(settings.stage, settings.teacher.folder, model.config)
    teacher = objective.models(model.config)["teacher"]
    return dataclasses.replace(
        load,
        losses=objective.loss_floats(model.config),
        frozen=((teacher.encoder, teacher.heads),),
    )


def _label_floats(data: LabelledData) -> LossFloats:
    """Return the numbers that labels hold: logits, probabilities and gradients, and targets."""
    count, tagged = len(data.labels), data.task.name == "tag"
    each = 3 * count / (1 if tagged else data.tokens / len(data.sequences))
    dense = data.task.problem == "multi_label_classification"
    return LossFloats(each, fixed=dense * count * (len(data.train) + len(data.dev)))


def remarks(ready: PreparedRun) -> list[str]:
    """Return the warnings and notes of the preflight, guessed columns, and missing dev data."""
    lines = [f"{finding.severity}: {finding}" for finding in ready.findings]
    columns = ready.data.task.columns  # type: ignore[attr-defined]
    if columns != ready.settings.task.columns:
        lines.append(f"note: the columns are guessed: {columns}")
    for name, value in vars(ready.data.task).items():
        if isinstance(value, str) and value != getattr(ready.settings.task, name):
            lines.append(f"note: task.{name} is chosen by the training data: {value}")
    if ready.settings.chosen_by == "f1" and len(ready.data.labels) == 2:
        lines.append(
            f"note: f1 is that of {ready.data.labels[1]!r}, the second of the two labels in order"
        )
    if ready.settings.dev is None:
        lines.append("note: without dev data the last weights are kept, and nothing is measured")
    return lines


def taught_finetuning(
    teacher: str,
    train: str,
    student: str | None,
    recipe: str | None = None,
    dev: str | None = None,
) -> FinetuneConfig:
    """Return the settings of a run in which a student learns the task of its teacher.

    Args:
        teacher: a fine-tuned model: a folder, the folder of a run, or a Hub id.
        train, dev: as in `FinetuneConfig`.
        student: a model folder, the folder of a pre-training run, or a Hub id.
        recipe: "modern", "paper" or "tinybert"; None for the first. The last has two stages: the
            teacher's layers, then its answers without the labels.

    Raises:
        ConfigError: no student, an unknown recipe, or the teacher was not fine-tuned for a task.
        FolderError: the teacher cannot be read.
    """
    if student is None:
        what = "is missing: labelled data needs a pre-trained student"
        fix = "Name one with the teacher's vocabulary, or give a corpus folder to pre-train one."
        raise ConfigError(what, where="student", fix=fix)
    recipes = {**RECIPES, "tinybert": tinybert_finetuning}
    if recipe is not None and recipe not in recipes:
        what = f"{recipe!r} is for a corpus, and the data is labelled"
        raise ConfigError(what, where="recipe", fix=f"Choose one of {', '.join(recipes)}.")
    task = open_learner(teacher).task
    if not isinstance(task, get_args(Trainable)):
        what = f"{teacher} is for the task {task.name!r}, which needs no labels"
        fix = "Choose a fine-tuned teacher, or give a corpus folder instead of labelled data."
        raise ConfigError(what, where="teacher", fix=fix)
    settings, taught_by = recipes[recipe or "modern"](type(task)()), Teacher(teacher)
    if recipe == "tinybert":
        taught_by = Teacher(teacher, weight=1.0, temperature=1.0, stage=LayerStage())
    return FinetuneConfig(model=student, train=train, dev=dev, teacher=taught_by, **vars(settings))
