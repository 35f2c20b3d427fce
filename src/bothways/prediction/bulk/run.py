"""Bulk prediction: files become parts, parts go to workers, and what comes back is written.

This process reads the files and writes the output; workers only compute. So they need neither the
files nor the folder, and a part that comes back twice is written once.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bothways.core.config.values import require_at_least
from bothways.core.errors import BothwaysError, ConfigError, DataError, argument
from bothways.core.files import check_output_path
from bothways.core.folder_lock import discard_begun, lock_folder
from bothways.core.jobs.process_pool import map_in_order
from bothways.core.progress import SILENT, Progress
from bothways.core.runtime.devices import choose_device, resolve_precision
from bothways.core.runtime.process import usable_cores
from bothways.core.terminal import quantity
from bothways.data.documents import check_origin
from bothways.data.tables import HUB
from bothways.data.text_io import file_at, is_stream
from bothways.prediction.bulk.folder import (
    BEGUN,
    FINISHED,
    BulkFolder,
    is_file,
    join_parts,
    part_format,
    parts_folder,
    spooled,
)
from bothways.prediction.bulk.parts import (
    BulkRequest,
    FileReader,
    PartJob,
    PartMarker,
    PartResult,
    check_format,
    check_not_inside,
    predict_kept,
)
from bothways.prediction.bulk.worker import (
    PartWorker,
    column_types,
    file_types,
    kept_values,
    prediction_values,
)
from bothways.prediction.engine import PredictConfig, PredictionCounts, counting
from bothways.tasks.base import Task
from bothways.tasks.columns import reads_as_trained

ATTEMPTS = 3
"""Maximum number of attempts at a part whose worker is killed."""

Computed = Generator[PartResult | BothwaysError]


@dataclass
class BulkResult:
    """Totals of the output, with parts that were finished before.

    Attributes:
        rows, rejected: rows with and without a prediction.
        parts: of all files.
        again: those that were finished before.
        cut, blank: see `PredictionCounts`.
    """

    rows: int = 0
    rejected: int = 0
    parts: int = 0
    again: int = 0
    cut: int = 0
    blank: int = 0

    def add(self, marker: PartMarker, *, again: bool) -> None:
        """Count a part, computed now or finished before."""
        self.parts, self.again = self.parts + 1, self.again + again
        for name in ("rows", "rejected", "cut", "blank"):
            setattr(self, name, getattr(self, name) + getattr(marker, name))

    @property
    def warnings(self) -> list[str]:
        """Sentences for the user about texts that were cut or empty."""
        return PredictionCounts(self.rows, self.cut, self.blank).warnings


def predict_files(
    request: BulkRequest,
    out: Path,
    processes: int = 1,
    threads: int | None = None,
    progress: Progress = SILENT,
) -> BulkResult:
    """Predict all rows of the files into parts in a folder; finished parts stay as they are.

    Where `out` ends in .jsonl, .csv, .tsv, .parquet or .npy, it is one file, which is complete
    or absent: its parts are in a hidden folder next to it until it is written.

    The bytes of a part do not depend on the worker that computes it where predictions are
    batch-invariant; elsewhere they are the same on processors of one kind.

    Args:
        processes: processes that predict; 1 computes in this one.
        threads: of each; None: all cores, divided by the processes.

    Raises:
        ConfigError: an invalid setting, or the folder was begun with other ones.
        DataError: a file or a row cannot be read; finished parts are kept.
        FolderError, TokenizerError: the model cannot be opened.
        ResourceError: the folder is in use or holds other files; a worker was killed repeatedly.
        KeyboardInterrupt: interrupted; the same call continues.
    """
    require_at_least(1, processes=processes, threads=threads)
    if not request.files:
        raise ConfigError("names no file", where="files", fix="Name one or more.")
    if is_file(out):
        return _predict_one_file(request, out, processes, threads, progress)
    for name in request.files:
        if _is_pipe(name):
            fix = "Write it to a file first, or name one file for the output."
            raise ConfigError("parts are made of files, not of a pipe", where=name, fix=fix)
    check_not_inside(out, request.files)
    opened = request.open() if processes == 1 and threads is None else None
    task = request.read_task() if opened is None else opened.task_model.task
    request = request.with_form(task)
    if processes > 1:
        threads = threads or max(1, usable_cores() // processes)
    worker = PartWorker(request, threads, opened)
    first_job = _first_part(request, task)  # what cannot be read, before any work
    types = _types(request, first_job) if request.form == "parquet" else None
    with lock_folder(out), discard_begun(out, BEGUN, FINISHED):
        folder = BulkFolder(out, request)
        folder.begin()
        job = _BulkRun(folder, task, types, progress)
        progress.stage("predicting", job.size)
        with contextlib.closing(_computed(worker, job, processes)) as results:
            for result in results:
                job.take(result)
        job.end()
    if request.precision == "auto":
        dtype = resolve_precision("auto", choose_device(request.device))
        progress.message(f"note: predicted in {'fp32' if dtype.itemsize == 4 else 'bf16'}")
    return job.result


def predict_rows(
    request: BulkRequest,
    window: int | None = None,
    progress: Progress = SILENT,
    rows: list[Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the printed prediction of each row of one file, in constant memory.

    Args:
        window: texts that are read before the first prediction.
        rows: are predicted instead of a file, each as `Predictor` takes it.

    Raises:
        ConfigError: there are several files or none; an invalid setting.
        DataError: the file or a row cannot be read.
    """
    if rows is None and len(request.files) != 1:
        count = len(request.files)
        message = f"there are {count} files, and one is read" if count else "names no file"
        fix = f"For several files name a folder: {argument(out='DIR')}" if count else "Name one."
        raise ConfigError(message, where="files", fix=fix)
    opened = request.open()
    task = opened.task_model.task
    check_format(request.form, task)
    request.check_vectors(task)
    if rows is None:
        [name] = request.files
        reading = opened.read(name, request.columns(task), labelled=False)
        if not _is_pipe(name):
            _note_guess(request, task, getattr(reading.task, "columns", None), name, progress)
    else:
        reading = opened.read(rows, labelled=False)
    config = PredictConfig(window=window or PredictConfig.window)
    counts, answered = counting(reading, progress, "predicting"), 0
    for kept, computed in predict_kept(opened, reading, request.keep, config, counts):
        (prediction,) = request.finish([computed])
        values = prediction_values(prediction, request.top, request.form or "jsonl")
        answered += values.get("label") is not None
        yield kept_values(kept, values)
    if (least := getattr(task, "abstain", 0)) and counts.examples:
        share = f"{answered:,} of {quantity(counts.examples, 'text(s)')}"
        message = f"note: {share} ({answered / counts.examples:.1%}) have a label"
        progress.message(f"{message}: it has a probability of {least:g} or more")
    if request.precision == "auto":
        progress.message(f"note: predicted in {opened.precision}")
    for warning in counts.warnings:
        progress.message(warning)


