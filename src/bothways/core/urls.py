"""Files at URLs that fsspec opens, such as s3://bucket/wiki.jsonl.zst or https://host/text.txt.

What fails is done again, after longer and longer waits. A file goes on at the byte where a request
failed, and only if it is still the file that was opened.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from typing_extensions import Buffer

from bothways.core.errors import BothwaysError, ConfigError, DataError, ResourceError, optional
from bothways.core.terminal import surrogate_in

WAITS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before each further attempt."""
BLOCK = 2**23
"""Bytes of a file that a request asks for."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(://|::)")
_FIX = "Check the connection and the rights, and run the same command again."
# A further attempt would end in the same way.
_FINAL = (
    FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError,
    ImportError, ValueError, TypeError,
)  # fmt: skip
# How stores name the version of a file, the best first.
_VERSIONS = (
    "ETag", "etag", "generation", "md5Hash", "content_md5", "mtime", "LastModified",
    "last_modified", "updated", "created",
)  # fmt: skip

T = TypeVar("T")


def is_url(name: object) -> bool:
    """Return True for the URL of a file or folder, which has a protocol: "s3://bucket/text"."""
    text = str(name)
    return "://" in text and _URL.match(text) is not None


def require_local(folder: Path) -> None:
    """Check that a folder to write is not a URL, of which `Path` has made s3:/bucket/run.

    Raises:
        ConfigError: it is one, or its name is not UTF-8, which safetensors cannot write.
    """
    require_utf8(folder)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", folder.as_posix()):
        fix = "Choose a folder of this machine, and copy it when it is complete."
        raise ConfigError("is a URL, at which no folder can be written", where=folder, fix=fix)


def require_utf8(folder: Path) -> None:
    """Raise ConfigError if the name of a folder has bytes that are not UTF-8."""
    if surrogate_in(str(folder.absolute())) is not None:
        message = "has a name that is not UTF-8, which safetensors cannot open"
        raise ConfigError(message, where=folder, fix="Rename the folder, or one above it.")


@dataclass(frozen=True)
class Url:
    """The URL of a file or folder, with the parts of its name that a `Path` also has."""

    text: str

    def __str__(self) -> str:
        return self.text

    def __fspath__(self) -> str:
        return self.text

    def __truediv__(self, name: str) -> Url:
        return Url(f"{self.text.rstrip('/')}/{name}")

    @property
    def path(self) -> PurePosixPath:
        """The part that names the file, without the query of an address of the web."""
        web = self.text.startswith(("http://", "https://"))
        return PurePosixPath(re.split("[?#]", self.text)[0] if web else self.text)

    @property
    def name(self) -> str:
        """The name of the file."""
        return self.path.name

    @property
    def stem(self) -> str:
        """The name without its last suffix."""
        return self.path.stem

    @property
    def suffix(self) -> str:
        """The last suffix of the name."""
        return self.path.suffix


Place = Path | Url
"""Where a file is: on this machine or at a URL."""


def local_path(name: str | os.PathLike[str]) -> Path:
    """Return a path on this machine; ~ and ~user are home folders, as in a shell.

    Where there is no such user, the name stays as it is, where pathlib raises an error.
    """
    return Path(os.path.expanduser(name))


def place_of(name: str | Path | Url) -> Place:
    """Return a path, or a URL if the name is one."""
    if isinstance(name, Url):
        return name
    return Url(str(name)) if is_url(name) else local_path(name)


@dataclass(frozen=True)
class RemoteFile:
    """What a store says about a file.

    Attributes:
        size: in bytes; None if the store does not say.
        version: changes with the file: an ETag, or the time of the change; empty if unknown.
    """

    url: Url
    size: int | None
    version: str


def open_store(url: str | Url, where: str | None = None) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it.

    Args:
        where: the setting that holds the URL, for messages.

    Raises:
        ConfigError: fsspec does not know the protocol.
        ResourceError: a package is not installed.
    """
    name = str(url)
    with optional("remote", f"reading and writing {name}"):
        from fsspec.core import url_to_fs
    try:
        store, path = url_to_fs(name)
    except (ValueError, OSError) as error:
        fix = 'Write a URL such as "s3://bucket/folder".'
        raise ConfigError(str(error), where=where or name, fix=fix) from error
    except ImportError as error:
        fix = 'Install it; for s3:// and https:// with pip install "bothways[remote]".'
        raise ResourceError(f"{name}: {error}", where=where, fix=fix) from error
    return store, path


def retry(attempt: Callable[[], T], action: str, url: str | Url, fix: str = _FIX) -> T:
    """Call a function; after an error, wait and call it again, `len(WAITS)` times.

    Args:
        action: the name of the attempt in the message, such as "reading".

    Raises:
        ResourceError: it failed each time, or cannot succeed.
    """
    for number, wait in enumerate((*WAITS, None), 1):
        try:
            return attempt()
        except BothwaysError:
            raise
        except Exception as error:  # every store has its own errors
            if wait is None or isinstance(error, _FINAL) or "Credentials" in type(error).__name__:
                count = "" if number == 1 else f" ({number} attempts)"
                cause = str(error) or type(error).__name__
                message = f"{action}: {cause}{count}"
                raise ResourceError(message, where=str(url), fix=fix) from error
            time.sleep(wait)
    raise AssertionError


