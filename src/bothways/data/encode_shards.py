"""The first stage of a corpus: documents are cut into shards, and each shard becomes sentences and ids, in any process.

Where shards begin depends on the documents alone, so the number of processes cannot change a byte. A shard's file is named
after a digest of all that it is made from; that the file exists is the mark that the work is done, and an interrupted build
goes on with what is missing.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bothways.core.errors import DataError
from bothways.data.documents import Document
from bothways.data.sentences import split_sentences
from bothways.text.tokenizer import Tokenizer

SHARD_CHARACTERS = 2**22
"""A shard is closed with the document that reaches this many characters."""

DIGEST_BYTES = 16

_ARRAYS = ("ids", "lengths", "counts", "sizes", "digests")


@dataclass(frozen=True)
class Recipe:
    """What decides the ids of a document.

    Attributes:
        tokenizer: the folder it lies in.
        fingerprint: of the tokenizer.
        language: of the sentence splitter.
    """

    tokenizer: str
    fingerprint: str
    language: str

    @property
    def key(self) -> bytes:
        """Equal for recipes that give equal ids."""
        return "\0".join([self.fingerprint, self.language, splitter_version()]).encode()


@dataclass(frozen=True)
class Job:
    """A shard to be made: the name of its file, and the texts of its documents."""

    name: str
    texts: list[str]


@dataclass(frozen=True)
class Shard:
    """D documents as S sentences and T tokens.

    Attributes:
        ids: `(T)`.
        lengths: `(S)` tokens of each sentence, none of them 0.
        counts: `(D)` sentences of each document.
        sizes: `(D)` tokens of each document.
        digests: `(D, 16)` of the sentences of each document.
    """

    ids: NDArray[Any]
    lengths: NDArray[np.uint32]
    counts: NDArray[np.uint32]
    sizes: NDArray[np.uint32]
    digests: NDArray[np.uint8]


def splitter_version() -> str:
    """The sentence splitter and its version."""
    return f"sentencex {importlib.metadata.version('sentencex')}"


def token_type(size: int) -> str:
    """The NumPy type in which ids of a vocabulary of this size are kept."""
    return "uint16" if size <= 2**16 else "uint32"


def cut(documents: Iterable[Document], recipe: Recipe) -> Iterator[Job]:
    """Documents → jobs of about four million characters each, in order."""
    texts: list[str] = []
    size = number = 0
    for document in documents:
        texts.append(document.text)
        size += len(document.text)
        if size >= SHARD_CHARACTERS:
            yield _job(number, texts, recipe)
            texts, size, number = [], 0, number + 1
    if texts:
        yield _job(number, texts, recipe)


def _job(number: int, texts: list[str], recipe: Recipe) -> Job:
    digest = hashlib.blake2b(recipe.key, digest_size=DIGEST_BYTES)
    for text in texts:
        raw = text.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return Job(f"{number:07d}-{digest.hexdigest()}.npz", texts)


def encode_shard(recipe: Recipe, job: Job) -> tuple[str, Shard]:
    """The work of one process on one job → the file's name and what belongs in it."""
    tokenizer = _tokenizer(recipe.tokenizer, recipe.fingerprint)
    documents = [split_sentences(_characters(text), recipe.language) for text in job.texts]
    ids, lengths = tokenizer.encode_flat(
        [sentence for sentences in documents for sentence in sentences]
    )
    owners = np.repeat(np.arange(len(documents)), [len(sentences) for sentences in documents])
    filled = lengths > 0  # of control characters alone, nothing is left
    digests = b"".join(_digest(sentences) for sentences in documents)
    return job.name, Shard(
        ids.astype(token_type(tokenizer.size)),
        lengths[filled].astype(np.uint32),
        np.bincount(owners[filled], minlength=len(documents)).astype(np.uint32),
        np.bincount(owners, weights=lengths, minlength=len(documents)).astype(np.uint32),
        np.frombuffer(digests, dtype=np.uint8).reshape(-1, DIGEST_BYTES),
    )


@functools.lru_cache(maxsize=1)
def _tokenizer(folder: str, fingerprint: str) -> Tokenizer:
    """The fingerprint is a key of the cache: another tokenizer may have been there before."""
    return Tokenizer.load(folder)


def _characters(text: str) -> str:
    """The text, with U+FFFD for halves of surrogate pairs, which JSON and Python source can hold and UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _digest(sentences: list[str]) -> bytes:
    return hashlib.blake2b("\n".join(sentences).encode("utf-8"), digest_size=DIGEST_BYTES).digest()


def store(path: Path, shard: Shard) -> None:
    """Writes a shard; under its name it is whole. Raises OSError if the disk is full or the folder may not be written."""
    partial = path.with_suffix(".partial")
    arrays = {name: getattr(shard, name) for name in _ARRAYS}
    try:
        with partial.open("wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def load_shard(path: Path) -> Shard:
    """Reads a shard, whose checksums are tested by the way. DataError if it is damaged; it is deleted, to be made again."""
    return Shard(**_read(path, _ARRAYS))


def load_index(path: Path) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    """Reads the sizes and digests of a shard alone; errors as `load`."""
    arrays = _read(path, ("sizes", "digests"))
    return arrays["sizes"], arrays["digests"]


def _read(path: Path, names: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names}
    except (zipfile.BadZipFile, EOFError, ValueError, KeyError) as error:
        path.unlink()
        fix = "Run the same again: this part is made anew, the others are kept."
        raise DataError(
            "was damaged on the disk since it was written", where=path, fix=fix
        ) from error
