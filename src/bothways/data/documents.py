"""Files, folders, globs and Hub data sets → one stream of documents.

The kind of a file is read off its suffix: .txt (also .docs), .jsonl, .parquet; wiki_00, as wiki-extractor names its files, is
text or JSON lines. Text and JSON lines may be compressed (.gz, .xz, .zst, .bz2). The order is that of the inputs, and by name
within a folder or glob, so the same inputs give the same stream.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import assert_never

from bothways.core.errors import DataError
from bothways.data.readers import (
    Boundary,
    Document,
    parse_hub_name,
    read_extracted,
    read_hub,
    read_json_lines,
    read_parquet,
    read_text,
)
from bothways.data.text_io import COMPRESSED, STDIN, BytesRead, check_readable

__all__ = ["Boundary", "Document", "DocumentReader", "Origin", "read_documents"]

HUB = "hub:"
_TEXT = (".txt", ".text", ".docs")
_KINDS = f"{', '.join(_TEXT)}, .jsonl (each also with {', '.join(COMPRESSED)}), .parquet, or wiki-extractor's wiki_00"
_EXTRACTED = re.compile(r"wiki_\d+$")


@dataclass(frozen=True)
class Origin:
    """Where documents come from: a file with its size in bytes and time of change in ns, or a Hub data set."""

    name: str
    size: int = 0
    modified: int = 0


@dataclass(frozen=True)
class _Text:
    path: Path


@dataclass(frozen=True)
class _Extracted:
    path: Path


@dataclass(frozen=True)
class _JsonLines:
    path: Path


@dataclass(frozen=True)
class _Parquet:
    path: Path


@dataclass(frozen=True)
class _Hub:
    name: str


_Input = _Text | _Extracted | _JsonLines | _Parquet | _Hub


class DocumentReader(Iterator[Document]):
    """The documents of some inputs, once through.

    Attributes:
        origins: every file and data set, in reading order.
        total: bytes of all files as they lie on the disk.
        settings: what else decides which documents come out.
    """

    def __init__(self, inputs: list[_Input], column: str, boundary: Boundary) -> None:
        self._bytes_read = BytesRead()
        self._stream = (
            document
            for item in inputs
            for document in _read(item, column, boundary, self._bytes_read)
        )
        self.origins = tuple(_origin(item) for item in inputs)
        self.total = sum(origin.size for origin in self.origins)
        self.settings = {"column": column, "boundary": boundary.value}

    @property
    def position(self) -> int:
        """Bytes read so far, of `total`."""
        return self._bytes_read.position

    def __next__(self) -> Document:
        return next(self._stream)


def read_documents(
    inputs: Sequence[str], *, column: str = "text", boundary: Boundary = Boundary.AUTO
) -> DocumentReader:
    """The documents of files, globs, folders (searched to the bottom) and Hub data sets ("hub:owner/name:configuration:split").

    All names are checked before the first document is read.

    Args:
        inputs: what to read, in this order; a file that is met twice is read once.
        column: where the text is in .jsonl, .parquet and Hub rows.
        boundary: what ends a document in .txt files.

    Raises:
        DataError: no such file, a glob or folder without a file to read, an unknown kind, an empty file; while reading: a
            damaged, binary or wrongly encoded file, bad JSON, a wrong column, with file and line.
        ResourceError: a file or folder that cannot be read.
    """
    found = dict[_Input, None]()
    for name in inputs:
        with check_readable(name):
            found |= dict.fromkeys(_resolve(name))
    return DocumentReader(list(found), column, boundary)


def _resolve(name: str) -> list[_Input]:
    if name == STDIN:
        raise DataError(
            "the standard input is not read for documents",
            where=name,
            fix="Write it into a file, and name that.",
        )
    if name.startswith(HUB):
        parse_hub_name(name.removeprefix(HUB))
        return [_Hub(name.removeprefix(HUB))]
    path = Path(name).expanduser()
    if path.is_dir():
        return _resolve_folder(path)
    if path.exists():
        return [_file(path)]
    if glob.has_magic(name):
        matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        files = [_file(match) for match in matches if match.is_file()]
        if files:
            return files
        raise DataError(
            "matches no file", where=name, fix="Check the pattern; ** goes through folders."
        )
    raise DataError(
        "no such file or folder",
        where=name,
        fix=f"Check the name; a Hub data set is {HUB}owner/name.",
    )


def _resolve_folder(folder: Path) -> list[_Input]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    visible = [
        path
        for path in paths
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    files = [_file(path) for path in visible if _kind(path) is not None]
    if not files:
        raise DataError(
            "holds no file that can be read", where=folder, fix=f"Readable are {_KINDS}."
        )
    return files


def _file(path: Path) -> _Input:
    kind = _kind(path)
    if kind is None:
        raise DataError(
            f"is of no known kind (suffix {path.suffix!r})",
            where=path,
            fix=f"Readable are {_KINDS}.",
        )
    if path.stat().st_size == 0:
        raise DataError("is an empty file", where=path, fix="Leave it out, or fetch it again.")
    return kind


def _kind(path: Path) -> _Input | None:
    inner = path.with_suffix("") if path.suffix in COMPRESSED else path
    if inner.suffix in _TEXT:
        return _Text(path)
    if _EXTRACTED.match(inner.name):
        return _Extracted(path)
    if inner.suffix == ".jsonl":
        return _JsonLines(path)
    return _Parquet(path) if path.suffix == ".parquet" else None


def _origin(item: _Input) -> Origin:
    match item:
        case _Text(path) | _Extracted(path) | _JsonLines(path) | _Parquet(path):
            status = path.stat()
            return Origin(str(path), status.st_size, status.st_mtime_ns)
        case _Hub(name):
            return Origin(HUB + name)
        case _:
            assert_never(item)


def _read(
    item: _Input, column: str, boundary: Boundary, bytes_read: BytesRead
) -> Iterator[Document]:
    match item:
        case _Text(path):
            return read_text(path, boundary, bytes_read)
        case _Extracted(path):
            return read_extracted(path, column, boundary, bytes_read)
        case _JsonLines(path):
            return read_json_lines(path, column, bytes_read)
        case _Parquet(path):
            return read_parquet(path, column, bytes_read)
        case _Hub(name):
            return read_hub(name, column)
        case _:
            assert_never(item)