def status_of(url: Url) -> RemoteFile | None:
    """Return the metadata of a file in the store; None if there is none. Errors as `retry`."""
    store, path = open_store(url)

    def ask() -> dict[str, Any] | None:
        """Return the entry of the file."""
        try:
            entry: dict[str, Any] = store.info(path)
        except FileNotFoundError:
            return None
        return entry

    entry = retry(ask, "asking for the file", url)
    return None if entry is None or entry.get("type") == "directory" else _remote(url, entry)


def _remote(url: Url, entry: dict[str, Any]) -> RemoteFile:
    version = next((str(entry[key]) for key in _VERSIONS if entry.get(key)), "")
    return RemoteFile(url, entry.get("size"), version.strip('"'))


def find_files(url: Url) -> list[RemoteFile] | None:
    """Return the files that a URL names: itself, those of a glob, or those below a folder by name.

    Files whose names begin with a dot, and those in such folders, are dropped from a folder.

    Returns:
        None if there is no such file or folder.
    """
    store, path = open_store(url)
    text = str(url)
    web = text.startswith(("http://", "https://"))
    if any(sign in text for sign in ("*[" if web else "*?[")):
        entries = retry(lambda: store.glob(path, detail=True), "listing the files", url)
        files = {name: entry for name, entry in entries.items() if entry.get("type") == "file"}
        return [_remote(Url(store.unstrip_protocol(name)), files[name]) for name in sorted(files)]
    if (file := status_of(url)) is not None:
        return [file]
    if web or not retry(lambda: store.isdir(path), "asking for the folder", url):
        return None
    below = retry(lambda: store.find(path, detail=True), "listing the folder", url)
    start = len(path.rstrip("/")) + 1
    return [
        _remote(Url(store.unstrip_protocol(name)), below[name])
        for name in sorted(below)
        if not any(piece.startswith(".") for piece in name[start:].split("/"))
    ]


def open_url(url: Url) -> io.BufferedReader:
    """Open a file for reading, to its end in spite of errors.

    Raises:
        DataError: there is no such file; while reading, it has changed.
        ResourceError: see `retry`.
    """
    file = status_of(url)
    if file is None:
        raise DataError("no such file", where=url, fix="Check the name.")
    return io.BufferedReader(_Resumed(file), 1 << 17)


def read_url(url: Url, start: int = 0, stop: int | None = None) -> bytes:
    """Return the bytes of a file, or a range of them. Errors as `retry`."""
    store, path = open_store(url)
    data: bytes = retry(lambda: store.cat_file(path, start=start, end=stop), "reading", url)
    return data


class _Resumed(io.RawIOBase):
    """A file that is opened again, at the same byte, after an error."""

    def __init__(self, file: RemoteFile) -> None:
        self._remote = file
        self._store, self._path = open_store(file.url)
        self._open: Any = None
        self._at = 0
        self._begun = False

    def readable(self) -> bool:
        """Return True, as a stream to read from does."""
        return True

    def seekable(self) -> bool:
        """Return True: the next read is where `seek` said."""
        return True

    def tell(self) -> int:
        """Return the place of the next byte."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Go to a byte; nothing is read."""
        size = self._remote.size
        if whence == io.SEEK_END and size is None:
            raise io.UnsupportedOperation("the size of the file is unknown")
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: size or 0}[whence]
        if start + offset != self._at:
            self._drop()
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Buffer, /) -> int:
        """Fill the buffer with what comes next; return the number of bytes, 0 at the end."""
        view = memoryview(buffer).cast("B")
        message = f"reading after byte {self._at:,}"
        data = retry(lambda: self._read(len(view)), message, self._remote.url)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._drop()
        super().close()

    def _read(self, count: int) -> bytes:
        size = self._remote.size
        if size is not None and self._at >= size:
            return b""
        try:
            if self._open is None:
                self._open = self._opened()
            data: bytes = self._open.read(count)
            if not data and size is not None:
                raise ConnectionError(f"ended after {self._at:,} of {size:,} bytes")
        except Exception:
            self._drop()
            raise
        return data

    def _opened(self) -> Any:
        """Open the file at the place of the next byte; it is still the same file."""
        if self._begun:
            self._store.invalidate_cache()
            current = status_of(self._remote.url)
            if current != self._remote:
                message, fix = "has changed while it was read", "Run the same command again."
                raise DataError(message, where=self._remote.url, fix=fix)
        self._begun = True
        file = self._store.open(self._path, "rb", block_size=BLOCK)
        try:
            if self._at:
                file.seek(self._at)
        except (ValueError, NotImplementedError):  # a server that sends files only from the start
            self._skip(file)
        return file

    def _skip(self, file: Any) -> None:
        left = self._at
        while left:
            piece = file.read(min(left, BLOCK))
            if not piece:
                raise ConnectionError(f"ended before byte {self._at:,}")
            left -= len(piece)

    def _drop(self) -> None:
        if self._open is not None:
            with contextlib.suppress(Exception):  # the connection is gone
                self._open.close()
            self._open = None
