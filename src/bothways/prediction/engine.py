"""The engine of predictions: examples → encoded → packed through the model → decoded, streamed.

Memory holds one window of examples, whatever their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence as Many
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from bothways.core.batch import Batch, cut_to_predict, pack
from bothways.core.errors import DivergedError, render
from bothways.core.progress import Progress
from bothways.core.runtime.devices import cpu_by_default, device_of
from bothways.core.runtime.tuning import TUNING
from bothways.core.source import Sequence
from bothways.core.terminal import quantity
from bothways.data.loader import in_batches
from bothways.model.model import Model
from bothways.prediction import PredictPrecision, prepared_model
from bothways.tasks.base import E, EncodedExample, Metrics, Output, P, Reading, Task, TaskModel

T = TypeVar("T")

WINDOW = 4096
"""Examples that are read together: sequences of similar length share a batch."""
_WINDOW_NUMBERS = 2**21
"""The most probabilities that a window of predictions holds."""


@dataclass
class PredictionCounts:
    """Counts of the examples that were predicted.

    Attributes:
        examples: all of them.
        cut: examples that were longer than the model reads.
        blank: examples with an empty text. Training refuses these; predictions answer them.
        on_count: called after each batch with the number of examples that are done.
        notes: of the reading, about its data.
    """

    examples: int = 0
    cut: int = 0
    blank: int = 0
    on_count: Callable[[float], object] = lambda count: None
    notes: Many[str] = ()
    _last: int = 0

    def add(self, texts: Iterable[Many[str]], encoded: Many[EncodedExample]) -> None:
        """Count a window of examples, by the texts of each and its encoded form."""
        self._last = len(encoded)
        self.examples += self._last
        self.cut += sum(item.cut > 0 for item in encoded)
        self.blank += sum(not all(text.strip() for text in example) for example in texts)

    def note(self, share: float) -> None:
        """Report the share of the last window that is done."""
        self.on_count(self.examples - self._last * (1 - share))

    @property
    def warnings(self) -> list[str]:
        """Sentences for the user: notes on the data, and examples that were not read whole."""
        counts = {
            "was|were longer than the model reads, and was|were cut": self.cut,
            "has|have an empty text, and was|were answered": self.blank,
        }
        return [render(f"note: {note}") for note in self.notes] + [
            "warning: "
            + quantity(count, f"of {self.examples:,} examples ({count / self.examples:.1%}) {text}")
            for text, count in counts.items()
            if count
        ]


def counting(reading: Reading[Any], progress: Progress, stage: str) -> PredictionCounts:
    """Begin a stage, and return counts that advance it after each batch of predictions."""
    share, counts = reading.share, PredictionCounts(notes=reading.notes)
    progress.stage(stage, None if share is None else 1.0)
    # `share` is that of the examples read, which are up to a window ahead of those done.
    counts.on_count = lambda count: progress.advance(
        count if share is None else share() * count / counts.examples,
        quantity(round(count), "example(s)"),
    )
    return counts


def prepare_task_model(
    task_model: TaskModel[E, P],
    precision: PredictPrecision = "fp32",
    *,
    batch_invariant: bool = False,
) -> TaskModel[E, P]:
    """Return the task in evaluation mode with its model prepared, see `prepare_model`."""
    model = prepared_model.prepare_model(
        task_model.model, precision, batch_invariant=batch_invariant
    )
    prepared = type(task_model)(
        task_model.task, model, task_model.tokenizer, task_model.labels, task_model.length
    )
    return prepared.eval()


def predict(
    task_model: TaskModel[E, P],
    examples: Iterable[E],
    counts: PredictionCounts | None = None,
    *,
    window: int = WINDOW,
) -> Iterator[tuple[E, P]]:
    """Return an iterator of examples with their predictions, in their order, without dropout.

    Args:
        window: examples that are read together, on which results do not depend.

    Raises:
        ConfigError: the precision is not available on the task's device, or for its model.
        DivergedError: the model's output is not finite.
    """
    return predict_windows(task_model, encoded_windows(task_model, examples, window), counts)


def predict_windows(
    task_model: TaskModel[E, P],
    encoded: Iterable[tuple[list[E], list[EncodedExample]]],
    counts: PredictionCounts | None = None,
) -> Iterator[tuple[E, P]]:
    """Yield examples with their predictions; they come in windows with their encoded forms."""
    counts = counts or PredictionCounts()
    for window, inputs in encoded:
        counts.add(map(task_model.task.texts, window), inputs)
        yield from predict_encoded(task_model, window, inputs, counts.note)


def predict_encoded(
    task_model: TaskModel[E, P],
    examples: Many[E],
    encoded: Many[EncodedExample],
    on_share: Callable[[float], object] = lambda share: None,
) -> list[tuple[E, P]]:
    """Return encoded examples with their predictions; `on_share` is called after each batch."""
    sequences = [sequence for item in encoded for sequence in item.sequences]
    outputs = iter(predict_sequences(task_model, sequences, on_share=on_share))
    return [
        (example, decode_finite(task_model, example, item, [next(outputs) for _ in item.sequences]))
        for example, item in zip(examples, encoded, strict=True)
    ]


@torch.inference_mode()
@cpu_by_default()
def predict_sequences(
    task_model: TaskModel[E, P],
    sequences: Many[Sequence],
    tokens: int | None = None,
    on_share: Callable[[float], object] = lambda share: None,
) -> list[Output]:
    """Return the model's output for each sequence; `on_share` is called after each batch.

    Args:
        tokens: the most tokens of a batch, unless one sequence has more; None for the device's.
    """
    bulk = sum(len(sequence.ids) for sequence in sequences) >= TUNING.prepare_tokens
    if bulk and prepared_model.gains_at_bulk(task_model.model):
        task_model = prepare_task_model(task_model)
    if isinstance(task_model.model, prepared_model.PreparedModel):
        task_model.model.check_process()
        device, dtype = task_model.model.device, task_model.model.autocast_dtype
        splits = task_model.model.splits_batches
    else:
        device, dtype, splits = device_of(task_model), torch.float32, False
    per_device = TUNING.predict_tokens_cuda if device.type == "cuda" else TUNING.predict_tokens_cpu
    tokens = tokens or (TUNING.prepare_tokens if bulk and splits else per_device)
    outputs: dict[int, Output] = {}
    training = task_model.training
    # Only if needed: a walk over all modules takes a tenth of the time of a short text.
    if training or task_model.model.training:
        task_model.eval()
    try:
        for indices, batch in _in_batches(task_model.model, sequences, tokens, device):
            with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
                results = task_model.outputs(batch)
            outputs.update(zip(indices, results, strict=True))
            on_share(len(outputs) / len(sequences))
    finally:
        if training:
            task_model.train()
    return [outputs[index] for index in range(len(sequences))]


def _in_batches(
    model: Model, sequences: Many[Sequence], tokens: int, device: torch.device
) -> Iterator[tuple[list[int], Batch]]:
    """Batch sequences as `in_batches`; by itself what would change the others' kernel."""
    if len(sequences) == 1:  # a single text has nothing to be sorted with
        yield [0], pack(sequences, cut_to_predict(device)).to(device)
        return
    if not isinstance(model, prepared_model.PreparedModel) or not model.batch_invariant:
        yield from in_batches(sequences, tokens, device)
        return
    short = [n for n, sequence in enumerate(sequences) if len(sequence.ids) <= model.longest_fused]
    for indices, batch in in_batches([sequences[n] for n in short], tokens, device):
        yield [short[index] for index in indices], batch
    for n in sorted({*range(len(sequences))} - {*short}):
        [(_, batch)] = in_batches([sequences[n]], tokens, device)
        yield [n], batch


