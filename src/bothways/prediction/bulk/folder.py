"""The folder of the output: parts, a marker for each finished part, and what was asked.

    part-00002-00017.jsonl      the 18th part of the third file
    _parts/00002-00017.json     its marker: rows, digest of the input, size of the part
    _rejects/00002-00017.jsonl  rows of that part without a prediction
    _files/00002.json           marker of a file whose parts are all finished
    _files/versions.json        the commits of data sets of the Hub
    _job.json                   what was asked
    _SUCCESS                    totals, written at the end

Every file is complete or absent, and a marker is written after what it marks. Readers of data
sets, such as pyarrow's and Spark's, ignore names with an underscore.

Or one file, into which the parts of a hidden folder next to it are joined at the end:

    predictions.csv           complete or absent, in the order of the input
    .predictions.csv.parts/   as `bulk.folder` describes, until the file is written; the same work
                              continues there
    predictions.csv.rejects.jsonl  rows without a prediction, if they are allowed
"""

from __future__ import annotations

import csv
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bothways.core.config import reader as configs
from bothways.core.errors import (
    BothwaysError,
    ConfigError,
    DataError,
    ResourceError,
    argument,
    optional,
)
from bothways.core.files import HIDDEN, make_folder, read_object, replace_file
from bothways.core.folder_lock import LOCK, OWNER
from bothways.data.documents import Origin, check_versions, origin_of
from bothways.data.tables import HUB, without_revision
from bothways.data.text_io import STANDARD_INPUT, STDIN, file_at, read_lines, standard_input
from bothways.prediction.bulk.parts import BulkRequest, PartFormat, PartJob, PartMarker, PartResult

JOB, SUCCESS = "_job.json", "_SUCCESS"
PARTS, REJECTS, FILES = "_parts", "_rejects", "_files"
BEGUN, FINISHED = (JOB, PARTS, REJECTS, FILES), ("part-*", f"{PARTS}/[!.]*.json", SUCCESS)
"""Files of a refused job, and globs of files that are never deleted; see `discard_begun`."""


@dataclass(frozen=True)
class FileMarker:
    """Record of a finished file: its parts, its size and, as in `Origin`, its version."""

    parts: int
    size: int
    modified: int | str


