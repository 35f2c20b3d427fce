"""The first stage of a corpus: documents → shards of sentences and ids, in any process.

Where shards begin depends only on the documents, so the number of processes cannot change a byte. A
shard's file is named after a digest of everything that it is made from. The existence of the file
marks the work as done, so an interrupted build continues with the missing shards.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import itertools
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bothways.core.config.reader import fingerprint
from bothways.core.errors import DataError
from bothways.core.files import replace_file, without_surrogates
from bothways.data.cleaning.config import clean_texts
from bothways.data.cleaning.near_duplicates import SignedTexts
from bothways.data.documents import Document
from bothways.data.manifest import CorpusSettings
from bothways.data.sentences import AUTO, detect_language, split_sentences
from bothways.data.words import Words, encode_words
from bothways.text.tokenizer import Tokenizer

SHARD_CHARACTERS = 2**22
"""A shard ends with the document that reaches this many characters."""

DIGEST_BYTES = 16
_LAYOUT = "3"  # of the files: those of another layout are made again
_ARRAYS = ("ids", "lengths", "counts", "sizes", "digests", "bytes", "words", "fates", "removed")


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
        bytes: `(D)` bytes of each document in UTF-8, without lines that were removed.
        words: `(D)` words of each document, separated by white space, without these lines.
        fates: `(D)` 0, or 1 + the place of the rule that rejects the document.
        removed: `(L, 2)` lines and bytes that each rule for lines removed.
        signed: what near-duplicates are found by; None if they are not searched for.
        begins: `(T)`, True where a word begins; None if no words are stored.
    """

    ids: NDArray[Any]
    lengths: NDArray[np.uint32]
    counts: NDArray[np.uint32]
    sizes: NDArray[np.uint32]
    digests: NDArray[np.uint8]
    bytes: NDArray[np.uint64]
    words: NDArray[np.uint64]
    fates: NDArray[np.uint8]
    removed: NDArray[np.int64]
    signed: SignedTexts | None = None
    begins: NDArray[np.bool_] | None = None


def splitter_version() -> str:
    """Return the name and version of the sentence splitter."""
    return f"sentencex {importlib.metadata.version('sentencex')}"


def token_type(size: int) -> Literal["uint16", "uint32"]:
    """Return the NumPy type in which the ids of a vocabulary of this size are stored."""
    return "uint16" if size <= 2**16 else "uint32"


def cut_shards(documents: Iterable[Document], settings: CorpusSettings) -> Iterator[Job]:
    """Group documents into jobs of about four million characters each, in order."""
    words = [] if settings.words is None else [settings.words]
    # Fewer tokens than a number are counted when the shards are joined.
    steps = fingerprint(dataclasses.replace(settings.cleaning, min_tokens=1))
    fields = [_LAYOUT, settings.tokenizer, settings.language, settings.splitter, *words, steps]
    key = "\0".join(fields).encode()
    texts: list[str] = []
    size = number = 0
    for document in documents:
        texts.append(document.text)
        size += len(document.text)
        if size >= SHARD_CHARACTERS:
            yield _job(number, texts, key)
            texts, size, number = [], 0, number + 1
    if texts:
        yield _job(number, texts, key)


def _job(number: int, texts: list[str], key: bytes) -> Job:
    """Return the job of some texts; `key` is equal for settings that give equal ids."""
    digest = hashlib.blake2b(key, digest_size=DIGEST_BYTES)
    for text in texts:
        raw = text.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return Job(f"{number:07d}-{digest.hexdigest()}.npz", texts)