def _note_guess(
    request: BulkRequest, task: Any, columns: object, name: str, progress: Progress
) -> None:
    """Report columns that were guessed, if they differ from training."""
    guessed = request.text is None and request.text_b is None and ".txt" not in Path(name).suffixes
    if guessed and not reads_as_trained(columns, getattr(task, "columns", None)):
        progress.message(f"note: {name}: the columns are guessed: {columns}")


def _is_pipe(name: str) -> bool:
    return not name.startswith(HUB) and is_stream(name)


def _predict_one_file(
    request: BulkRequest, out: Path, processes: int, threads: int | None, progress: Progress
) -> BulkResult:
    check_output_path(out)
    folder = parts_folder(out)
    with contextlib.ExitStack() as stack:
        if any(map(_is_pipe, request.files)):  # the parts of a pipe cannot be continued
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        suffix = ".jsonl" if request.text else ".txt"
        files = tuple(
            stack.enter_context(spooled(name, suffix)) if _is_pipe(name) else name
            for name in request.files
        )
        request = replace(request, files=files)
        request = replace(request, form=part_format(request, out))
        result = predict_files(request, folder, processes, threads, progress)
        if not result.parts:
            shutil.rmtree(folder)
            fix = "Give a file with at least one example."
            raise DataError("holds no row", where=", ".join(files), fix=fix)
        progress.stage(f"writing {out.name}")
        join_parts(folder, out, flat=request.top is None)
        shutil.rmtree(folder)
    return result


def _first_part(request: BulkRequest, task: Task[Any, Any]) -> PartJob | None:
    """Return the first part that has rows; files before it may be empty."""
    for number in range(len(request.files)):
        for job in FileReader(request, task, number).read():
            if job.rows:
                return job
    return None


def _types(request: BulkRequest, first_job: PartJob | None) -> tuple[Any, ...]:
    """Return the Arrow types of the kept columns: of the file of the first rows, or by these."""
    old = [column for column, _ in request.kept]
    if first_job is None or not old:
        return ()
    name = request.files[first_job.file]
    if name.endswith(".parquet"):
        return file_types(name, old)
    return column_types([row.kept for row in first_job.rows], old, name)


