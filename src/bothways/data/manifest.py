"""The manifest of a corpus folder, and the checks of the folder against it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bothways.core.errors import DataError, call
from bothways.core.files import file_digest, local_path, near_path, read_object, replace_text
from bothways.data.cleaning.config import Cleaning
from bothways.data.documents import Origin

MANIFEST = "manifest.json"
TOKENS, SENTENCES, DOCUMENTS = "tokens.bin", "sentences.bin", "documents.bin"
WORDS = "words.bin"
FORMAT, VERSION = "bothways corpus", 2

SMALL = 2**24
"""Size in bytes up to which the contents of a file are checked when a corpus is opened."""
REBUILD = "Build the corpus again, in a new folder."


@dataclass(frozen=True)
class Counts:
    """Sizes of a corpus.

    Attributes:
        words: those that white space separates; None of a corpus from before they were counted.
    """

    documents: int
    sentences: int
    tokens: int
    words: int | None = None


@dataclass(frozen=True)
class StepCounts:
    """What a step left out: documents, or lines of any documents, and their bytes.

    Attributes:
        name: a field of `Cleaning`, or "duplicates".
        documents: whole documents.
        bytes: of their text in UTF-8, without lines that an earlier step removed.
        lines: of a rule for lines.
    """

    name: str
    documents: int
    bytes: int
    lines: int = 0


@dataclass(frozen=True)
class TextRead:
    """The documents of the inputs, and the bytes of their text in UTF-8."""

    documents: int
    bytes: int


@dataclass(frozen=True)
class Stored:
    """A file of the corpus: its size, and the SHA-256 of its bytes."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class CorpusSettings:
    """The settings that decide the corpus, together with its documents.

    Attributes:
        tokenizer: its fingerprint.
        language: the language of the sentence splitter, or "auto".
        splitter: the sentence splitter and its version.
        words: what divided sentences into words, and its version; None if no words are stored.
    """

    tokenizer: str
    language: str
    splitter: str
    words: str | None = None
    cleaning: Cleaning = Cleaning()


@dataclass(frozen=True)
class Manifest:
    """The contents of `manifest.json`.

    Attributes:
        token_type: the NumPy type of the ids.
        origins: the files and data sets that the documents came from, if known.
        reading: the settings with which those were read.
        text: a digest of all documents as they were read.
        steps: counts of dropped documents and lines, by step.
    """

    counts: Counts
    token_type: Literal["uint16", "uint32"]
    settings: CorpusSettings
    origins: tuple[Origin, ...]
    reading: dict[str, str]
    text: str
    read: TextRead
    steps: tuple[StepCounts, ...]
    files: dict[str, Stored]

    def left_out(self, step: str) -> int:
        """Return the number of documents that a step left out, 0 if it was not taken."""
        return sum(counts.documents for counts in self.steps if counts.name == step)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, which makes the folder a corpus. Raises ResourceError."""
    tree = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(manifest)}
    settings = tree["settings"]
    if manifest.settings.words is None:
        del settings["words"]
    settings["cleaning"] = {name: step for name, step in settings["cleaning"].items() if step}
    replace_text(folder / MANIFEST, json.dumps(tree, indent=2, ensure_ascii=False))


def holds_corpus(name: str | Path) -> bool:
    """Return True if a folder is that of a corpus: it has a manifest."""
    return (local_path(name) / MANIFEST).is_file()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a corpus folder.

    Raises:
        DataError: no such folder, no corpus, an unfinished one, one of another version, or a
            damaged manifest.
    """
    from pydantic import TypeAdapter, ValidationError

    file = folder / MANIFEST
    fix = f"Build a corpus: {call('corpus build', 'FILES', tokenizer='FOLDER', out='FOLDER')}"
    if not folder.is_dir():
        message = "is a file, not the folder of a corpus" if folder.exists() else "no such folder"
        near = near_path(folder, holds_corpus)
        fix = f"Did you mean {near}?" if near else fix
        raise DataError(message, where=folder, fix=fix)
    if not file.is_file():
        message = f"is not a corpus, or is unfinished: it has no {MANIFEST}"
        raise DataError(message, where=folder, fix=fix)
    tree = read_object(file, fix=REBUILD)
    if tree.pop("format", None) != FORMAT:
        raise DataError("is not the manifest of a corpus", where=file, fix=fix)
    version = tree.pop("version", None)
    if version != VERSION:
        message = f"is a corpus of version {version}; this program reads version {VERSION}"
        raise DataError(message, where=folder, fix=REBUILD)
    try:
        manifest = TypeAdapter(Manifest).validate_python(tree)
    except ValidationError as error:
        field_name = ".".join(map(str, error.errors()[0]["loc"]))
        raise DataError(f"is damaged at {field_name}", where=file, fix=REBUILD) from error
    for name in {TOKENS, SENTENCES, DOCUMENTS, *manifest.files}:
        if name not in manifest.files or Path(name).name != name:
            raise DataError(f"is damaged at files.{name}", where=file, fix=REBUILD)
    return manifest


def map_array(path: Path, dtype: str) -> NDArray[Any]:
    """Map an array, which may be empty. Raises DataError if the file ends inside an item."""
    size = path.stat().st_size
    if size % np.dtype(dtype).itemsize:
        raise DataError(f"is not an array of {dtype}", where=path, fix=REBUILD)
    return np.memmap(path, dtype=dtype, mode="r") if size else np.zeros(0, dtype=dtype)


def describe_file(path: Path) -> Stored:
    """Return the size and digest of a file."""
    return Stored(path.stat().st_size, file_digest(path))


def check_file(path: Path, stored: Stored, up_to: int | float) -> None:
    """Compare a file with the manifest: its size, and up to `up_to` bytes its contents.

    Raises:
        DataError: it is missing, cut short or changed.
    """
    if not path.is_file():
        raise DataError("is missing", where=path, fix=REBUILD)
    if path.stat().st_size != stored.bytes:
        message = f"has {path.stat().st_size:,} bytes; the manifest says {stored.bytes:,}"
        raise DataError(message, where=path, fix=REBUILD)
    if stored.bytes <= up_to and file_digest(path) != stored.sha256:
        raise DataError("has changed since the corpus was built", where=path, fix=REBUILD)
