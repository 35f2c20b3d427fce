"""Bulk prediction: files become parts, parts go to workers, and what comes back is written.

This process reads the files and writes the output; workers only compute. So they need neither the
files nor the folder, and a part that comes back twice is written once.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Iterator, Sequence as Many
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bothways.core.config.values import require_at_least
from bothways.core.errors import BothwaysError, ConfigError, DataError, argument
from bothways.core.files import check_output_path, discard_begun, local_path, lock_folder
from bothways.core.jobs.process_pool import map_in_order
from bothways.core.progress import SILENT, Progress
from bothways.core.runtime.devices import choose_device, resolve_precision
from bothways.core.runtime.process import usable_cores
from bothways.core.terminal import quantity
from bothways.data.text_io import is_stream
from bothways.prediction import engine
from bothways.prediction.bulk import folder as output, parts as inputs, worker
from bothways.tasks.base import Task

ATTEMPTS = 3
"""Maximum number of attempts at a part whose worker is killed."""


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

    def add(self, marker: inputs.PartMarker, *, again: bool) -> None:
        """Count a part, computed now or finished before."""
        self.parts, self.again = self.parts + 1, self.again + again
        for name in ("rows", "rejected", "cut", "blank"):
            setattr(self, name, getattr(self, name) + getattr(marker, name))

    @property
    def warnings(self) -> list[str]:
        """Sentences for the user about texts that were cut or empty."""
        return engine.PredictionCounts(self.rows, self.cut, self.blank).warnings


def predict_files(
    request: inputs.BulkRequest,
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
    if not output.is_file(out):
        for name in request.files:
            if is_stream(name):
                fix = "Write it to a file first, or name one file for the output."
                raise ConfigError("parts are made of files, not of a pipe", where=name, fix=fix)
            if local_path(name).parent.resolve() == out.resolve():
                fix = f"Choose another folder: {argument(out='FOLDER')}."
                raise DataError("is in the folder of the output", where=name, fix=fix)
        return _predict_parts(request, out, processes, threads, progress)
    check_output_path(out, request.files)
    request = replace(request, form=output.part_format(request, out))
    folder = output.parts_folder(out)
    with contextlib.ExitStack() as stack:
        if any(map(is_stream, request.files)):  # the parts of a pipe cannot be continued
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        result = _predict_parts(request, folder, processes, threads, progress)
        if result.parts:
            progress.stage(f"writing {out.name}")
            output.join_parts(folder, out, flat=request.top is None)
        shutil.rmtree(folder)
    if not result.parts:
        fix = "Give a file with at least one example."
        raise DataError("holds no row", where=", ".join(request.files), fix=fix)
    return result


def _predict_parts(
    request: inputs.BulkRequest, out: Path, processes: int, threads: int | None, progress: Progress
) -> BulkResult:
    opened = request.open() if processes == 1 and threads is None else None
    task = request.read_task() if opened is None else opened.task_model.task
    request = request.with_form(task)
    if processes > 1:
        threads = threads or max(1, usable_cores() // processes)
    predict = worker.PartWorker(request, threads, opened)
    with lock_folder(out), discard_begun(out, output.BEGUN, output.FINISHED):
        folder = output.BulkFolder(out, request)
        folder.begin()
        run = _BulkRun(folder, task, progress)
        known = [size for size in run.sizes if size is not None]
        progress.stage("predicting", sum(known) if len(known) == len(run.sizes) else None)
        # In this process a part reports on the way; the first one opens the model.
        results = (predict(job, functools.partial(run.advance, job)) for job in run.jobs())
        if processes > 1:
            results = map_in_order(predict, run.jobs(), processes, ATTEMPTS)
        with contextlib.closing(results):
            for result in results:
                run.take(result)
        if run.error is not None:
            raise run.error
        done = run.result
        folder.finish({"rows": done.rows, "rejected": done.rejected, "parts": done.parts})
    if request.precision == "auto":
        dtype = resolve_precision("auto", choose_device(request.device))
        progress.message(f"note: predicted in {'fp32' if dtype.itemsize == 4 else 'bf16'}")
    return done


def predict_rows(
    request: inputs.BulkRequest,
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
    form, request = request.form or "jsonl", request.with_form(task)
    if rows is None:
        [name] = request.files
        reading = opened.read(name, request.columns(task), labelled=False)
        inputs.note_guess(request, task, reading, name, progress)
    else:
        name, reading = "the input", opened.read(rows, request.columns(task), labelled=False)
    rejects, names = inputs.Rejects(False), [new for _, new in request.kept]
    default = engine.DEFAULT_PREDICT
    config = default if window is None else engine.PredictConfig(window=window)
    counts, answered = engine.counting(reading, progress, "predicting"), 0
    read = inputs.read_bulk_rows(request, reading, name, rejects)
    for row, prediction in worker.predict_kept(opened, request, read, counts, rejects, config):
        values = worker.prediction_values(prediction, request.top, form)
        answered += values.get("label") is not None
        yield worker.kept_values(dict(zip(names, row.kept, strict=True)), values)
    if (least := getattr(task, "abstain", 0)) and counts.examples:
        share = f"{answered:,} of {quantity(counts.examples, 'text(s)')}"
        message = f"note: {share} ({answered / counts.examples:.1%}) have a label"
        progress.message(f"{message}: it has a probability of {least:g} or more")
    if request.precision == "auto":
        progress.message(f"note: predicted in {opened.precision}")
    for warning in counts.warnings:
        progress.message(warning)


@dataclass
class _BulkRun:
    """The state of a run in the process that reads and writes.

    Attributes:
        done: bytes of input whose predictions are written; a data set of the Hub counts as one.
        error: ends the reading; parts that were read before it are still predicted.
        types: the Arrow types of kept columns, as in the first part that has rows.
    """

    folder: output.BulkFolder
    task: Task[Any, Any]
    progress: Progress
    result: BulkResult = field(default_factory=BulkResult)
    done: float = 0.0
    error: BothwaysError | None = None
    types: tuple[Any, ...] | None = None

    @functools.cached_property
    def sizes(self) -> list[int | None]:
        """The bytes of each file; None where they are unknown."""
        stats = map(inputs.status, self.folder.request.files)
        return [None if stat is None else stat.st_size for stat in stats]

    def jobs(self) -> Iterator[inputs.PartJob]:
        """Yield the parts that are not finished; an error ends them and is raised at the end."""
        try:
            for number in range(len(self.sizes)):
                yield from self._jobs_of(number)
        except BothwaysError as error:
            self.error = error

    def _jobs_of(self, number: int) -> Iterator[inputs.PartJob]:
        folder, request, count = self.folder, self.folder.request, 0
        name = request.files[number]
        origin = folder.origin(name)
        # What comes through a pipe is new, though its parts may be there of a run that was killed.
        if not is_stream(name) and (markers := folder.finished_file(number, origin)) is not None:
            for part, marker in enumerate(markers):
                self._skip(number, part, marker)
            return
        for job in inputs.read_parts(request, self.task, number, self.progress):
            count = job.part + 1
            finished = folder.marker(number, job.part)
            if finished is not None and finished.digest == job.digest:
                self._skip(number, job.part, finished)
                continue
            folder.forget(number, job.part)
            if job.rows:
                kept = [row.kept for row in job.rows]
                self._note_types(kept, [old for old, _ in request.kept], name)
            yield replace(job, types=self.types)
        folder.finish_file(number, count, origin)

    def _skip(self, number: int, part: int, marker: inputs.PartMarker) -> None:
        """Count a part that was finished before."""
        self.result.add(marker, again=True)
        self.done += marker.share * (self.sizes[number] or 1)
        if marker.size is not None:
            content, names = self.folder.part_files(number, part)[0], self.folder.request.kept
            self._note_types((), [new for _, new in names], str(content))

    def _note_types(self, rows: Many[Many[Any]], names: Many[str], location: str) -> None:
        if self.types is None and self.folder.request.form == "parquet":
            self.types = worker.column_types(rows, names, location)

    def advance(self, job: inputs.PartJob, share: float) -> None:
        """Report a part of which a share is done."""
        rows = round(self.result.rows + share * len(job.rows))
        done = self.done + share * job.share * (self.sizes[job.file] or 1)
        self.progress.advance(done, quantity(rows, "row(s)"))

    def take(self, result: inputs.PartResult | BothwaysError) -> None:
        """Write a part; raise the error of one that failed."""
        if isinstance(result, BothwaysError):
            raise result
        self.folder.write(result)
        self.result.add(result.marker, again=False)
        self.done += result.marker.share * (self.sizes[result.file] or 1)
        self.progress.advance(self.done, quantity(self.result.rows, "row(s)"))
