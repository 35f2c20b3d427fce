"""The arrays of a corpus at a URL, fetched in parts when they are read.

A part is checked by its digest in the manifest. `core/part_cache.py` keeps parts on the disk.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from bothways.core.errors import ConfigError, DataError, os_errors
from bothways.core.part_cache import CACHE_FIX, FETCHERS, GIGABYTES, Cache, CachedFile, fetch_ahead
from bothways.core.urls import Url, read_url, status_of
from bothways.data.manifest import MANIFEST, REBUILD, Manifest, check_file, read_manifest


class RemoteArray:
    """`(N)` numbers of a file at a URL, read by index, slice or an array of indexes."""

    def __init__(self, file: CachedFile, dtype: str | np.dtype[Any]) -> None:
        self.file = file
        self.dtype = np.dtype(dtype)

    def __len__(self) -> int:
        return self.file.size // self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.file.size

    def view(self, dtype: type[Any]) -> RemoteArray:
        """Return the same bytes as numbers of another type of the same size."""
        return RemoteArray(self.file, np.dtype(dtype))

    def __getitem__(self, key: Any) -> Any:
        """Return a number, or an array that holds a copy.

        Raises:
            IndexError: an index is outside of the array.
            ResourceError: a part cannot be fetched.
        """
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step != 1:
                raise IndexError("a slice of a remote array has no step")
            size = self.dtype.itemsize
            raw = self.file.read(start * size, max(start, stop) * size)
            return np.frombuffer(raw, self.dtype)
        if isinstance(key, int | np.integer):
            return self._gather(np.array([key]))[0]
        indices = np.asarray(key)
        return self._gather(indices.ravel().astype(np.int64)).reshape(indices.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype=dtype)

    def _gather(self, indices: NDArray[np.int64]) -> NDArray[Any]:
        indices = np.where(indices < 0, indices + len(self), indices)
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"an index is outside of {len(self):,} numbers")
        items = self.file.part // self.dtype.itemsize
        numbers = indices // items
        order = np.argsort(numbers, kind="stable")
        ends = np.flatnonzero(np.diff(numbers[order])) + 1
        result = np.empty(len(indices), self.dtype)
        for rows in np.split(order, ends) if len(order) else ():
            number = int(numbers[rows[0]])
            values = self.file.array(number).view(self.dtype)
            result[rows] = values[indices[rows] - number * items]
        return result

    def fetch_all(self, start: int, stop: int) -> None:
        """Fetch the parts of a slice."""
        items = self.file.part // self.dtype.itemsize
        for number in range(start // items, -(-min(stop, len(self)) // items)):
            self.file.fetch(number)

    def fetch_ahead(self, firsts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
        """Fetch the parts where slices begin and end in the background, in this order."""
        numbers = self._numbers(firsts, stops)
        fetch_ahead().submit(functools.partial(self.file.fetch, number) for number in numbers)

    def _numbers(self, firsts: NDArray[np.int64], stops: NDArray[np.int64]) -> list[int]:
        """Return the parts of slices, in order of their first use; none of a long one's middle."""
        items = self.file.part // self.dtype.itemsize
        ends = np.maximum(np.minimum(stops, len(self)) - 1, firsts)
        numbers = np.stack([firsts, ends], axis=1).ravel() // items
        _, at = np.unique(numbers, return_index=True)
        return list(numbers[np.sort(at)].tolist())


Column: TypeAlias = NDArray[Any] | RemoteArray
"""An array of a corpus: in memory, mapped into it, or at a URL."""


@runtime_checkable
class Arrays(Protocol):
    """Corpus of T tokens in S sentences in D documents. Documents may be empty, sentences not."""

    @property
    def tokens(self) -> Column:
        """`(T)`: ids, one document after the other."""
        ...

    @property
    def sentences(self) -> Column:
        """`(S+1)`, 8-byte integers: sentence s is tokens `[sentences[s], sentences[s+1])`."""
        ...

    @property
    def documents(self) -> Column:
        """`(D+1)`, 8-byte integers: document d is sentences `[documents[d], documents[d+1])`."""
        ...

    @property
    def words(self) -> Column | None:
        """`(⌈T/8⌉)`: a bit per token, True where a word begins; None where the ids say it."""
        ...


