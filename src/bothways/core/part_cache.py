"""Parts of large files at URLs, kept in a folder of bounded size that processes share.

    FOLDER/KEY/tokens.bin.000012    a part: complete, and as its digest says
           KEY/.writing-…           room for a part that is on its way
           .used                    bytes of all parts, and of those on their way
           .lock, .lock-NN          held for a moment; while a part is fetched

A part is fetched once, by the process that asks first. Where there is no more room, the
least recently used parts are evicted. A reader has opened its part or mapped it into memory, and
reads to the end what is deleted from the folder meanwhile.

The room for a part is in use as long as the lock of its name is held. The operating system frees
the lock of a process that ends, however it ends; the next one that needs room then takes it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
import queue
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from typing_extensions import Buffer

from bothways.core.errors import ConfigError, os_errors
from bothways.core.urls import Url, local_path, open_store, retry

FOLDER, GIGABYTES = "BOTHWAYS_CACHE", "BOTHWAYS_CACHE_GB"
"""The environment variables of the folder, and of the bytes in it."""
DEFAULT_GIGABYTES = 20
FETCHERS = 16
"""Threads that fetch parts ahead."""

_STRIPES = 64
_WAIT = 0.01
_TOUCHED = 10.0
"""Seconds in which a part that is read again is not marked again."""
_AHEAD = 60.0
"""Seconds by which the clock of a file server may be ahead."""
_WRITING = ".writing-"
CACHE_FIX = f"Free some space, or set {FOLDER} to another folder, or {GIGABYTES} lower."


@dataclass(frozen=True)
class Cache:
    """A folder for parts.

    Attributes:
        bytes: of all parts in it, at most.
    """

    folder: Path
    bytes: int

    @classmethod
    def from_environment(cls) -> Cache:
        """Return the cache that the environment variables name.

        Raises:
            ConfigError: the size is not a positive number.
        """
        value = os.environ.get(GIGABYTES, str(DEFAULT_GIGABYTES))
        try:
            size = float(value)
        except ValueError:
            size = math.nan
        if not 0 < size < math.inf:
            fix = f"Set it to a number of gigabytes, such as {DEFAULT_GIGABYTES}, or unset it."
            raise ConfigError(f"{value!r} is not a positive number", where=GIGABYTES, fix=fix)
        default_folder = (
            Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bothways"
        )
        return cls(local_path(os.environ.get(FOLDER) or default_folder), round(size * 1e9))

    def fetching(self, name: str) -> AbstractContextManager[object]:
        """Wait until no other thread or process fetches what has this name."""
        return self._locked(_stripe(name))

    def reserve(self, path: Path, size: int) -> Path:
        """Make room for a part that is being fetched, and return the file to write it to."""
        writing = path.with_name(f"{_WRITING}{path.name}")
        while not self._reserved(writing, size):
            time.sleep(_WAIT)  # the rest of the room is for parts that are on their way
        return writing

    def _reserved(self, writing: Path, size: int) -> bool:
        with self._locked(".lock"):
            used = self._used()
            if used + size > self.bytes or writing.exists():  # of a process that was killed
                used = self._evict(size, _stripe(_name(writing)))
            if used + size > self.bytes:
                return False
            with writing.open("wb") as file:
                file.truncate(size)
            self._note(used + size)
        return True

    def put(self, data: Buffer, writing: Path, path: Path) -> None:
        """Write a part to the file that was reserved for it, and give it its name."""
        with writing.open("r+b") as file:  # of the size that others count
            file.write(data)
        writing.replace(path)

    def remove(self, path: Path) -> None:
        """Delete a part, or the file of one that did not come; its room is free again."""
        with self._locked(".lock"), contextlib.suppress(OSError):
            used, size = self._used(), path.stat().st_size
            path.unlink()
            self._note(used - size)

    def _locked(self, name: str) -> AbstractContextManager[object]:
        return FileLock(self.folder / name, thread_local=False).acquire(poll_interval=_WAIT)

    def _note(self, used: int) -> None:
        (self.folder / ".used").write_text(str(used), encoding="ascii")

    def _used(self) -> int:
        try:
            return int((self.folder / ".used").read_text(encoding="ascii"))
        except (FileNotFoundError, ValueError):
            return sum(size for _, size, _ in self._parts())

    def _parts(self) -> list[tuple[float, int, Path]]:
        """Return the time of the last reading, the size and the place of each part."""
        entries, latest = [], time.time() + _AHEAD
        for path in self.folder.glob("*/*"):
            writing = path.name.startswith(_WRITING)
            if not (writing or path.suffix[1:].isdecimal()):
                continue
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                # Read before the clock was set back: how long ago is not known.
                read_time = status.st_mtime if status.st_mtime <= latest else 0.0
                entries.append((math.inf if writing else read_time, status.st_size, path))
        return entries

    def _drop_abandoned(self, locked_stripe: str) -> None:
        """Delete the files of parts on their way that nobody fetches any more.

        Args:
            locked_stripe: the lock that the caller holds; none of its parts is being written yet.
        """
        for path in self.folder.glob(f"*/{_WRITING}*"):
            stripe = _stripe(_name(path))
            lock = FileLock(self.folder / stripe, thread_local=False)
            with contextlib.suppress(Timeout, OSError):
                if stripe == locked_stripe:
                    path.unlink()
                else:
                    with lock.acquire(timeout=0):
                        path.unlink()

    def _evict(self, size: int, locked_stripe: str) -> int:
        """Delete the parts that were read the longest time ago; return the bytes that are left.

        A little more room is made than is asked for, since looking at all parts takes time.
        """
        self._drop_abandoned(locked_stripe)
        entries = sorted(self._parts())
        used = sum(entry_size for _, entry_size, _ in entries)
        goal = self.bytes - max(size, self.bytes // 20)
        for read_time, entry_size, path in entries:
            if used <= goal or read_time == math.inf:
                break
            with contextlib.suppress(OSError):  # on Windows, one that is open stays
                path.unlink()
                used -= entry_size
        return used


def _name(path: Path) -> str:
    """Return the name of a part in its cache, also from the file that it is written to."""
    return f"{path.parent.name}/{path.name.removeprefix(_WRITING)}"


def _stripe(name: str) -> str:
    """Return the file of the lock for what has this name."""
    return f".lock-{zlib.crc32(name.encode()) % _STRIPES:02d}"


@dataclass
class CachedFile:
    """A file at a URL, of which parts are kept in a cache.

    Attributes:
        url: of the file.
        cache: where parts are kept.
        key: the folder in the cache; another one for other contents.
        size: of the file in bytes.
        part: bytes of each part but the last.
        digests: the SHA-256 of each part.
    """

    url: Url
    cache: Cache
    key: str
    size: int
    part: int
    digests: tuple[str, ...]
    _touched: dict[int, float] = field(default_factory=dict, repr=False)

    @property
    def parts(self) -> int:
        """The number of parts."""
        return -(-self.size // self.part)

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes `[start, stop)`.

        Raises:
            ResourceError: a part cannot be fetched, or is not what the digest says.
        """
        pieces = []
        while start < stop:
            number, skipped = divmod(start, self.part)
            count = min(stop - start, self.part - skipped)
            try:
                with self._found(number).open("rb") as file:
                    file.seek(skipped)
                    piece = file.read(count)
            except FileNotFoundError:
                piece = self._fetch(number)[skipped : skipped + count]
            pieces.append(piece)
            start += count
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def array(self, number: int) -> NDArray[np.uint8]:
        """Return the bytes of a part, mapped into memory; errors as `read`."""
        try:
            mapped: NDArray[np.uint8] = np.memmap(self._found(number), np.uint8, "r")
        except FileNotFoundError:
            return np.frombuffer(self._fetch(number), np.uint8)
        return mapped

    def fetch(self, number: int) -> None:
        """Fetch a part if it is not there; errors as `read`."""
        if not self._place(number).exists():
            self._fetch(number)

    def _place(self, number: int) -> Path:
        return self.cache.folder / self.key / f"{self.url.name}.{number:06d}"

    def _found(self, number: int) -> Path:
        """Return the place of a part, and mark it as read now.

        When this process first reads it, it is compared with its digest: a power failure may have
        left anything in its place.

        Raises:
            FileNotFoundError: it is not there, or was not what it should be.
        """
        path, time_now = self._place(number), time.monotonic()
        if number not in self._touched and not self._is_right(number, path.read_bytes()):
            self.cache.remove(path)
            raise FileNotFoundError(path)
        if time_now - self._touched.get(number, -math.inf) > _TOUCHED:
            self._touched[number] = time_now
            os.utime(path, ns=(time.time_ns(),) * 2)  # the clock of the system is coarser
        return path

    def _is_right(self, number: int, data: bytes) -> bool:
        size = min(self.part, self.size - number * self.part)
        return len(data) == size and hashlib.sha256(data).hexdigest() == self.digests[number]

    def _fetch(self, number: int) -> bytes:
        """Return the bytes of a part, which is then in the cache."""
        path = self._place(number)
        with os_errors(self.cache.folder, CACHE_FIX):
            path.parent.mkdir(parents=True, exist_ok=True)
            with self.cache.fetching(_name(path)):
                with contextlib.suppress(FileNotFoundError):
                    return self._found(number).read_bytes()  # another process was first
                start = number * self.part
                stop = min(start + self.part, self.size)
                writing = self.cache.reserve(path, stop - start)
                try:
                    data = retry(lambda: self._get(number, start, stop), "reading", self.url)
                    self.cache.put(data, writing, path)
                except BaseException:
                    self.cache.remove(writing)
                    raise
        self._touched[number] = time.monotonic()
        return data

    def _get(self, number: int, start: int, stop: int) -> bytes:
        store, path = open_store(self.url)
        data: bytes = store.cat_file(path, start=start, end=stop)
        if not self._is_right(number, data):
            raise OSError(f"bytes {start:,} to {stop:,} are not those that the manifest describes")
        return data


class FetchAhead:
    """Threads that fetch what will be read soon.

    They end with the process. An error is left to the reader, who asks again.
    """

    def __init__(self) -> None:
        self._waiting: queue.Queue[Callable[[], object]] = queue.Queue()
        self._threads: list[threading.Thread] = []

    @property
    def idle(self) -> bool:
        """True if all jobs are done."""
        return self._waiting.unfinished_tasks == 0

    def submit(self, jobs: Iterable[Callable[[], object]]) -> None:
        """Do these jobs, after those that were asked for before."""
        for job in jobs:
            self._waiting.put(job)
        while len(self._threads) < FETCHERS:
            thread = threading.Thread(target=self._work, name="fetch-ahead", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        while True:
            job = self._waiting.get()
            with contextlib.suppress(Exception):
                job()
            self._waiting.task_done()


@functools.cache
def fetch_ahead() -> FetchAhead:
    """Return the threads of this process."""
    return FetchAhead()