def decode_finite(
    task_model: TaskModel[E, P], example: E, encoded: EncodedExample, outputs: Many[Output]
) -> P:
    """Decode the outputs of an example's sequences; DivergedError if one is not finite."""
    if not all(np.isfinite(output).all() for output in outputs):
        message = "the model's output is not finite (NaN or infinity)"
        fix = "Its weights are damaged, or its training diverged: use another model."
        raise DivergedError(message, where=getattr(example, "where", None), fix=fix)
    return task_model.decode(example, encoded, outputs)


def window_size(task: Task[Any, Any], labels: Many[str], window: int = WINDOW) -> int:
    """Return the number of examples that are predicted together: fewer of many labels, as each
    has a number for every label.
    """
    return max(1, min(window, task.window, _WINDOW_NUMBERS // max(1, len(labels))))


def encoded_windows(
    task_model: TaskModel[E, P], examples: Iterable[E], window: int = WINDOW
) -> Iterator[tuple[list[E], list[EncodedExample]]]:
    """Yield windows of examples with their encoded forms; a task may have smaller windows."""
    size = window_size(task_model.task, task_model.labels, window)
    for group in grouped(examples, size, task_model.task.shared):
        yield group, task_model.encode(group)


def evaluate_task(
    task_model: TaskModel[E, P],
    examples: Iterable[E],
    counts: PredictionCounts | None = None,
) -> Metrics:
    """Return the metrics on examples that have their answers; arguments as `predict`."""
    return task_model.score(predict(task_model, examples, counts))


def grouped(
    items: Iterable[T], size: int, shared: Callable[[T], object] = lambda item: None
) -> Iterator[list[T]]:
    """Split items into lists of `size`, the last one shorter.

    Neighbours that share something (`shared` is equal and not None) stay together, in any number.
    """
    window: list[T] = []
    for item in items:
        if len(window) >= size and shared(item) != shared(window[-1]):
            yield window
            window = []
        window.append(item)
        # Without waiting for the next item, which somebody may have to type.
        if len(window) >= size and shared(item) is None:
            yield window
            window = []
    if window:
        yield window
