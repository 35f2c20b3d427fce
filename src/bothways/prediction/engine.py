"""The engine of predictions: examples → encoded → packed through the model → decoded, streamed.

What is held in memory is one window of examples, whatever their number.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from bothways.core.errors import ConfigError
from bothways.core.progress import OnShare, untold
from bothways.data.loader import in_batches
from bothways.prediction.prepared_encoder import cuts_itself, gains, prepare
from bothways.runtime.allocator import tune_allocator
from bothways.runtime.devices import Precision, resolve_precision
from bothways.tasks.task import E, Metrics, P
from bothways.tasks.task_learner import EncodedExample, Output, TaskLearner

T = TypeVar("T")

AT_ONCE = {"cpu": 1024, "cuda": 8192}
"""Tokens that go through the model at once: on a CPU what its cache holds, 1.2 times as fast as 8,192 with 384 features."""
MANY = 4096
"""Tokens from which it pays to prepare a model, which takes as long as 1,000 to 2,000 tokens save, of any model; and that go
through one at once that cuts them itself."""


@dataclass(frozen=True)
class PredictConfig:
    """How predictions are computed; none of it changes them, but for `precision`, by its rounding.

    Attributes:
        precision: of matrix products; int8 for those of the blocks, see `model.prepared`.
        tokens: the most that go through the model at once, unless one sequence has more; none for `AT_ONCE`.
        window: examples that are read together; sequences of like length in a window share a batch.
    """

    precision: Precision | Literal["int8"] = "fp32"
    tokens: int | None = None
    window: int = 4096

    def __post_init__(self) -> None:
        for name, value in (("tokens", self.tokens), ("window", self.window)):
            if value is not None and value < 1:
                raise ConfigError(f"must be at least 1, not {value}", where=name)


@dataclass
class PredictionCounts:
    """What has gone by: how many examples, how many of them the model cannot read whole, and how many have nothing to read.

    Attributes:
        cut: were longer than the model reads.
        blank: have a text without anything but white space. Training refuses such; here they are answered.
        on_count: is told after each batch how many examples are done.
    """

    examples: int = 0
    cut: int = 0
    blank: int = 0
    on_count: Callable[[float], object] = untold
    _last: int = 0

    def add(self, texts: Iterable[Many[str]], inputs: Many[EncodedExample]) -> None:
        """Count examples, by the texts of each and what they became."""
        self._last = len(inputs)
        self.examples += self._last
        self.cut += sum(item.cut > 0 for item in inputs)
        self.blank += sum(not all(text.strip() for text in each) for each in texts)

    def note(self, share: float) -> None:
        """Is told how much of the examples that were added last is done."""
        self.on_count(self.examples - self._last * (1 - share))

    @property
    def warnings(self) -> list[str]:
        """What a user should know, in sentences; none if all is well."""
        said = {
            "were longer than the model reads, and were cut": self.cut,
            "have an empty text, and were answered": self.blank,
        }
        every = f"of {self.examples:,} examples"
        return [
            f"warning: {count:,} {every} ({count / self.examples:.1%}) {what}"
            for what, count in said.items()
            if count
        ]


DEFAULT_PREDICT = PredictConfig()
"""In fp32, so that predictions are the same on all machines to its rounding."""


def predict(
    task: TaskLearner[E, P],
    examples: Iterable[E],
    pace: PredictConfig = DEFAULT_PREDICT,
    tally: PredictionCounts | None = None,
) -> Iterator[tuple[E, P]]:
    """Examples with their predictions, in their order, without dropout; the task keeps the mode it had.

    Args:
        tally: counts along.

    Raises:
        ConfigError: the precision is not to be had on the task's device, or for its model.
    """
    tally = tally or PredictionCounts()
    if pace.precision == "int8":  # once for all windows
        task, pace = prepare_task(task, "int8"), dataclasses.replace(pace, precision="fp32")
    for window, inputs in windows(task, examples, pace):
        tally.add(map(task.definition.texts, window), inputs)
        yield from predict_encoded(task, window, inputs, pace, tally.note)


@torch.inference_mode()
def predict_encoded(
    task: TaskLearner[E, P],
    examples: Many[E],
    inputs: Many[EncodedExample],
    pace: PredictConfig = DEFAULT_PREDICT,
    on_share: OnShare = untold,
) -> list[tuple[E, P]]:
    """As `predict`, for examples that are encoded already; after each batch, `on_share` is told how much is done."""
    device = next(task.parameters()).device
    precision = pace.precision
    if precision == "int8":
        task, precision = prepare_task(task, "int8"), "fp32"
    dtype, training = resolve_precision(precision, device), task.training
    sequences = [sequence for item in inputs for sequence in item.sequences]
    many = sum(map(len, sequences)) >= MANY
    if many and gains(task.model, dtype):
        task, training = prepare_task(task, "bf16" if dtype is torch.bfloat16 else "fp32"), False
    most = pace.tokens or (MANY if many and cuts_itself(task.model) else AT_ONCE[device.type])
    outputs: dict[int, Output] = {}
    tune_allocator()
    if (
        training or task.model.training
    ):  # not always: to go through all modules takes a tenth of the time of a short text
        task.eval()
    try:
        for places, batch in in_batches(sequences, most, device):
            with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
                results = task.outputs(batch)
            outputs.update(zip(places, results, strict=True))
            on_share(len(outputs) / len(sequences))
    finally:
        if training:
            task.train()
    ordered = iter(outputs[place] for place in range(len(sequences)))
    pairs = zip(examples, inputs, strict=True)
    return [
        (example, task.decode(example, list(itertools.islice(ordered, len(item.sequences)))))
        for example, item in pairs
    ]


def windows(
    task: TaskLearner[E, P], examples: Iterable[E], pace: PredictConfig = DEFAULT_PREDICT
) -> Iterator[tuple[list[E], list[EncodedExample]]]:
    """Examples with what they became, so many together as the pace has it, or fewer where the task has fewer."""
    for window in grouped(examples, min(pace.window, task.definition.window)):
        yield window, task.encode(window)


def evaluate_task(
    task: TaskLearner[E, P],
    examples: Iterable[E],
    pace: PredictConfig = DEFAULT_PREDICT,
    tally: PredictionCounts | None = None,
) -> Metrics:
    """The metrics on examples that have their answers; arguments as `predict`."""
    return task.score(predict(task, examples, pace, tally))


def grouped(
    items: Iterable[T], size: int, shared: Callable[[T], object] = lambda item: None
) -> Iterator[list[T]]:
    """Items in lists of `size`, the last one shorter; neighbours that share something are not parted, whatever the size."""
    window: list[T] = []
    for item in items:
        if len(window) >= size and shared(item) != shared(window[-1]):
            yield window
            window = []
        window.append(item)
        if (
            len(window) >= size and shared(item) is None
        ):  # without waiting for the next one, which somebody may have to type
            yield window
            window = []
    if window:
        yield window


def prepare_task(
    task: TaskLearner[E, P], precision: Precision | Literal["int8"] = "fp32"
) -> TaskLearner[E, P]:
    """Return the task in evaluation mode with a model from `prepared_encoder.prepare`.

    Raises:
        ConfigError: see there.
    """
    kind: Any = type(task)
    model = prepare(task.model, precision)
    made: TaskLearner[E, P] = kind(task.definition, model, task.tokenizer, task.labels, task.length)
    return made.eval()