class BulkFolder:
    """A folder that this process has locked.

    Attributes:
        origins: data sets of the Hub as they are when the work begins, files when they are read.
    """

    def __init__(self, out: Path, request: BulkRequest) -> None:
        self.out, self.request = out, request
        self.origins = [*map(_origin, request.files)]

    def begin(self) -> None:
        """Check that the folder is empty or holds the same job, and write down the job.

        Raises:
            ResourceError: it holds other files.
            ConfigError: it was begun with other settings.
            DataError: it was begun with another revision of a data set of the Hub.
        """
        record, job_file = self.request.record(), self.out / JOB
        if job_file.exists():
            _check_same(read_object(job_file), record, job_file)
        else:
            passed = {LOCK, OWNER}
            names = [path.name for path in self.out.iterdir() if path.name not in passed]
            # Files that were being written when an earlier run was killed.
            foreign = [name for name in names if not name.startswith(HIDDEN)]
            if foreign:
                message = f"holds other files, such as {sorted(foreign)[0]!r}"
                fix = "Choose a new or empty folder."
                raise ResourceError(message, where=self.out, fix=fix)
        for name in (PARTS, REJECTS, FILES):
            make_folder(self.out / name)
        origins = [replace(x, name=without_revision(x.name)) for x in self.origins]
        check_versions(self.out / FILES, origins)
        _write_json(job_file, record)

    def finished_part(self, job: PartJob) -> PartMarker | None:
        """Return the marker of a part that is finished for the same rows."""
        marker = self._marker(job.file, job.part)
        return None if marker is None or marker.digest != job.digest else marker

    def finished_file(self, number: int) -> list[PartMarker] | None:
        """Return the markers of a file that is finished and has not changed since.

        A file that is not is to be read now: what changes later is found when the work continues.
        """
        if not self.request.files[number].startswith(HUB):
            self.origins[number] = _origin(self.request.files[number])
        origin, marker = self.origins[number], _read(self._finished(number), FileMarker)
        if marker is None or (marker.size, marker.modified) != (origin.size, origin.modified):
            return None
        markers = [self._marker(number, part) for part in range(marker.parts)]
        complete = [item for item in markers if item is not None]
        return complete if len(complete) == marker.parts else None

    def write(self, result: PartResult) -> None:
        """Write a part, its rejected rows, then its marker.

        Raises:
            ResourceError: no space, or no permission.
        """
        self._reopen()
        part_file, rejects, marker_file = self._places(result.file, result.part)
        content = result.content
        if content is None:
            part_file.unlink(missing_ok=True)
        else:
            replace_file(part_file, lambda file: file.write_bytes(content))
        if result.rejected:
            rows = (json.dumps(asdict(row), ensure_ascii=False) for row in result.rejected)
            lines = "".join(f"{row}\n" for row in rows).encode(errors="replace")
            replace_file(rejects, lambda file: file.write_bytes(lines))
        else:
            rejects.unlink(missing_ok=True)
        # The marker comes last: a part with a marker is complete, whatever was killed.
        _write_json(marker_file, asdict(result.marker))

    def finish_file(self, number: int, parts: int) -> None:
        """Mark a file whose parts are all finished; remove parts beyond them of an earlier try."""
        beyond = parts
        while any(path.exists() for path in self._places(number, beyond)):
            self._reopen()
            for path in self._places(number, beyond):
                path.unlink(missing_ok=True)
            beyond += 1
        origin = self.origins[number]
        marker = FileMarker(parts, origin.size, origin.modified)
        _write_json(self._finished(number), asdict(marker))

    def finish(self, totals: Mapping[str, int]) -> None:
        """Mark the whole output as complete."""
        _write_json(self.out / SUCCESS, dict(totals))

    def _reopen(self) -> None:
        """Take back that the output is complete, before it changes."""
        (self.out / SUCCESS).unlink(missing_ok=True)

    def _marker(self, number: int, part: int) -> PartMarker | None:
        """Return the marker of a part whose file is there."""
        content, _, marker_file = self._places(number, part)
        marker: PartMarker | None = _read(marker_file, PartMarker)
        if marker is None or marker.size is None:
            return marker
        return marker if content.is_file() and content.stat().st_size == marker.size else None

    def _places(self, number: int, part: int) -> tuple[Path, Path, Path]:
        """Return the files of a part, of its rejected rows and of its marker."""
        name, form = f"{number:05d}-{part:05d}", self.request.form
        return (
            self.out / f"part-{name}.{'jsonl' if form == 'spans' else form}",
            self.out / REJECTS / f"{name}.jsonl",
            self.out / PARTS / f"{name}.json",
        )

    def _finished(self, number: int) -> Path:
        return self.out / FILES / f"{number:05d}.json"


def _origin(name: str) -> Origin:
    return origin_of(name if name.startswith(HUB) else str(file_at(name)))


def _check_same(old: Mapping[str, Any], new: Mapping[str, Any], path: Path) -> None:
    """Raise ConfigError for the first setting that differs."""
    for name in {**new, **old}:
        if old.get(name) != new.get(name):
            message = f"the folder was begun with {name} = {old.get(name)!r}, not {new.get(name)!r}"
            other = argument(out="FOLDER")
            fix = f"Continue with the same settings, or choose another folder: {other}."
            raise ConfigError(message, where=path, fix=fix)


def _read(path: Path, kind: type[Any]) -> Any:
    """Return a marker; None if it is not there or not one."""
    try:
        return configs.read(kind, read_object(path)) if path.is_file() else None
    except BothwaysError:
        return None


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=1) + "\n"
    replace_file(path, lambda file: file.write_text(text, encoding="utf8", errors="replace"))


SUFFIXES: dict[str, PartFormat] = {
    ".jsonl": "jsonl", ".csv": "jsonl", ".tsv": "jsonl", ".parquet": "parquet", ".npy": "npy",
}  # fmt: skip
"""Endings of files, and the format of the parts that they are made of."""


def is_file(out: Path) -> bool:
    """Return True for the name of a file; other names are folders of parts."""
    return out.suffix in SUFFIXES and not out.is_dir()


def parts_folder(out: Path) -> Path:
    """Return the folder of the parts of a file."""
    return out.with_name(f"{HIDDEN}{out.name}.parts")


def rejects_file(out: Path) -> Path:
    """Return the file of the rows without a prediction."""
    return out.with_name(f"{out.name}.rejects.jsonl")


