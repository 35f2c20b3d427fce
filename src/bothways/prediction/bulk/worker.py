"""A worker: opens the model once and predicts parts, in any process."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bothways.core.advice import argument
from bothways.core.errors import BothwaysError, DataError
from bothways.core.jobs.process_pool import NUMBER
from bothways.prediction import engine
from bothways.prediction.bulk.output import fits_type, part_content
from bothways.prediction.bulk.parts import BulkRow, PartJob, PartMarker, PartResult, RejectedRow
from bothways.prediction.bulk.request import BulkRequest
from bothways.prediction.predictor import Predictor
from bothways.tasks.base import EncodedExample, TaskModel


@dataclass(frozen=True)
class PartWorker:
    """Predicts parts. It pickles as long as it has predicted none.

    Attributes:
        threads: of a process; None leaves them as they are.
        given: the predictor, in a process that has opened it.
    """

    request: BulkRequest
    threads: int | None = None
    given: Predictor | None = None

    @functools.cached_property
    def opened(self) -> Predictor:
        """The predictor, opened at the first part."""
        if self.given is not None:
            return self.given
        import torch

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return self.request.open(_device(self.request.device))

    def __call__(
        self, job: PartJob, on_share: Callable[[float], object] = lambda share: None
    ) -> PartResult | BothwaysError:
        """Return the part's content, or the error that ends the work.

        Args:
            on_share: called after each batch with the share of the part that is done.
        """
        try:
            return self._predict(job, on_share)
        except BothwaysError as error:
            return error

    def _predict(self, job: PartJob, on_share: Callable[[float], object]) -> PartResult:
        task_model, rejects, done = self.opened.task_model, _Rejects(self.request.rejects), 0
        rows = [row for row in job.rows if self._fits(row, job, rejects)]
        counts, predictions = engine.PredictionCounts(), list[Any]()
        columns_by_row: list[tuple[Any, ...]] = []
        size = min(engine.DEFAULT_PREDICT.window, task_model.task.window)
        for window in engine.grouped(rows, size, lambda row: task_model.task.shared(row.example)):
            readable, encoded = _encode(task_model, window, rejects)
            examples = [row.example for row in readable]
            counts.add(map(task_model.task.texts, examples), encoded)
            offset, size_share = done / len(rows), len(window) / len(rows)
            pairs = engine.predict_encoded(
                task_model, examples, encoded,
                on_share=lambda share, a=offset, b=size_share: on_share(a + share * b),
            )  # fmt: skip
            predictions += [prediction for _, prediction in pairs]
            columns_by_row += [row.kept for row in readable]
            done += len(window)
        content = None
        if predictions:
            names = [new for _, new in self.request.kept]
            columns = {
                name: [values[at] for values in columns_by_row] for at, name in enumerate(names)
            }
            content = part_content(
                self.request.form or "jsonl", predictions, self.request.top, columns, job.types
            )
        rejected = (*job.rejected, *rejects.rows)
        marker = PartMarker(
            job.digest, job.share, None if content is None else len(content),
            len(predictions), len(rejected), counts.cut, counts.blank,
        )  # fmt: skip
        return PartResult(job.file, job.part, marker, content, rejected)

    def _fits(self, row: BulkRow, job: PartJob, rejects: _Rejects) -> bool:
        """Return True if the kept values fit their columns; else reject the row."""
        if not job.types:
            return True
        for (name, _), value, kind in zip(self.request.kept, row.kept, job.types, strict=True):
            if not fits_type(value, kind):
                message = f"{name!r} is {value!r}, not of the type {kind} of the first rows"
                where = str(getattr(row.example, "where", "a row"))
                fix = f"Write JSON lines ({argument(format='jsonl')}), or correct the row."
                rejects.add(DataError(message, where=where, fix=fix), row)
                return False
        return True


@dataclass
class _Rejects:
    allowed: bool
    rows: list[RejectedRow] = field(default_factory=list)

    def add(self, error: BothwaysError, row: BulkRow) -> None:
        """Note a row, or raise its error if rejecting was not asked for."""
        if not self.allowed:
            raise error
        self.rows.append(RejectedRow.of(error, str(getattr(row.example, "where", "a row"))))


def _encode(
    task_model: TaskModel[Any, Any], rows: list[BulkRow], rejects: _Rejects
) -> tuple[list[BulkRow], list[EncodedExample]]:
    """Return the rows that can be encoded, and their encoded forms."""
    try:
        return rows, [*task_model.encode([row.example for row in rows])]
    except DataError:
        if not rejects.allowed:
            raise
    readable, encoded = list[BulkRow](), list[EncodedExample]()
    for row in rows:
        try:
            encoded += task_model.encode([row.example])
            readable.append(row)
        except DataError as error:
            rejects.add(error, row)
    return readable, encoded


def _device(name: str) -> str:
    """Return the device of this worker: of several GPUs, the one with its number."""
    import torch

    number, devices = os.environ.get(NUMBER), torch.cuda.device_count()
    if number is None or devices < 2 or name not in ("auto", "cuda"):
        return name
    return f"cuda:{int(number) % devices}"
