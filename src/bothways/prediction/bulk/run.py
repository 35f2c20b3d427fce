"""Bulk prediction: files become parts, parts go to workers, and what comes back is written.

This process reads the files and writes the output; workers only compute. So they need neither the
files nor the folder, and a part that comes back twice is written once. The folder of the output:

    part-00002-00017.jsonl      the 18th part of the third file
    _parts/00002-00017.json     its marker: rows, digest of the input, size of the part
    _rejects/00002-00017.jsonl  rows of that part without a prediction
    _files/00002.json           marker of a file that has been read: the number of its parts
    _files/versions.json        the commits of data sets of the Hub
    _job.json                   what was asked
    _SUCCESS                    totals, written at the end

Every file is complete or absent, and a marker is written after what it marks. Readers of data
sets, such as pyarrow's and Spark's, ignore names with an underscore.

Or one file, into which the parts of a hidden folder next to it are joined at the end:

    predictions.csv           complete or absent, in the order of the input
    .predictions.csv.parts/   as above, until the file is written; the same work continues there
    predictions.csv.rejects.jsonl  rows without a prediction, if they are allowed
"""

from __future__ import annotations

import contextlib
import csv
import functools
import itertools
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence as Many
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from bothways.core import files
from bothways.core.config import reader as configs
from bothways.core.config.values import require_at_least
from bothways.core.errors import (
    BothwaysError,
    ConfigError,
    DataError,
    ResourceError,
    argument,
    optional,
)
from bothways.core.files import LOCK, OWNER, lock_folder
from bothways.core.jobs.process_pool import map_in_order
from bothways.core.progress import SILENT, Progress
from bothways.core.runtime.process import usable_cores
from bothways.core.terminal import quantity
from bothways.data.documents import Origin, check_versions, origin_of
from bothways.data.tables import HUB, without_revision
from bothways.data.text_io import file_at, is_stream
from bothways.prediction import PartFormat, engine
from bothways.prediction.bulk import parts
from bothways.prediction.bulk.parts import BulkRequest, PartJob, PartMarker, PartResult
from bothways.tasks.base import Task
from bothways.tasks.columns import guess_note

ATTEMPTS = 3
"""Maximum number of attempts at a part whose worker is killed."""
JOB, SUCCESS = "_job.json", "_SUCCESS"
PARTS, REJECTS, FILES = "_parts", "_rejects", "_files"
BEGUN, FINISHED = (JOB, PARTS, REJECTS, FILES), ("part-*", f"{PARTS}/[!.]*.json", SUCCESS)
"""Files of a refused job, and globs of files that are never deleted; see `lock_folder`."""
SUFFIXES: dict[str, PartFormat] = {
    ".jsonl": "jsonl", ".csv": "jsonl", ".tsv": "jsonl", ".parquet": "parquet", ".npy": "npy",
}  # fmt: skip
"""Endings of files, and the format of the parts that they are made of."""


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

    @property
    def warnings(self) -> list[str]:
        """Sentences for the user about texts that were cut or empty."""
        return engine.PredictionCounts(self.rows, self.cut, self.blank).warnings


def is_file(out: Path) -> bool:
    """Return True for the name of a file; other names are folders of parts."""
    return out.suffix.lower() in SUFFIXES and not out.is_dir()


def parts_folder(out: Path) -> Path:
    """Return the folder of the parts of a file."""
    return out.with_name(f"{files.HIDDEN}{out.name}.parts")


