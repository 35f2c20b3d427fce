"""A store for fsspec, in memory, that fails one request in five: `flaky://bucket/name`."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem


class FlakyFile(AbstractBufferedFile):
    """A file whose ranges are requests."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.fs.cat_file(self.path, start=start, end=end)


class FlakyStore(AbstractFileSystem):
    """Files by path; each has a version, and a request may fail.

    Attributes:
        read: the bytes that requests have returned.
        every: which requests fail; 0 for none.
    """

    protocol = "flaky"
    cachable = False
    root_marker = ""
    files: ClassVar[dict[str, bytes]] = {}
    every: ClassVar[int] = 5
    read: ClassVar[int] = 0
    count: ClassVar[Any] = itertools.count(1)

    @classmethod
    def clear(cls) -> None:
        """Forget the files; every fifth request fails from now on."""
        cls.files, cls.every, cls.read, cls.count = {}, 5, 0, itertools.count(1)

    def _request(self) -> None:
        if self.every and next(FlakyStore.count) % self.every == 0:
            raise ConnectionError("the connection was reset")

    def _entry(self, path: str) -> dict[str, Any]:
        data = self.files[path]
        return {"name": path, "size": len(data), "type": "file", "ETag": f'"{hash(data):x}"'}

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        self._request()
        path = self._strip_protocol(path)
        if path in self.files:
            return self._entry(path)
        if any(name.startswith(f"{path.rstrip('/')}/") for name in self.files):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        self._request()
        path = self._strip_protocol(path).rstrip("/")
        below: dict[str, dict[str, Any]] = {}
        for name in self.files:
            if name.startswith(f"{path}/") or not path:
                rest = name[len(path) :].lstrip("/")
                first, *more = rest.split("/")
                child = f"{path}/{first}".lstrip("/")
                below[child] = (
                    {"name": child, "size": 0, "type": "directory"} if more else self._entry(name)
                )
        if not below:
            raise FileNotFoundError(path)
        return [*below.values()] if detail else [*below]

    def cat_file(
        self, path: str, *, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        self._request()
        path = self._strip_protocol(path)
        if path not in self.files:
            raise FileNotFoundError(path)
        data = self.files[path][start:end]
        FlakyStore.read += len(data)
        return data

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **more: Any) -> FlakyFile:
        return FlakyFile(self, path, mode, block_size or "default", cache_type="none")


fsspec.register_implementation("flaky", FlakyStore, clobber=True)