def fetch_tokens_ahead(corpus: Arrays, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
    """Fetch slices of the tokens of a corpus in the background, if it is at a URL."""
    if isinstance(corpus.tokens, RemoteArray):
        corpus.tokens.fetch_ahead(starts, stops)
    if isinstance(corpus.words, RemoteArray):
        corpus.words.fetch_ahead(starts // 8, -(-stops // 8))


def fetch_documents_ahead(corpus: Arrays, begin: int, stop: int) -> None:
    """Fetch neighbouring documents in the background, if they are at a URL."""
    if isinstance(corpus.documents, RemoteArray):
        fetch_ahead().submit([functools.partial(_fetch_documents, corpus, begin, stop)])


def _fetch_documents(corpus: Arrays, begin: int, stop: int) -> None:
    sentences, tokens, words = corpus.sentences, corpus.tokens, corpus.words
    assert isinstance(sentences, RemoteArray)
    assert isinstance(tokens, RemoteArray)
    start, end = int(corpus.documents[begin]), int(corpus.documents[stop])
    sentences.fetch_all(start, end + 1)
    start, end = int(sentences[start]), int(sentences[end])
    tokens.fetch_all(start, end)
    if isinstance(words, RemoteArray):
        words.fetch_all(start // 8, -(-end // 8))


def fetch_small_files(url: Url, cache: Cache) -> tuple[Path, Manifest]:
    """Copy the manifest and the tokenizer of a corpus into the cache.

    Returns:
        Their folder, whose name is a digest of the manifest.

    Raises:
        DataError: there is no corpus, or a file differs from the manifest.
        ResourceError: a file cannot be read.
    """
    manifest_url = url / MANIFEST
    if status_of(manifest_url) is None:
        message = f"is not a corpus, or is unfinished: it has no {MANIFEST}"
        fix = "Copy the folder of a corpus there: the manifest last."
        raise DataError(message, where=url, fix=fix)
    text = read_url(manifest_url)
    folder = cache.folder / hashlib.sha256(text).hexdigest()[:16]
    with os_errors(cache.folder, CACHE_FIX), _at(url, folder):
        folder.mkdir(parents=True, exist_ok=True)
        with cache.fetching(folder.name):
            if not (folder / MANIFEST).exists():
                _write(folder / MANIFEST, text)
            manifest = read_manifest(folder)
            for name, stored in manifest.files.items():
                if not name.endswith(".bin"):
                    try:
                        check_file(folder / name, stored)
                    except DataError:  # it is not there, or not as the manifest says
                        _write(folder / name, read_url(url / name))
                        check_file(folder / name, stored)
    return folder, manifest


def _write(path: Path, data: bytes) -> None:
    hidden = path.with_name(f".new-{path.name}")
    hidden.write_bytes(data)
    hidden.replace(path)


@contextlib.contextmanager
def _at(url: Url, folder: Path) -> Iterator[None]:
    """Name the URL in place of the folder in errors."""
    try:
        yield
    except DataError as error:
        location = str(error.where).replace(str(folder), str(url))
        raise DataError(error.what, where=location, fix=error.fix) from error


def open_file(url: Url, name: str, manifest: Manifest, key: str, cache: Cache) -> CachedFile:
    """Return a large file of a corpus.

    Raises:
        ConfigError: the cache is too small.
        DataError: the file is missing, or has another size.
    """
    least = 2 * FETCHERS * manifest.part
    if cache.bytes < least:
        message = f"must be at least {least / 1e9:.3g} GB, not {cache.bytes / 1e9:.3g}"
        raise ConfigError(message, where=GIGABYTES)
    stored, file = manifest.files[name], status_of(url / name)
    if file is None:
        raise DataError("is missing", where=url / name, fix="Copy the whole folder there.")
    if file.size is not None and file.size != stored.bytes:
        message = f"has {file.size:,} bytes; the manifest says {stored.bytes:,}"
        raise DataError(message, where=url / name, fix="Copy the folder there again.")
    digests = stored.parts or (stored.sha256,)
    part_bytes = manifest.part
    if part_bytes <= 0 or part_bytes % 8 or len(digests) != max(1, -(-stored.bytes // part_bytes)):
        message = f"is damaged: {name} has {len(digests)} digests of parts of {part_bytes:,} bytes"
        raise DataError(message, where=url / MANIFEST, fix=REBUILD)
    return CachedFile(url / name, cache, key, stored.bytes, manifest.part, digests)


def check_remote(file: CachedFile, sha256: str) -> None:
    """Compare every byte of a file with its digest. Raises DataError or ResourceError."""
    digest = hashlib.sha256()
    for number in range(file.parts):
        start = number * file.part
        digest.update(file.read(start, min(start + file.part, file.size)))
    if digest.hexdigest() != sha256:
        raise DataError("has changed since the corpus was built", where=file.url, fix=REBUILD)
