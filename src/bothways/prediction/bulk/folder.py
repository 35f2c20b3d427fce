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
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bothways.core.advice import argument
from bothways.core.atomic_files import HIDDEN, make_folder, replace_file
from bothways.core.config import reader as configs
from bothways.core.errors import BothwaysError, ConfigError, ResourceError
from bothways.core.folder_lock import LOCK, OWNER
from bothways.core.json_reader import read_object
from bothways.data.documents import Origin, check_versions, origin_of
from bothways.data.hub_rows import HUB, without_revision
from bothways.data.text_io import file_at
from bothways.prediction.bulk.parts import PartJob, PartMarker, PartResult
from bothways.prediction.bulk.request import BulkRequest

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