def rejects_file(out: Path) -> Path:
    """Return the file of the rows without a prediction."""
    return out.with_name(f"{out.name}.rejects.jsonl")


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
    if not is_file(out):
        for name in request.files:
            if is_stream(name):
                fix = "Write it to a file first, or name one file for the output."
                raise ConfigError("parts are made of files, not of a pipe", where=name, fix=fix)
            if files.local_path(name).parent.resolve() == out.resolve():
                fix = f"Choose another folder: {argument(out='FOLDER')}."
                raise DataError("is in the folder of the output", where=name, fix=fix)
        return _predict_parts(request, out, processes, threads, progress)
    for output in (out, rejects_file(out)):
        files.check_output_path(output, request.files)
    suffix = out.suffix.lower()
    if request.form not in (None, suffix[1:], "spans" if suffix == ".jsonl" else None):
        message = f"{request.form!r} is not the format of {out.name}"
        raise ConfigError(message, where="format", fix="Leave it out: the ending names the format.")
    request, folder = replace(request, form=request.form or SUFFIXES[suffix]), parts_folder(out)
    with contextlib.ExitStack() as stack:
        if any(map(is_stream, request.files)):  # the parts of a pipe cannot be continued
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        result = _predict_parts(request, folder, processes, threads, progress)
        if result.parts:
            progress.stage(f"writing {out.name}")
            join_parts(folder, out, flat=request.top is None)
        shutil.rmtree(folder)
    if not result.parts:
        fix = "Give a file with at least one example."
        raise DataError("holds no row", where=", ".join(request.files), fix=fix)
    return result