def _computed(worker: PartWorker, job: _BulkRun, processes: int) -> Computed:
    """Yield the results of the parts, in their order."""
    if processes > 1:
        yield from map_in_order(worker, job.jobs(), processes, ATTEMPTS)
        return
    for part_job in job.jobs():
        yield worker(part_job, functools.partial(job.advance, part_job))


@dataclass
class _BulkRun:
    """The state of a run in the process that reads and writes."""

    folder: BulkFolder
    task: Task[Any, Any]
    types: tuple[Any, ...] | None
    progress: Progress
    result: BulkResult = field(default_factory=BulkResult)
    error: BothwaysError | None = None
    done: float = 0.0
    """Bytes of input whose predictions are written."""
    _open: dict[int, int] = field(default_factory=dict)
    """Parts at work, by file."""
    _read: dict[int, int] = field(default_factory=dict)
    """Parts of the files that have been read to their end."""

    @property
    def request(self) -> BulkRequest:
        """The request that is computed."""
        return self.folder.request

    @property
    def size(self) -> float | None:
        """Bytes of the input; None if they are unknown."""
        if any(name.startswith(HUB) for name in self.request.files):
            return None
        return float(sum(map(self._bytes, range(len(self.request.files)))))

    def _bytes(self, number: int) -> int:
        name = self.request.files[number]
        return 1 if name.startswith(HUB) else file_at(name).stat().st_size

    def jobs(self) -> Iterator[PartJob]:
        """Yield the parts that are not finished; an error ends them and is raised by `end`."""
        try:
            for number in range(len(self.request.files)):
                yield from self._jobs_of(number)
        except BothwaysError as error:
            self.error = error

    def _jobs_of(self, number: int) -> Iterator[PartJob]:
        markers = self.folder.finished_file(number)
        if markers is not None:
            for marker in markers:
                self._skip(number, marker)
            return
        status = self._status(number)
        reader, self._open[number] = FileReader(self.request, self.task, number), 0
        for job in reader.read():
            if job.part == 0:
                check_origin(self.folder.origins[number])
                columns, name = reader.columns, self.request.files[number]
                _note_guess(self.request, self.task, columns, name, self.progress)
            # Of an earlier call, or of a process of this one that was lost after it wrote the part.
            if (done := self.folder.finished_part(job)) is not None:
                self._skip(number, done)
                continue
            self._open[number] += 1
            yield replace(job, types=self.types)
        self._check_unchanged(number, status)
        self._read[number] = reader.parts
        self._close(number)

    def _status(self, number: int) -> tuple[int, int, int] | None:
        """Return inode, size and time of a file; None for a data set of the Hub."""
        name = self.request.files[number]
        if name.startswith(HUB):
            return None
        status = file_at(name).stat()
        return status.st_ino, status.st_size, status.st_mtime_ns

    def _check_unchanged(self, number: int, old: tuple[int, int, int] | None) -> None:
        """Raise DataError if a file was written to; one that was replaced was read as it was."""
        new = self._status(number)
        if old and new and new[0] == old[0] and new != old:
            message = "has changed while it was read"
            fix = "Run the same command again: rows that are the same are not predicted again."
            raise DataError(message, where=self.request.files[number], fix=fix)

    def _skip(self, number: int, marker: PartMarker) -> None:
        self.result.add(marker, again=True)
        self.done += marker.share * self._bytes(number)

    def advance(self, job: PartJob, share: float) -> None:
        """Report a part of which a share is done."""
        done = self.done + share * job.share * self._bytes(job.file)
        rows = round(self.result.rows + share * len(job.rows))
        self.progress.advance(done, quantity(rows, "row(s)"))

    def take(self, result: PartResult | BothwaysError) -> None:
        """Write a part; raise the error of one that failed."""
        if isinstance(result, BothwaysError):
            raise result
        self.folder.write(result)
        self.result.add(result.marker, again=False)
        self.done += result.marker.share * self._bytes(result.file)
        self.progress.advance(self.done, quantity(self.result.rows, "row(s)"))
        self._open[result.file] -= 1
        self._close(result.file)

    def _close(self, number: int) -> None:
        """Mark a file that has been read to its end, without a part at work."""
        if number in self._read and self._open[number] == 0:
            self.folder.finish_file(number, self._read[number])

    def end(self) -> None:
        """Mark the output as complete, or raise the error that ended the reading."""
        if self.error is not None:
            raise self.error
        counts = {name: getattr(self.result, name) for name in ("rows", "rejected", "parts")}
        self.folder.finish(counts)