@contextmanager
def spooled(name: str, suffix: str) -> Iterator[str]:
    """Copy a pipe to a temporary file, since parts are made of what can be read again.

    Errors name the pipe.
    """
    lines = standard_input() if name == STDIN else read_lines(file_at(name))
    with tempfile.NamedTemporaryFile("w", suffix=suffix, encoding="utf8") as file:
        file.writelines(f"{text}\n" for _, text in lines)
        file.flush()
        try:
            yield file.name
        except BothwaysError as error:
            if error.where is not None:
                shown = STANDARD_INPUT if name == STDIN else name
                error.where = str(error.where).replace(file.name, shown)
            raise


def part_format(request: BulkRequest, out: Path) -> PartFormat:
    """Return the format of the parts of a file.

    Raises:
        ConfigError: the request names another format.
        DataError: the file is one of the inputs.
    """
    spans = request.form == "spans" and out.suffix == ".jsonl"
    form: PartFormat = "spans" if spans else SUFFIXES[out.suffix]
    if request.form not in (None, form):
        message = f"{request.form!r} is not the format of {out.name}"
        raise ConfigError(message, where="format", fix="Leave it out: the ending names the format.")
    for name in request.files:
        if not name.startswith(HUB) and file_at(name).resolve() == out.resolve():
            raise DataError("is the input, too", where=out, fix="Choose another file.")
    return form


def join_parts(folder: Path, out: Path, *, flat: bool) -> None:
    """Write the parts in a folder as one file, and their rejected rows as another.

    Args:
        flat: whether the values of a mapping, such as probabilities, are columns of a table.

    Raises:
        ResourceError: no space or no permission; the file is as it was.
    """
    parts = sorted(folder.glob("part-*"))
    rejects = sorted((folder / REJECTS).glob("*.jsonl"))
    if rejects:
        replace_file(rejects_file(out), lambda file: _join_lines(rejects, file))
    else:
        rejects_file(out).unlink(missing_ok=True)
    match out.suffix:
        case ".parquet":
            replace_file(out, lambda file: _join_tables(parts, file))
        case ".jsonl":
            replace_file(out, lambda file: _join_lines(parts, file))
        case ".npy":
            replace_file(out, lambda file: _join_arrays(parts, file))
        case _:
            replace_file(out, lambda file: _write_table(parts, file, out.suffix, flat))


def _join_lines(parts: list[Path], file: Path) -> None:
    with file.open("wb") as stream:
        for part in parts:
            stream.write(part.read_bytes())


def _join_tables(parts: list[Path], file: Path) -> None:
    with optional("data", "writing Parquet files"):
        import pyarrow
        from pyarrow import parquet

    schema = parquet.read_schema(parts[0]) if parts else pyarrow.schema([])
    with parquet.ParquetWriter(file, schema) as writer:
        for part in parts:
            writer.write_table(parquet.read_table(part))


def _join_arrays(parts: list[Path], file: Path) -> None:
    """Write the arrays of all parts as one, `(rows, width)`, with one of them in memory."""
    arrays = [np.load(part, mmap_mode="r") for part in parts] or [np.empty((0, 0), "<f4")]
    shape = (sum(map(len, arrays)), arrays[0].shape[1])
    header = {"descr": arrays[0].dtype.str, "fortran_order": False, "shape": shape}
    with file.open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, header)
        for part in parts:
            stream.write(np.load(part).tobytes())


def _rows(parts: list[Path], flat: bool) -> Iterator[dict[str, Any]]:
    """Yield the values of each row by column: texts, numbers, and JSON for what is neither."""
    for part in parts:
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


def _write_table(parts: list[Path], file: Path, suffix: str, flat: bool) -> None:
    """Write a table; in a .tsv a tab or a line end in a value is a blank, as it has no quotes."""
    names = list(dict.fromkeys(name for row in _rows(parts, flat) for name in row))
    with file.open("w", encoding="utf-8", newline="") as stream:
        if suffix == ".csv":
            table = csv.DictWriter(stream, names, lineterminator="\n")
            if names:
                table.writeheader()
            table.writerows(_rows(parts, flat))
            return
        if names:
            print(*map(_one_field, names), sep="\t", file=stream)
        for row in _rows(parts, flat):
            print(*(_one_field(row.get(name)) for name in names), sep="\t", file=stream)


def _one_field(value: Any) -> str:
    return "" if value is None else " ".join(str(value).splitlines()).replace("\t", " ")
