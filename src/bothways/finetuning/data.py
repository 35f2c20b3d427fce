"""Labelled data of a fine-tuning run: read, split, checked and encoded, then predicted and scored.

rows or a file ──read_examples──▶ examples ──label──▶ LabelledData, for any number of runs
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bothways.core.config import reader as configs
from bothways.core.errors import (
    ConfigError,
    DataError,
    Finding,
    FolderError,
    argument,
    render,
    report_findings,
)
from bothways.core.files import is_url, local_path
from bothways.core.progress import SILENT, Progress
from bothways.core.source import Sequence
from bothways.core.terminal import listed, quantity
from bothways.data import tables
from bothways.data.loader import ListSource, Loader, unchanged
from bothways.data.tables import HUB, TableRow, WatchedRow
from bothways.finetuning.config import FinetuneConfig, Metric
from bothways.finetuning.few_shot import fit_head
from bothways.finetuning.splits import Split, SplitResult, split_examples
from bothways.hub.hf_config import RECORD
from bothways.hub.provenance import stamp
from bothways.hub.resolve import object_in, resolve, resolve_run
from bothways.prediction import engine
from bothways.prediction.opening import open_task_model
from bothways.tasks import base
from bothways.tasks.columns import TableTask, is_absent, require_columns
from bothways.text.tokenizer import Tokenizer
from bothways.training.encoding_checks import UNKNOWN, unknown_tokens

Rows = str | Path | tables.TableLike
"""A file or Hub data set, or rows: dicts, examples, a DataFrame, a `datasets.Dataset`."""
REPORTED = 256
"""Number of examples between two reports of progress while reading."""
ENCODED = 1024
"""Number of examples that are encoded between two reports of progress."""
WHOLE, ROUND = 0.95, 32
"""The share of texts that the default length holds whole, and the multiple it is rounded to."""
SAMPLE = 1000
"""Number of texts in the sample that casing is checked on."""


@dataclass(frozen=True)
class LabelledData:
    """Examples that are checked and encoded.

    Attributes:
        task: the task, with what it counts in training data.
        labels: names of the model's outputs, in order.
        length: maximum length of a sequence in tokens.
        train, dev: the encoded examples.
        train_examples, dev_examples: examples before encoding; `dev_examples` may be empty.
        unlabelled: further training examples, which only a teacher answers.
    """

    task: base.Task[Any, Any]
    tokenizer: Tokenizer
    labels: tuple[str, ...]
    length: int
    train: tuple[base.EncodedExample, ...]
    dev: tuple[base.EncodedExample, ...]
    train_examples: tuple[Any, ...]
    dev_examples: tuple[Any, ...]
    findings: tuple[Finding, ...]
    unlabelled: tuple[base.EncodedExample, ...] = ()

    @functools.cached_property
    def sequences(self) -> list[Sequence]:
        """All training sequences."""
        items = itertools.chain(self.train, self.unlabelled)
        return [sequence for item in items for sequence in self.task.training_sequences(item)]

    @property
    def tokens(self) -> int:
        """Tokens of an epoch, special tokens included."""
        return sum(len(sequence) for sequence in self.sequences)


def examine(  # noqa: PLR0913 – what a run knows of its data and its model
    task: base.Task[Any, Any],
    tokenizer: Tokenizer,
    train: Many[Any],
    dev: Many[Any],
    length: int | None,
    max_positions: int | None = None,
    progress: Progress = SILENT,
    *,
    usual_length: int | None = None,
    labels: tuple[str, ...] = (),
) -> LabelledData:
    """Encode and check examples as `label`; errors are among the findings.

    Args:
        length: None means `usual_length`, or the length that holds nearly all training texts
            whole, if that is more.
        max_positions: maximum length of the model; None means `length`.
        usual_length: the length of the model that is trained further; None for the task's own.
        labels: the labels of the training data in the model's order; empty for the task's order.
    """
    task = task.adapted(train, labels)
    labels, shortest = labels or task.labels(train), usual_length or task.length
    max_length = max_positions or length or shortest
    unseen_labels = (name for name in task.labels([*train, *dev]) if name not in labels)
    all_labels = (*labels, *unseen_labels)  # more than `labels` only if there is an error

    def encode(length: int) -> tuple[base.EncodedExample, ...]:
        inputs: list[base.EncodedExample] = []
        progress.stage("tokenizing", len(train) + len(dev))
        for window in engine.grouped([*train, *dev], ENCODED, task.shared):
            progress.advance(len(inputs))
            inputs += task.encode(window, tokenizer, all_labels, length)
        return tuple(inputs)

    used_length = length or min(shortest, max_length)
    inputs = encode(used_length)
    if length is None and any(item.cut for item in inputs[: len(train)]):
        longer = min(max_length, max(used_length, needed_length(inputs[: len(train)])))
        if longer > used_length:
            used_length, inputs = longer, encode(longer)
    encoded = inputs[: len(train)], inputs[len(train) :]
    progress.stage("checking the data")
    limit = max_positions or math.inf

    def advise(needed: int) -> str:
        return task.truncation_advice[needed > limit].format(needed=needed, limit=limit)

    findings = (
        *task.check(train, dev),
        *check_casing(tokenizer, [text for example in train for text in task.texts(example)]),
        *check_inputs(encoded[0], tokenizer, used_length, advise),
    )
    examples = tuple(train), tuple(dev)
    return LabelledData(task, tokenizer, labels, used_length, *encoded, *examples, findings)


def needed_length(inputs: Iterable[base.EncodedExample], share: float = WHOLE) -> int:
    """Return the length that holds this share of examples whole, rounded up to a multiple of 32.

    Example: 95 % of the texts have at most 201 tokens, special tokens included → 224.
    """
    rows = ([n for s in item.sequences for n in s.parts or (len(s),)] for item in inputs)
    lengths = [max(row, default=0) + item.cut for row, item in zip(rows, inputs, strict=True)]
    return -(-int(np.quantile(lengths, share, method="inverted_cdf")) // ROUND) * ROUND


def check_inputs(
    inputs: Many[base.EncodedExample],
    tokenizer: Tokenizer,
    length: int,
    advice: Callable[[int], str],
) -> list[Finding]:
    """Report texts that are cut off, and unknown tokens.

    Args:
        advice: returns the fix, given the length that holds nearly all texts, or, if `length` does,
            all of them.
    """
    findings = []
    cut = [item for item in inputs if item.cut]
    if cut:
        lost = sum(item.cut for item in cut) / sum(item.tokens for item in inputs)
        fault = f"of {len(inputs):,} examples ({len(cut) / len(inputs):.1%}) is|are longer than "
        fault += f"{length:,} tokens and is|are cut"
        message = f"{quantity(len(cut), fault)}: {lost:.1%} of all tokens are not read"
        needed = needed_length(inputs)
        if needed <= length:  # which holds nearly all: the rest asks for more
            needed = needed_length(inputs, 1.0)
        fix = advice(needed)
        findings.append(Finding("truncation", "warning", message, "length", fix))
    ids = [sequence.ids for item in inputs for sequence in item.sequences]
    share = float((np.concatenate(ids) == tokenizer.specials.unknown).mean()) if ids else 0.0
    if share > UNKNOWN:
        findings += unknown_tokens(share, "Use a model whose vocabulary fits this text.")
    return findings


def check_casing(tokenizer: Tokenizer, texts: Many[str]) -> list[Finding]:
    """Check that vocabulary and tokenizer agree about capital letters, by a sample of the text."""
    sample = list(texts[:: max(1, len(texts) // SAMPLE)][:SAMPLE])
    if tokenizer.lowercase:
        control = tokenizer.special | (np.arange(tokenizer.size) == tokenizer.specials.unknown)
        tokens = [token for token, id in tokenizer.backend.get_vocab().items() if not control[id]]
        capital = sum(token != token.lower() for token in tokens) / max(1, len(tokens))
        if capital <= 0.1:
            return []
        message = f"the vocabulary is cased ({capital:.0%} of its tokens have capitals), "
        message += "but the tokenizer lower-cases"
        fix = 'Set "do_lower_case": false in tokenizer_config.json.'
        return [Finding("casing", "warning", message, "tokenizer", fix)]
    unknown, lowered = (
        float((ids == tokenizer.specials.unknown).mean()) if len(ids) else 0.0
        for ids, _ in map(tokenizer.encode_flat, (sample, [text.lower() for text in sample]))
    )
    if unknown - lowered <= UNKNOWN:
        return []
    message = "the vocabulary is uncased, but the tokenizer keeps capitals: "
    message += f"{unknown:.1%} of tokens are unknown, lower-cased {lowered:.1%}"
    fix = 'Set "do_lower_case": true in tokenizer_config.json.'
    return [Finding("casing", "warning", message, "tokenizer", fix)]


def label(
    task: base.Task[Any, Any],
    tokenizer: Tokenizer,
    train: Many[Any],
    dev: Many[Any],
    length: int | None,
) -> LabelledData:
    """Check and encode examples, once for any number of runs.

    Args:
        length: maximum length of a sequence in tokens; None means the task's own.

    Raises:
        BothwaysError: problems that prevent learning, such as an empty text, an absent label, or
            fewer than two classes; one message lists all of them.
    """
    data = examine(task, tokenizer, train, dev, length)
    return dataclasses.replace(data, findings=tuple(report_findings(data.findings)))


def train_loader(
    sequences: Many[Sequence], settings: FinetuneConfig, seed: int, rank: int = 0, world: int = 1
) -> Loader:
    """Return the steps over training sequences, shuffled in each epoch."""
    source = ListSource(sequences, seed)
    tokens = settings.microbatch_tokens
    return Loader(source, unchanged, settings.batch, tokens, seed, rank, world)


def dev_windows(data: LabelledData) -> Iterator[tuple[list[Any], list[base.EncodedExample]]]:
    """Yield windows of dev examples with their encoded forms, as `engine.encoded_windows` does."""
    size = engine.window_size(data.task, data.labels)
    for start in range(0, len(data.dev), size):
        window = slice(start, start + size)
        yield list(data.dev_examples[window]), list(data.dev[window])


def predictions(
    task_model: base.TaskModel[Any, Any],
    data: LabelledData,
    progress: Progress = SILENT,
    stage: str = "scoring the dev data",
) -> Iterator[tuple[Any, Any]]:
    """Yield the dev examples with their predictions, as a stage of `progress`.

    Only the predictions of one window are held at a time.
    """
    progress.stage(stage, len(data.dev))
    counts = engine.PredictionCounts(on_count=progress.advance)
    yield from engine.predict_windows(task_model, dev_windows(data), counts=counts)


def score(
    task_model: base.TaskModel[Any, Any],
    data: LabelledData,
    settings: FinetuneConfig,
    progress: Progress = SILENT,
) -> base.Metrics:
    """Return the metrics of the dev data, by their names in the records of a run, with the settings
    of the task that tuning on this data would choose; the head of few-shot training is fitted.
    """
    fit_head(task_model, data.sequences, settings)
    score_tuned = functools.partial(task_model.score_tuned, metric=settings.chosen_by)
    results = predictions(task_model, data, progress)
    metrics = scored(results, score_tuned, settings.own_metrics)
    if settings.chosen_by not in metrics:  # of a user's function that returns other names
        message = f"{settings.chosen_by!r} is not among the metrics: {', '.join(metrics)}"
        raise ConfigError(message, where="metric", fix="Name one of them.")
    return {f"dev/{name}": value for name, value in metrics.items()}


def scored(
    results: Iterable[tuple[Any, Any]],
    score: Callable[[Iterable[tuple[Any, Any]]], base.Metrics],
    metrics: Mapping[str, Metric],
) -> base.Metrics:
    """Return the metrics of a task, and a user's own, which need all predictions at once.

    The numbers of a metric that returns several are named "metric/name".

    Args:
        score: returns the metrics of the task.

    Raises:
        ConfigError: a function returns something else than numbers.
    """
    if not metrics:
        return score(results)
    pairs = list(results)
    values = dict(score(pairs))
    examples, predictions = [example for example, _ in pairs], [result for _, result in pairs]
    for name, metric in metrics.items():
        result = metric.function(predictions, examples)
        if isinstance(result, Mapping):
            values |= {f"{name}/{key}": _number(value, name) for key, value in result.items()}
        else:
            values[name] = _number(result, name)
    return values


def _number(value: Any, name: str) -> float:
    try:
        if not isinstance(value, str):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    fix = "Return a number, or a dict of numbers by name."
    raise ConfigError(f"its function returned {value!r}", where=f"metrics.{name}", fix=fix)


class ExamplesRead(NamedTuple):
    """Training and dev examples by name, their task, notes on the reading, and the split."""

    task: base.Task[Any, Any]
    examples: dict[str, list[Any]]
    findings: list[Finding]
    split: SplitResult | None = None


def read_examples(
    settings: FinetuneConfig,
    train: Rows | None = None,
    dev: Rows | None = None,
    progress: Progress = SILENT,
) -> ExamplesRead:
    """Read the training and dev data of a run, or split the second from the first.

    Args:
        train, dev: rows to read instead of the sources that the settings name.

    Raises:
        DataError: the data cannot be read, or there is no example.
    """
    share, columns, group = settings.dev_part, settings.task.columns, settings.split.group
    number = settings.dev if dev is None else dev
    is_number = isinstance(number, str) and re.fullmatch(r"[\d.,]+", number) is not None
    if is_number and share is None and not local_path(str(number)).exists():
        fix = f"For a part of the training data: {argument(dev='20%')}."
        raise ConfigError(f"{number!r} is neither a file nor a share", where="dev", fix=fix)
    source = settings.train if train is None else train
    rows = read_rows(source, settings.task, "train", progress, group=group, requested=columns)
    task, findings = rows.task, list[Finding]()
    if rows.unused:
        message = f"columns that are not used: {listed(rows.unused, 20)}"
        findings.append(Finding("rows", "note", message))
    labels = {*task.labels(rows.examples)}
    label_columns = [getattr(task.columns, field, None) or field for field in ("label", "tags")]
    listing = [name for name in (*label_columns, "labels") if name in rows.classes]
    classes = rows.classes[listing[0]] if listing else ()
    if labels and (missing := listed((x for x in classes if x not in labels), 20)):
        message = f"no row has one of the classes {missing}, which the data set lists"
        fix = "They are not learned, and have no output."
        findings.append(Finding("labels", "warning", message, fix=fix))
    if share is not None:
        progress.stage("splitting the dev data")
        split = split_examples(task, rows.examples, share, settings.split, rows.groups or None)
        sides = {"train": split.train, "dev": split.dev}
        return ExamplesRead(task, sides, [*findings, *split.findings], split)
    examples = {"train": rows.examples}
    if settings.dev is not None:
        source, adapted = settings.dev if dev is None else dev, task.adapted(rows.examples)
        examples["dev"] = read_rows(source, adapted, "dev", progress, requested=columns).examples
    return ExamplesRead(task, examples, findings)


class RowsRead(NamedTuple):
    """Examples in order, the task with their columns, and what else the rows hold.

    Attributes:
        groups: the group of each example, if a column names groups.
        classes: the classes that the source lists for a column, with or without rows of them.
    """

    examples: list[Any]
    task: base.Task[Any, Any]
    groups: list[Hashable]
    unused: list[str]
    classes: Mapping[str, Many[str]]


def read_rows(
    rows: Rows,
    task: base.Task[Any, Any],
    name: str,
    progress: Progress = SILENT,
    *,
    labelled: bool = True,
    group: str | None = None,
    requested: Any = None,
) -> RowsRead:
    """Read the examples of a file, a Hub data set, or rows in memory.

    Args:
        name: name of rows in memory in messages, such as "train".
        group: the column of the groups; None for none.
        requested: the columns that the user names; a table that lacks further ones of the task,
            such as dev data of another form, has its own guessed. None: the task's.

    Raises:
        DataError: the data cannot be read, or there is no example.
    """

    selected = dict[tuple[str, ...], Any]()  # by the names of a row: choosing takes 0.1 ms

    def parse(row: TableRow) -> Any:
        """Return the example in a row in memory: a dict with its columns, or an example."""
        item, location = row.values, row.where
        if isinstance(item, Mapping):
            # Those of the training data are the user's; the dev data may have others.
            requested = task.columns if name == "train" else None
            if not isinstance(task, TableTask):
                return task.example(item, requested, where=location)
            if (names := (*item,)) not in selected:
                selected[names] = task.row_columns(item, requested, where=location)
            return task.parse(item, selected[names], location)
        if tables.is_example(item):
            return item
        message = f"is of type {type(item).__name__}, not a dict by column"
        fix = 'Give dicts such as {"text": "a good film", "label": "positive"}.'
        raise DataError(message, where=location, fix=fix)

    parser, location, examples = _Parser(parse, group), f"{name} rows", list[Any]()
    classes: Mapping[str, Many[str]] = {}
    columns = task.columns
    reading: base.Reading[Any]
    if not isinstance(rows, str | Path):
        progress.stage(f"reading {location}")
        reading = task.read_rows(_numbered(rows, name), parser, labelled=labelled)
        classes = tables.listed_classes(rows)
        examples += reading.examples
        # Rows that differ, such as one text and two, have no columns in common.
        if name == "train" and len(columns_read := {*selected.values()}) == 1:
            task = task.with_columns(*columns_read)
    else:
        columns = columns if requested is None else requested
        reading, location = task.read(str(rows), columns, labelled=labelled), str(rows)
        progress.stage(f"reading {rows}", None if reading.share is None else 1.0)
        items: Iterable[Any] = reading.examples
        if reading.table is not None and reading.parse is not None:
            parser.parse, classes = reading.parse, reading.table.classes
            items = map(parser, reading.table.rows)
        task = reading.task
        for number, item in enumerate(items):
            if number % REPORTED == 0:
                progress.advance(number if reading.share is None else reading.share())
            examples.append(item)
    if not examples:
        fix = "Give at least one example."
        raise DataError("there is no example", where=location, fix=fix)
    for note in reading.notes:
        progress.message(render(f"note: {note}"))
    if group is not None and len(parser.groups) != len(examples):
        message = f"has no column {group!r}: only tables of one example a row have groups"
        raise DataError(message, where=location, fix=f"Leave {argument(group=group)} out.")
    read_task: Any = reading.task  # knows the column of sentences, too
    columns = (*vars(task.columns).values(), *vars(read_task.columns).values())
    unused = [name for name in (*parser.unused, *reading.unused) if name not in columns]
    return RowsRead(examples, task, parser.groups, unused, classes)


class _Parser:
    """A parser of rows that notes the group of each, and the columns of the first that it reads."""

    def __init__(self, parse: Callable[[TableRow], Any], group: str | None) -> None:
        self.parse, self.groups = parse, list[Hashable]()
        self._group, self._first = group, WatchedRow({})

    def __call__(self, row: TableRow) -> Any:
        """Return the example in a row."""
        if self._group is not None:
            self.groups.append(_group(row.values, self._group, row.where))
        if not self._first and isinstance(row.values, Mapping):
            self._first = WatchedRow(row.values)
            row = dataclasses.replace(row, values=self._first)
        return self.parse(row)

    @property
    def unused(self) -> list[str]:
        """The named columns that have not been read."""
        used = {*self._first.read, self._group}
        return [name for name in self._first if name and name not in used]


def _numbered(rows: tables.TableLike, name: str) -> Iterator[TableRow]:
    """Yield rows in memory with their numbers."""
    for number, row in enumerate(tables.iter_rows(rows, name), 1):
        item = row
        if isinstance(row, Mapping):  # csv.DictReader has None as the name of surplus cells
            item = {str(column): value for column, value in row.items()}
        yield TableRow(item, f"{name} row {number}")


def _group(row: Any, column: str, location: str) -> Hashable:
    """Return the group of a row; one without a value is a group of its own."""
    if not isinstance(row, Mapping) or column not in row:
        names = [*row] if isinstance(row, Mapping) else []
        require_columns([column], names, location, f"Name one: {argument(group='NAME')}.")
    value = tables.plain_value(row[column])
    return location if is_absent(value) or value == "" else str(value)


@dataclass(frozen=True)
class DataSource:
    """The data that a model was trained on."""

    name: str
    examples: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.name}, {self.examples:,} examples, sha256 {self.sha256}"


def fingerprints(task: base.Task[Any, Any], sources: Mapping[str, str]) -> dict[str, str]:
    """Return the sha256 of the examples of each source by name; the first has the columns.

    Raises:
        DataError: the data cannot be read.
    """
    written = (stamp(local_path(source)) for source in sources.values())
    return dict(_fingerprints(task, tuple(sources.items()), *written))


@functools.lru_cache
def _fingerprints(
    task: base.Task[Any, Any],
    sources: tuple[tuple[str, str], ...],
    *written: tuple[int, int] | None,
) -> dict[str, str]:
    """Read the data once for the runs of a series, unless a file changes."""
    result, requested = {}, task.columns
    for name, source in sources:
        rows = read_rows(source, task, name, requested=requested)
        task, result[name] = rows.task, base.examples_fingerprint(rows.examples)
    return result


def read_split(settings: FinetuneConfig, train: Rows | None = None) -> SplitResult:
    """Return the training and dev data of a run whose dev data is split from its training data.

    Raises:
        ConfigError: the run has another dev data.
        DataError: the data cannot be read.
    """
    split = read_examples(settings, train).split
    if split is None:
        fix = f"Give {argument(dev='20%')}."
        raise ConfigError("is no share of the training data", where="dev", fix=fix)
    return split


def read_recorded_split(folder: str) -> tuple[str, list[Any]] | None:
    """Return the name of the dev data of a finished run, such as "20% of t.csv", and its examples.

    None if it was not split from the training data.

    Args:
        folder: a model folder, or the folder of a run.

    Raises:
        DataError: the training data cannot be read, or is not what the run was trained on.
        FolderError: the folder or its record cannot be read.
    """
    record = resolve(resolve_run(folder)) / RECORD
    values = object_in(record)
    if not isinstance(recorded := values.get("split"), dict):
        return None
    try:
        train, dev = str(recorded["train"]), str(recorded["dev"])
        expected = values["data"]["dev"]["sha256"]
        split = configs.read(Split, {name: recorded[name] for name in ("group", "seed")})
    except (KeyError, TypeError, ConfigError) as error:
        raise FolderError("is not the record of a split", where=record) from error
    if train.endswith(" rows") and not local_path(train).exists():
        message = "was trained on rows in memory, from which its dev data cannot be split again"
        raise DataError(message, where=folder, fix="Give rows, or a file to evaluate on.")
    if not (is_url(train) or train.startswith(HUB) or local_path(train).exists()):
        message = (
            f"was trained on {train}, from which its dev data was split, and which is not here"
        )
        fix = "Go to the folder where it was trained, or give a file to evaluate on."
        raise DataError(message, where=folder, fix=fix)
    task = open_task_model(folder).task
    settings = FinetuneConfig(model=folder, train=train, dev=dev, split=split, task=task)  # type: ignore[arg-type]
    examples = read_split(settings).dev
    if base.examples_fingerprint(examples) != expected:
        message = "is not what the run was trained on: its dev data cannot be split from it again"
        fix = "Give the earlier file, or a file to evaluate on."
        raise DataError(message, where=train, fix=fix)
    return settings.sources["dev"], examples