def encode_shard(
    tokenizer: Tokenizer, words: Words | None, settings: CorpusSettings, job: Job
) -> tuple[str, Shard]:
    """Split and encode the documents of a job; return the name of its file and its contents.

    Example: the texts ["A b. C.", "D."] → sentences A b. | C. | D.; lengths [3, 2, 2]; counts
    [2, 1]; sizes [5, 2].
    """
    texts = [without_surrogates(text) for text in job.texts]
    languages = [settings.language] * len(texts)
    if settings.language == AUTO:
        languages = [detect_language(text) for text in texts]
    splits = dict[tuple[str, str], list[str]]()  # a rule may have counted the sentences

    def split(text: str, language: str) -> list[str]:
        """Return the sentences of a text, split once."""
        if (text, language) not in splits:
            splits[text, language] = split_sentences(text, language)
        return splits[text, language]

    cleaned = clean_texts(texts, languages, settings.cleaning, split)
    # Documents that a rule rejects have no sentences.
    documents = [
        [] if fate else split(text, language)
        for text, language, fate in zip(cleaned.texts, languages, cleaned.fates, strict=True)
    ]
    flat = [*itertools.chain.from_iterable(documents)]
    begins = None
    if words is None:
        ids, lengths = tokenizer.encode_flat(flat)
    else:
        flat, ids, lengths, begins = encode_words(tokenizer, flat, words)
    sizes = [*map(len, documents)]
    owners = np.repeat(np.arange(len(documents)), sizes)
    filled = lengths > 0  # a sentence of control characters has no tokens
    sentences = iter(flat)
    documents_text = ("\n".join(itertools.islice(sentences, size)).encode() for size in sizes)
    digests = b"".join(
        hashlib.blake2b(text, digest_size=DIGEST_BYTES).digest() for text in documents_text
    )
    return job.name, Shard(
        ids.astype(token_type(tokenizer.size)),
        lengths[filled].astype(np.uint32),
        np.bincount(owners[filled], minlength=len(documents)).astype(np.uint32),
        np.bincount(owners, weights=lengths, minlength=len(documents)).astype(np.uint32),
        np.frombuffer(digests, dtype=np.uint8).reshape(-1, DIGEST_BYTES),
        np.array([len(text.encode()) for text in cleaned.texts], dtype=np.uint64),
        np.array([len(text.split()) for text in cleaned.texts], dtype=np.uint64),
        cleaned.fates,
        cleaned.removed,
        cleaned.signed,
        begins,
    )


def store_shard(path: Path, shard: Shard) -> None:
    """Write a shard. Raises ResourceError if the disk is full or the folder cannot be written."""
    arrays = {name: getattr(shard, name) for name in _ARRAYS}
    if shard.signed:
        arrays["signatures"] = shard.signed.signatures
        arrays["shingles"] = shard.signed.shingles
        arrays["shingle_counts"] = shard.signed.counts
    if shard.begins is not None:
        arrays["begins"] = shard.begins
    replace_file(path, lambda file: np.savez(file, **arrays))


def load_shard(path: Path) -> Shard:
    """Read a shard without what near-duplicates are found by.

    Raises:
        DataError: it is damaged; it is deleted, to be made again.
    """
    return Shard(**_read(path, (*_ARRAYS, "begins")))


def load_index(path: Path) -> tuple[NDArray[np.uint32], NDArray[np.uint8], NDArray[np.uint8]]:
    """Read only the sizes, digests and fates of a shard; errors as `load_shard`."""
    arrays = _read(path, ("sizes", "digests", "fates"))
    return arrays["sizes"], arrays["digests"], arrays["fates"]


def load_signed(path: Path) -> SignedTexts:
    """Read only what near-duplicates are found by; errors as `load_shard`."""
    arrays = _read(path, ("signatures", "shingles", "shingle_counts"))
    edges = np.concatenate([[0], np.cumsum(arrays["shingle_counts"])])
    return SignedTexts(arrays["shingles"], edges, arrays["signatures"])


def _read(path: Path, names: tuple[str, ...]) -> dict[str, Any]:
    """Read arrays by name; without words, `begins` is missing."""
    try:
        # The zip format's checksums are verified while reading.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names if name != "begins" or name in arrays}
    except (zipfile.BadZipFile, EOFError, ValueError, KeyError) as error:
        path.unlink()
        fix = "Run the same command again: only this part is made again."
        raise DataError("was damaged on disk after it was written", where=path, fix=fix) from error
