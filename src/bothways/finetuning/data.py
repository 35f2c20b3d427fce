"""Labelled examples: checked and encoded once for any number of runs, loaded, predicted, scored."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from bothways.core.errors import ConfigError
from bothways.core.finding import Finding, report_findings
from bothways.core.progress import SILENT, Progress
from bothways.core.sequence import Sequence
from bothways.core.terminal import counted
from bothways.data.batching import ExampleBudget
from bothways.data.list_source import ListPlan, ListSource, Shuffled
from bothways.data.loader import Loader, Share, unchanged
from bothways.finetuning.config import FinetuneSettings
from bothways.finetuning.metrics import Metric, scored
from bothways.model.heads import LabelHead, TagHead
from bothways.prediction.engine import (
    PredictionCounts,
    grouped,
    predict_windows,
    window_size,
)
from bothways.tasks.base import EncodedExample, Metrics, Task, TaskModel
from bothways.text.tokenizer import Tokenizer
from bothways.training.preflight.text import check_casing, check_inputs, needed_length

ALL = Share()
"""All of the data: a single process."""
ENCODED = 1024
"""Number of examples that are encoded between two reports of progress."""


@dataclass(frozen=True)
class LabelledData:
    """Examples that are checked and encoded.

    Attributes:
        task: what the examples are for.
        labels: in the order of the model's outputs.
        length: maximum length of a sequence in tokens.
        train, dev: the encoded examples.
        train_examples, dev_examples: as they were read; `dev_examples` may be empty.
        findings: of the preflight.
        unlabelled: further training examples, which only a teacher answers.
    """

    task: Task[Any, Any]
    tokenizer: Tokenizer
    labels: tuple[str, ...]
    length: int
    train: tuple[EncodedExample, ...]
    dev: tuple[EncodedExample, ...]
    train_examples: tuple[Any, ...]
    dev_examples: tuple[Any, ...]
    findings: tuple[Finding, ...]
    unlabelled: tuple[EncodedExample, ...] = ()

    @property
    def sequences(self) -> list[Sequence]:
        """All training sequences."""
        items = itertools.chain(self.train, self.unlabelled)
        return [sequence for item in items for sequence in item.sequences]

    @property
    def tokens(self) -> int:
        """Tokens of an epoch, special tokens included."""
        return sum(len(sequence) for sequence in self.sequences)


def examine(
    task: Task[Any, Any],
    tokenizer: Tokenizer,
    train: Many[Any],
    dev: Many[Any],
    length: int | None,
    max_positions: int | None = None,
    progress: Progress = SILENT,
) -> LabelledData:
    """Encode and check examples; errors are among the findings.

    Args:
        length: maximum length of a sequence in tokens. None: the task's own, or the length that
            holds nearly all training texts whole, if that is more and the model can read it.
        max_positions: maximum length of the model.

    Returns:
        The data, whose task has what it counts in training data.
    """
    task = task.adapted(train)
    labels, most = task.labels(train), max_positions or length or task.length
    every = task.labels([*train, *dev])  # more than `labels` only if there is an error

    def encode(length: int) -> tuple[EncodedExample, ...]:
        """Return all examples, encoded at this length."""
        inputs: list[EncodedExample] = []
        progress.stage("tokenizing", len(train) + len(dev))
        for window in grouped([*train, *dev], ENCODED, task.shared):
            progress.advance(len(inputs))
            inputs += task.encode(window, tokenizer, every, length)
        return tuple(inputs)

    chosen = length or min(task.length, most)
    inputs = encode(chosen)
    if length is None and any(item.cut for item in inputs[: len(train)]):
        longer = min(most, max(chosen, needed_length(inputs[: len(train)])))
        if longer > chosen:
            chosen, inputs = longer, encode(longer)
    encoded = inputs[: len(train)], inputs[len(train) :]
    limit = max_positions or math.inf
    progress.stage("checking the data")
    findings = (
        *task.check(train, dev),
        *check_casing(tokenizer, [text for example in train for text in task.texts(example)]),
        *check_inputs(
            encoded[0],
            tokenizer,
            chosen,
            lambda needed: task.truncation_advice[needed > limit].format(
                needed=needed, limit=limit
            ),
        ),
    )
    return LabelledData(
        task, tokenizer, labels, chosen, *encoded, tuple(train), tuple(dev), findings
    )


def label(
    task: Task[Any, Any],
    tokenizer: Tokenizer,
    train: Many[Any],
    dev: Many[Any],
    length: int | None,
    max_positions: int | None = None,
    progress: Progress = SILENT,
) -> LabelledData:
    """Check and encode examples, once for any number of runs; arguments as `examine`.

    Raises:
        BothwaysError: problems that prevent learning, such as an empty text, an absent label, or
            fewer than two classes; one message lists all of them.
    """
    data = examine(task, tokenizer, train, dev, length, max_positions, progress)
    return dataclasses.replace(data, findings=tuple(report_findings(data.findings)))


def train_loader(
    data: LabelledData, method: FinetuneSettings, seed: int, share: Share = ALL
) -> Loader[ListPlan]:
    """Return the steps over the training data, shuffled in each epoch."""
    source = ListSource(data.sequences, Shuffled(seed))
    return Loader(source, unchanged, method.batch, method.microbatch_tokens, seed, share)


def updates_per_epoch(data: LabelledData, method: FinetuneSettings) -> float:
    """Return the number of updates in which the training data is read once; at least 1."""
    of_examples = isinstance(method.batch, ExampleBudget)
    return max(1.0, (len(data.sequences) if of_examples else data.tokens) / method.batch.n)


def dev_windows(data: LabelledData) -> Iterator[tuple[list[Any], list[EncodedExample]]]:
    """Yield windows of dev examples with their encoded forms, as `engine.encoded_windows` does."""
    size = window_size(data.task, data.labels)
    for start in range(0, len(data.dev), size):
        part = slice(start, start + size)
        yield list(data.dev_examples[part]), list(data.dev[part])


def predictions(
    learner: TaskModel[Any, Any],
    data: LabelledData,
    progress: Progress = SILENT,
    stage: str = "scoring the dev data",
) -> Iterator[tuple[Any, Any]]:
    """Yield the dev examples with their predictions, as a stage of `progress`.

    Only the predictions of one window are held at a time.
    """
    progress.stage(stage, len(data.dev))
    counts = PredictionCounts(on_count=progress.advance)
    yield from predict_windows(learner, dev_windows(data), counts=counts)


def score(
    learner: TaskModel[Any, Any],
    data: LabelledData,
    metric: str = "",
    own: Mapping[str, Metric] = MappingProxyType({}),
    progress: Progress = SILENT,
) -> Metrics:
    """Return the metrics of the dev data, with the settings of the task that `tune` would choose.

    Args:
        metric: the metric that selects the best weights.
        own: metrics in addition to the task's.
    """
    chosen = functools.partial(learner.score_tuned, metric=metric)
    return scored(predictions(learner, data, progress), chosen, own)


def tune(
    learner: TaskModel[Any, Any],
    data: LabelledData,
    metric: str = "",
    progress: Progress = SILENT,
) -> None:
    """Choose settings of the task on dev data, such as thresholds, for a metric."""
    results = predictions(learner, data, progress=progress, stage="tuning on the dev data")
    learner.task = learner.tuned(results, metric)


def check_metric(method: FinetuneSettings, data: LabelledData) -> None:
    """Raise ConfigError if the metric that chooses the best weights is unknown, or one is twice."""
    of_task = data.task.directions(data.labels)
    for name in method.own_metrics.keys() & of_task.keys():
        what = f"{name!r} is a metric of the task {data.task.name}"
        raise ConfigError(what, where=f"metrics.{name}", fix="Give yours another name.")
    known = method.directions(data.task, data.labels)
    if method.chosen_by not in known:
        what = (
            f"{data.task.name} with {counted(len(data.labels), 'labels')} does not have the "
            f"metric {method.chosen_by!r}: it must be one of {', '.join(known)}"
        )
        raise ConfigError(what, where="metric", fix=f"Set metric={data.task.metric}.")


def check_outputs(data: LabelledData) -> None:
    """Raise ConfigError if a head of the task has more or fewer outputs than it has labels."""
    for head in data.task.heads(data.labels, None):
        if data.labels and isinstance(head, LabelHead | TagHead) and head.count != len(data.labels):
            what = (
                f"{data.task.name} has {counted(len(data.labels), 'labels')}, and its head "
                f"{head.kind!r} {counted(head.count, 'outputs')}"
            )
            raise ConfigError(what, where="task", fix="A task names each output by a label.")
