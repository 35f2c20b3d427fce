"""The folder of the output: parts, a marker for each finished part, and what was asked.

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
    .predictions.csv.parts/   as `bulk.folder` describes, until the file is written; the same work
                              continues there
    predictions.csv.rejects.jsonl  rows without a prediction, if they are allowed
"""

from __future__ import annotations

import csv
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bothways.core.config import reader as configs
from bothways.core.errors import BothwaysError, ConfigError, ResourceError, argument, optional
from bothways.core.files import (
    HIDDEN,
    LOCK,
    OWNER,
    make_folder,
    read_object,
    replace_file,
    replace_text,
)
from bothways.data.documents import Origin, check_versions, origin_of
from bothways.data.tables import HUB, without_revision
from bothways.data.text_io import file_at, is_stream
from bothways.prediction.bulk.parts import (
    BulkRequest,
    PartFormat,
    PartMarker,
    PartResult,
)

JOB, SUCCESS = "_job.json", "_SUCCESS"
PARTS, REJECTS, FILES = "_parts", "_rejects", "_files"
BEGUN, FINISHED = (JOB, PARTS, REJECTS, FILES), ("part-*", f"{PARTS}/[!.]*.json", SUCCESS)
"""Files of a refused job, and globs of files that are never deleted; see `discard_begun`."""


@dataclass(frozen=True)
class FileMarker:
    """Record of a file that has been read: its parts, its size and, as in `Origin`, its version."""

    parts: int
    size: int
    modified: int | str


class BulkFolder:
    """A folder that this process has locked."""

    def __init__(self, out: Path, request: BulkRequest) -> None:
        self.out, self.request = out, request

    def begin(self) -> None:
        """Check that the folder is empty or holds the same job, and write down the job.

        Raises:
            ResourceError: it holds other files.
            ConfigError: it was begun with other settings.
            DataError: it was begun with another revision of a data set of the Hub.
        """
        record, job_file = self.request.record(), self.out / JOB
        if job_file.exists():
            old = read_object(job_file)
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
            if foreign := [x for x in names if not x.startswith((LOCK, OWNER, HIDDEN))]:
                message = f"holds other files, such as {foreign[0]!r}"
                fix = "Choose a new or empty folder."
                raise ResourceError(message, where=self.out, fix=fix)
        for name in (PARTS, REJECTS, FILES):
            make_folder(self.out / name)
        for name in self.request.files:
            self.origin(name)
        _write_json(job_file, record)
        (self.out / SUCCESS).unlink(missing_ok=True)

    def origin(self, name: str) -> Origin:
        """Return an input as it is now.

        Raises:
            DataError: a data set of the Hub has changed since the work began.
        """
        if is_stream(name):
            return Origin(name)
        origin = origin_of(name if name.startswith(HUB) else str(file_at(name)))
        check_versions(self.out / FILES, [replace(origin, name=without_revision(name))])
        return origin

    def marker(self, number: int, part: int) -> PartMarker | None:
        """Return the marker of a part whose file is there."""
        content, _, marker_file = self.part_files(number, part)
        marker: PartMarker | None = _read(marker_file, PartMarker)
        if marker is None or marker.size is None:
            return marker
        return marker if content.is_file() and content.stat().st_size == marker.size else None

    def finished_file(self, number: int, origin: Origin) -> list[PartMarker] | None:
        """Return the markers of a file that is finished and has not changed since."""
        marker = _read(self._file_marker(number), FileMarker)
        if marker is None or (marker.size, marker.modified) != (origin.size, origin.modified):
            return None
        markers = [self.marker(number, part) for part in range(marker.parts)]
        complete = [item for item in markers if item is not None]
        return complete if len(complete) == marker.parts else None

    def forget(self, number: int, part: int) -> None:
        """Delete the marker of a part that is computed again."""
        self.part_files(number, part)[-1].unlink(missing_ok=True)

    def write(self, result: PartResult) -> None:
        """Write a part, its rejected rows, then its marker.

        Raises:
            ResourceError: no space, or no permission.
        """
        part_file, rejects, marker_file = self.part_files(result.file, result.part)
        rows = (json.dumps(row._asdict(), ensure_ascii=False) for row in result.rejected)
        lines = "".join(f"{row}\n" for row in rows).encode(errors="replace")
        for path, content in ((part_file, result.content), (rejects, lines)):
            if content:
                replace_file(path, lambda file, content=content: file.write_bytes(content))
            else:
                path.unlink(missing_ok=True)
        # The marker comes last: a part with a marker is complete, whatever was killed.
        _write_json(marker_file, asdict(result.marker))

    def finish_file(self, number: int, parts: int, origin: Origin) -> None:
        """Note the parts of a file that has been read; remove those beyond, of an earlier try.

        Some may still be at work: they have no marker, which one that was computed before has lost.
        """
        for beyond in itertools.count(parts):
            found = [path for path in self.part_files(number, beyond) if path.exists()]
            if not found:
                break
            for path in found:
                path.unlink()
        marker = FileMarker(parts, origin.size, origin.modified)
        _write_json(self._file_marker(number), asdict(marker))

    def finish(self, totals: Mapping[str, int]) -> None:
        """Mark the whole output as complete."""
        _write_json(self.out / SUCCESS, totals)

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
        return configs.read(kind, read_object(path)) if path.is_file() else None
    except BothwaysError:
        return None


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    replace_text(path, json.dumps(value, indent=1) + "\n")


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


def part_format(request: BulkRequest, out: Path) -> PartFormat:
    """Return the format of the parts of a file; raise ConfigError if another one is named."""
    spans = request.form == "spans" and out.suffix == ".jsonl"
    form: PartFormat = "spans" if spans else SUFFIXES[out.suffix]
    if request.form not in (None, form):
        message = f"{request.form!r} is not the format of {out.name}"
        raise ConfigError(message, where="format", fix="Leave it out: the ending names the format.")
    return form


def join_parts(folder: Path, out: Path, *, flat: bool) -> None:
    """Write the parts in a folder as one file, and their rejected rows as another.

    Args:
        flat: whether the values of a mapping, such as probabilities, are columns of a table.

    Raises:
        ResourceError: no space or no permission; the file is as it was.
    """
    parts = sorted(folder.glob("part-*"), key=_numbers)
    rejects = sorted((folder / REJECTS).glob("*.jsonl"), key=_numbers)
    if rejects:
        replace_file(rejects_file(out), lambda file: _join_lines(rejects, file))
    else:
        rejects_file(out).unlink(missing_ok=True)
    writers: dict[str, Callable[[list[Path], Path], None]] = {
        ".jsonl": _join_lines, ".parquet": _join_tables, ".npy": _join_arrays,
    }  # fmt: skip
    write = writers.get(out.suffix, functools.partial(_write_table, flat=flat, suffix=out.suffix))
    replace_file(out, lambda file: write(parts, file))


def _numbers(file: Path) -> list[int]:
    """Return the numbers in a name, of more digits than five beyond part 99,999."""
    return [int(number) for number in re.findall(r"\d+", file.stem)]


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
        for array in arrays:
            stream.write(array.tobytes())


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
        header = [dict(zip(names, names, strict=True))] if names else []
        table = csv.writer(stream, lineterminator="\n")
        for row in itertools.chain(header, _rows(parts, flat)):
            values = [row.get(name) for name in names]
            if suffix == ".csv":
                table.writerow(values)
                continue
            texts = ("" if value is None else str(value) for value in values)
            fields = (" ".join(text.splitlines()).replace("\t", " ") for text in texts)
            print(*fields, sep="\t", file=stream)