def _predict_parts(
    request: BulkRequest, out: Path, processes: int, threads: int | None, progress: Progress
) -> BulkResult:
    opened = request.open() if processes == 1 and threads is None else None
    task = request.read_task() if opened is None else opened.task_model.task
    request = request.with_form(task)
    if processes > 1:
        threads = threads or max(1, usable_cores() // processes)
    predict = parts.PartWorker(request, threads, opened)
    with (
        lock_folder(out, begun=BEGUN, finished=FINISHED),
        contextlib.ExitStack() as stack,
    ):
        # Those of a worker in this process are the calling program's again afterwards.
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        run = _BulkRun(out, request, task, progress)
        run.begin()
        sizes = [size for size in run.sizes if size is not None]
        progress.stage("predicting", sum(sizes) if len(sizes) == len(run.sizes) else None)
        # In this process a part reports on the way; the first one opens the model.
        results = (predict(job, functools.partial(run.advance, job)) for job in run.jobs())
        if processes > 1:
            results = map_in_order(predict, run.jobs(), processes, ATTEMPTS)
        with contextlib.closing(results):
            for result in results:
                run.take(result)
        if run.error is not None:
            raise run.error
        totals = {name: getattr(run.result, name) for name in ("rows", "rejected", "parts")}
        _write_json(out / SUCCESS, totals)
    if request.precision == "auto" and run.precision is not None:
        progress.message(f"note: predicted in {run.precision}")
    return run.result


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
    require_at_least(1, window=window)
    if rows is None and len(request.files) != 1:
        count = len(request.files)
        message = f"there are {count} files, and one is read" if count else "names no file"
        fix = f"For several files name a folder: {argument(out='DIR')}" if count else "Name one."
        raise ConfigError(message, where="files", fix=fix)
    opened = request.open()
    task = opened.task_model.task
    form, request = request.form or "jsonl", request.with_form(task)
    name = request.files[0] if rows is None else "the input"
    reading = opened.read(name if rows is None else rows, request.columns(task), labelled=False)
    if rows is None and (note := guess_note(name, reading, task, request.columns(task))):
        progress.message(note)
    rejects, names = parts.Rejects(False), [new for _, new in request.kept]
    counts, answered = engine.counting(reading, progress, "predicting"), 0
    bulk_rows = parts.read_bulk_rows(request, reading, name, rejects)
    size = window or engine.WINDOW
    for row, prediction in parts.predict_kept(opened, request, bulk_rows, counts, rejects, size):
        values = parts.prediction_values(prediction, request.top, form)
        answered += values.get("label") is not None
        yield parts.kept_values(dict(zip(names, row.kept, strict=True)), values)
    if (least := getattr(task, "abstain", 0)) and counts.examples:
        share = f"{answered:,} of {quantity(counts.examples, 'text(s)')}"
        message = f"note: {share} ({answered / counts.examples:.1%}) have a label"
        progress.message(f"{message}: it has a probability of {least:g} or more")
    if request.precision == "auto":
        progress.message(f"note: predicted in {opened.precision}")
    for warning in counts.warnings:
        progress.message(warning)


@dataclass(frozen=True)
class FileMarker:
    """Record of a file that has been read: its parts, its size and, as in `Origin`, its version."""

    parts: int
    size: int
    modified: int | str


@dataclass
class _BulkRun:
    """A run in the process that reads and writes, and that has locked the folder.

    Attributes:
        done: bytes of input whose predictions are written; a data set of the Hub counts as one.
        error: ends the reading; parts that were read before it are still predicted.
        types: the Arrow types of kept columns, as in the first part that has rows.
        precision: of the workers; None before the first part is computed.
    """

    out: Path
    request: BulkRequest
    task: Task[Any, Any]
    progress: Progress
    result: BulkResult = field(default_factory=BulkResult)
    done: float = 0.0
    error: BothwaysError | None = None
    types: tuple[Any, ...] | None = None
    precision: str | None = None

    @functools.cached_property
    def sizes(self) -> list[int | None]:
        """The bytes of each file; None where they are unknown."""
        stats = map(parts.status, self.request.files)
        return [None if stat is None else stat.st_size for stat in stats]

    def begin(self) -> None:
        """Check that the folder is empty or holds the same job, and write down the job.

        Raises:
            ResourceError: it holds other files.
            ConfigError: it was begun with other settings.
            DataError: it was begun with another revision of a data set of the Hub.
        """
        record, job_file = self.request.record(), self.out / JOB
        if job_file.exists():
            old = files.read_object(job_file)
            for name in {**record, **old}:
                # To go on with rejects is right: no part that is finished without them has any.
                rejects = name == "rejects" and record.get(name) is True
                if old.get(name) != record.get(name) and not rejects:
                    message = f"the folder was begun with {name} = {old.get(name)!r}"
                    other = f"or choose another folder: {argument(out='FOLDER')}."
                    raise ConfigError(
                        f"{message}, not {record.get(name)!r}", where=job_file,
                        fix=f"Continue with the same settings, {other}",
                    )  # fmt: skip
        else:
            # Hidden are files that were being written when an earlier run was killed.
            names = sorted(path.name for path in self.out.iterdir())
            if foreign := [x for x in names if not x.startswith((LOCK, OWNER, files.HIDDEN))]:
                message = f"holds other files, such as {foreign[0]!r}"
                raise ResourceError(message, where=self.out, fix="Choose a new or empty folder.")
        for name in (PARTS, REJECTS, FILES):
            files.make_folder(self.out / name)
        for name in self.request.files:
            self.origin(name)
        _write_json(job_file, record)
        (self.out / SUCCESS).unlink(missing_ok=True)

    def origin(self, name: str) -> Origin:
        """Return an input as it is now; DataError if a data set of the Hub has changed."""
        if is_stream(name):
            return Origin(name)
        origin = origin_of(name if name.startswith(HUB) else str(file_at(name)))
        check_versions(self.out / FILES, [replace(origin, name=without_revision(name))])
        return origin

    def jobs(self) -> Iterator[PartJob]:
        """Yield the parts that are not finished; an error ends them and is raised at the end."""
        try:
            for number, name in enumerate(self.request.files):
                origin, count = self.origin(name), 0
                # A pipe's rows are new, though parts may be there of a run that was killed.
                markers = None if is_stream(name) else self._finished_file(number, origin)
                if markers is not None:
                    for part, marker in enumerate(markers):
                        self._skip(number, part, marker)
                    continue
                for job in parts.read_parts(self.request, self.task, number, self.progress):
                    count = job.part + 1
                    finished = self.marker(number, job.part)
                    if finished is not None and finished.digest == job.digest:
                        self._skip(number, job.part, finished)
                        continue
                    self.part_files(number, job.part)[-1].unlink(missing_ok=True)
                    if job.rows:
                        kept = [row.kept for row in job.rows]
                        self._note_types(kept, [old for old, _ in self.request.kept], name)
                    yield replace(job, types=self.types)
                self._finish_file(number, count, origin)
        except BothwaysError as error:
            self.error = error

    def marker(self, number: int, part: int) -> PartMarker | None:
        """Return the marker of a part whose file is there."""
        content, _, marker_file = self.part_files(number, part)
        marker: PartMarker | None = _read(marker_file, PartMarker)
        if marker is None or marker.size is None:
            return marker
        return marker if content.is_file() and content.stat().st_size == marker.size else None

    def _finished_file(self, number: int, origin: Origin) -> list[PartMarker] | None:
        """Return the markers of a file that is finished and has not changed since."""
        marker = _read(self._file_marker(number), FileMarker)
        if marker is None or (marker.size, marker.modified) != (origin.size, origin.modified):
            return None
        markers = [self.marker(number, part) for part in range(marker.parts)]
        complete = [item for item in markers if item is not None]
        return complete if len(complete) == marker.parts else None

    def _finish_file(self, number: int, count: int, origin: Origin) -> None:
        """Note the parts of a file that has been read; remove those beyond, of an earlier try.

        Some may still be at work: they have no marker, which one that was computed before has lost.
        """
        for beyond in itertools.count(count):
            stale = [path for path in self.part_files(number, beyond) if path.exists()]
            if not stale:
                break
            for path in stale:
                path.unlink()
        marker = FileMarker(count, origin.size, origin.modified)
        _write_json(self._file_marker(number), asdict(marker))

    def _skip(self, number: int, part: int, marker: PartMarker) -> None:
        """Count a part that was finished before."""
        self._count(number, marker, again=True)
        if marker.size is not None:
            content, names = self.part_files(number, part)[0], self.request.kept
            self._note_types((), [new for _, new in names], str(content))

    def _count(self, number: int, marker: PartMarker, *, again: bool) -> None:
        total = self.result
        total.parts, total.again = total.parts + 1, total.again + again
        for name in ("rows", "rejected", "cut", "blank"):
            setattr(total, name, getattr(total, name) + getattr(marker, name))
        self.done += marker.share * (self.sizes[number] or 1)

    def _note_types(self, rows: Many[Many[Any]], names: Many[str], location: str) -> None:
        if self.types is None and self.request.form == "parquet":
            self.types = parts.column_types(rows, names, location)

    def advance(self, job: PartJob, share: float) -> None:
        """Report a part of which a share is done."""
        rows = round(self.result.rows + share * len(job.rows))
        done = self.done + share * job.share * (self.sizes[job.file] or 1)
        self.progress.advance(done, quantity(rows, "row(s)"))

    def take(self, result: PartResult | BothwaysError) -> None:
        """Write a part, its rejected rows, then its marker; raise the error of one that failed."""
        if isinstance(result, BothwaysError):
            raise result
        part_file, rejects, marker_file = self.part_files(result.file, result.part)
        rows = (json.dumps(row._asdict(), ensure_ascii=False) for row in result.rejected)
        lines = "".join(f"{row}\n" for row in rows).encode(errors="replace")
        for path, content in ((part_file, result.content), (rejects, lines)):
            if content:
                files.replace_file(path, lambda file, content=content: file.write_bytes(content))
            else:
                path.unlink(missing_ok=True)
        # The marker comes last: a part with a marker is complete, whatever was killed.
        _write_json(marker_file, asdict(result.marker))
        self._count(result.file, result.marker, again=False)
        self.precision = result.precision
        self.progress.advance(self.done, quantity(self.result.rows, "row(s)"))

    def part_files(self, number: int, part: int) -> tuple[Path, Path, Path]:
        """Return the files of a part, of its rejected rows and of its marker."""
        name, form = f"{number:05d}-{part:05d}", self.request.form
        return (
            self.out / f"part-{name}.{'jsonl' if form == 'spans' else form}",
            self.out / REJECTS / f"{name}.jsonl",
            self.out / PARTS / f"{name}.json",
        )

    def _file_marker(self, number: int) -> Path:
        return self.out / FILES / f"{number:05d}.json"


def _read(path: Path, kind: type[Any]) -> Any:
    """Return a marker; None if it is not there or not one."""
    try:
        return configs.read(kind, files.read_object(path)) if path.is_file() else None
    except BothwaysError:
        return None


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    files.replace_text(path, json.dumps(value, indent=1) + "\n")


def join_parts(folder: Path, out: Path, *, flat: bool) -> None:
    """Write the parts in a folder as one file, and their rejected rows as another.

    Args:
        flat: whether the values of a mapping, such as probabilities, are columns of a table.

    Raises:
        ResourceError: no space or no permission; the file is as it was.
    """
    # Numbers have more digits than five beyond part 99,999.
    parts, rejects = (
        sorted(files, key=lambda file: [int(number) for number in re.findall(r"\d+", file.stem)])
        for files in (folder.glob("part-*"), (folder / REJECTS).glob("*.jsonl"))
    )
    if rejects:
        files.replace_file(rejects_file(out), lambda file: _join(rejects, file, ".jsonl", flat))
    else:
        rejects_file(out).unlink(missing_ok=True)
    files.replace_file(out, lambda file: _join(parts, file, out.suffix.lower(), flat))


def _join(part_files: list[Path], file: Path, suffix: str, flat: bool) -> None:
    """Write parts as one file; in a .tsv a tab or a line end in a value is a blank, as it has no
    quotes.
    """
    if suffix == ".jsonl":
        with file.open("wb") as binary:
            for part in part_files:
                binary.write(part.read_bytes())
    elif suffix == ".parquet":
        with optional("data", "writing Parquet files"):
            import pyarrow
            from pyarrow import parquet

        schema = parquet.read_schema(part_files[0]) if part_files else pyarrow.schema([])
        with parquet.ParquetWriter(file, schema) as writer:
            for part in part_files:
                writer.write_table(parquet.read_table(part))
    elif suffix == ".npy":
        # One array `(rows, width)`, with those of one part in memory.
        arrays = [np.load(part, mmap_mode="r") for part in part_files] or [np.empty((0, 0), "<f4")]
        shape = (sum(map(len, arrays)), arrays[0].shape[1])
        header = {"descr": arrays[0].dtype.str, "fortran_order": False, "shape": shape}
        with file.open("wb") as binary:
            np.lib.format.write_array_header_1_0(binary, header)
            for array in arrays:
                binary.write(array.tobytes())
    else:
        names = list(dict.fromkeys(name for row in _rows(part_files, flat) for name in row))
        with file.open("w", encoding="utf-8", newline="") as stream:
            header_row = [dict(zip(names, names, strict=True))] if names else []
            # A return in a value is quoted where it ends lines, before Python 3.13 only there.
            lines: Any = SimpleNamespace(write=lambda line: stream.write(line[:-2] + "\n"))
            table = csv.writer(lines, lineterminator="\r\n")
            for row in itertools.chain(header_row, _rows(part_files, flat)):
                values = [row.get(name) for name in names]
                if suffix == ".csv":
                    table.writerow(values)
                    continue
                texts = ("" if value is None else str(value) for value in values)
                fields = (" ".join(text.splitlines()).replace("\t", " ") for text in texts)
                print(*fields, sep="\t", file=stream)


def _rows(part_files: list[Path], flat: bool) -> Iterator[dict[str, Any]]:
    """Yield the values of each row by column: texts, numbers, and JSON for what is neither."""
    for part in part_files:
        with part.open(encoding="utf-8") as lines:
            for line in lines:
                row: dict[str, Any] = {}
                for name, value in json.loads(line).items():
                    if flat and isinstance(value, dict):
                        row |= {f"{name}.{key}": item for key, item in value.items()}
                    elif isinstance(value, dict | list):
                        row[name] = json.dumps(value, ensure_ascii=False)
                    else:
                        row[name] = value
                yield row
