"""The first stage of a corpus: documents → shards of sentences and ids, in any process.

Where shards begin depends only on the documents, so the number of processes cannot change a byte. A
shard's file is named after a digest of everything that it is made from. The existence of the file
marks the work as done, so an interrupted build continues with the missing shards.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import zipfile
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bothways.core.atomic_files import replace_file
from bothways.core.errors import DataError
from bothways.core.terminal import without_surrogates
from bothways.data.documents import Document
from bothways.data.sentences import split_sentences
from bothways.data.words import Words, encode_words, words_name
from bothways.text.tokenizer import Tokenizer

SHARD_CHARACTERS = 2**22
"""A shard ends with the document that reaches this many characters."""

DIGEST_BYTES = 16
_ARRAYS = ("ids", "lengths", "counts", "sizes", "digests")


@dataclass(frozen=True)
class Recipe:
    """The settings that decide the ids of a document.

    Attributes:
        tokenizer: it goes to the workers with the recipe, so they need no folder.
        language: the language of the sentence splitter.
        words: how sentences are divided into words; None if no words are stored.
    """

    tokenizer: Tokenizer
    language: str
    words: Words | None = None

    @property
    def key(self) -> bytes:
        """Bytes that are equal for recipes that give equal ids."""
        words = [] if self.words is None else [words_name(self.words)]
        parts = [self.tokenizer.fingerprint, self.language, splitter_version(), *words]
        return "\0".join(parts).encode()


@dataclass(frozen=True)
class Job:
    """A shard to make: the name of its file, and the texts of its documents."""

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
        digests: `(D, 16)` digests of the sentences of each document.
        begins: `(T)`, True where a word begins; None if no words are stored.
    """

    ids: NDArray[Any]
    lengths: NDArray[np.uint32]
    counts: NDArray[np.uint32]
    sizes: NDArray[np.uint32]
    digests: NDArray[np.uint8]
    begins: NDArray[np.bool_] | None = None


def splitter_version() -> str:
    """Return the name and version of the sentence splitter."""
    return f"sentencex {importlib.metadata.version('sentencex')}"


def token_type(size: int) -> Literal["uint16", "uint32"]:
    """Return the NumPy type in which the ids of a vocabulary of this size are stored."""
    return "uint16" if size <= 2**16 else "uint32"


def cut_shards(documents: Iterable[Document], recipe: Recipe) -> Iterator[Job]:
    """Group documents into jobs of about four million characters each, in order."""
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
    """Split and encode the documents of a job; return the name of its file and its contents.

    Example: the texts ["A b. C.", "D."] → sentences A b. | C. | D.; lengths [3, 2, 2]; counts
    [2, 1]; sizes [5, 2].
    """
    tokenizer = recipe.tokenizer
    documents = [split_sentences(without_surrogates(text), recipe.language) for text in job.texts]
    flat = [sentence for sentences in documents for sentence in sentences]
    begins = None
    if recipe.words is None:
        ids, lengths = tokenizer.encode_flat(flat)
    else:
        flat, ids, lengths, begins = encode_words(tokenizer, flat, recipe.words)
    sizes = [len(sentences) for sentences in documents]
    owners = np.repeat(np.arange(len(documents)), sizes)
    filled = lengths > 0  # a sentence of control characters has no tokens
    texts = iter(flat)
    digests = b"".join(_digest(list(itertools.islice(texts, size))) for size in sizes)
    return job.name, Shard(
        ids.astype(token_type(tokenizer.size)),
        lengths[filled].astype(np.uint32),
        np.bincount(owners[filled], minlength=len(documents)).astype(np.uint32),
        np.bincount(owners, weights=lengths, minlength=len(documents)).astype(np.uint32),
        np.frombuffer(digests, dtype=np.uint8).reshape(-1, DIGEST_BYTES),
        begins,
    )


def _digest(sentences: list[str]) -> bytes:
    return hashlib.blake2b("\n".join(sentences).encode("utf-8"), digest_size=DIGEST_BYTES).digest()


def store_shard(path: Path, shard: Shard) -> None:
    """Write a shard. Raises ResourceError if the disk is full or the folder cannot be written."""
    arrays = {name: getattr(shard, name) for name in _ARRAYS}
    if shard.begins is not None:
        arrays["begins"] = shard.begins
    replace_file(path, lambda place: np.savez(place, **arrays))


def load_shard(path: Path) -> Shard:
    """Read a shard. Raises DataError if it is damaged, and deletes it, to be made again."""
    return Shard(**_read(path, (*_ARRAYS, "begins"), {"begins"}))


def load_index(path: Path) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    """Read only the sizes and digests of a shard; errors as `load_shard`."""
    arrays = _read(path, ("sizes", "digests"))
    return arrays["sizes"], arrays["digests"]


def _read(
    path: Path, names: tuple[str, ...], absent: Collection[str] = ()
) -> dict[str, NDArray[Any]]:
    """Read arrays by name; those of `absent` may be missing."""
    try:
        # The zip format's checksums are verified while reading.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names if name in arrays or name not in absent}
    except (zipfile.BadZipFile, EOFError, ValueError, KeyError) as error:
        path.unlink()
        fix = "Run the same command again: only this part is made again."
        raise DataError("was damaged on disk after it was written", where=path, fix=fix) from error
