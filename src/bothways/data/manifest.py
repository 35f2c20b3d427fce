"""What a corpus folder says about itself, and whether it is true."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bothways.core.errors import DataError
from bothways.data.documents import Origin

MANIFEST = "manifest.json"
FORMAT, VERSION = "bothways corpus", 1

SMALL = 2**24
"""Bytes of a file whose contents are checked whenever a corpus is opened."""

_AGAIN = "Build the corpus again, in a new folder."


@dataclass(frozen=True)
class Counts:
    """What a corpus holds, and what was left out of it: documents seen before, and documents with too few tokens."""

    documents: int
    sentences: int
    tokens: int
    duplicates: int
    short: int


@dataclass(frozen=True)
class Stored:
    """A file of the corpus: its size, and the sha256 of its bytes."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class CorpusSettings:
    """What decides the corpus besides its documents. `splitter`: of sentences, with version. `tokenizer`: its fingerprint."""

    tokenizer: str
    language: str
    min_tokens: int
    splitter: str


@dataclass(frozen=True)
class Manifest:
    """The contents of `manifest.json`.

    Attributes:
        counts: documents, sentences, tokens, and what was left out.
        token_type: NumPy type of the ids.
        settings: what the corpus was built with.
        origins: the files and data sets that the documents came from, if known.
        reading: how those were read.
        text: digest of all documents as they were read.
        files: the other files of the folder.
    """

    counts: Counts
    token_type: str
    settings: CorpusSettings
    origins: tuple[Origin, ...]
    reading: dict[str, str]
    text: str
    files: dict[str, Stored]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest, which makes the folder a corpus, whole or not at all. Raises OSError as the system does."""
    tree = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(manifest)}
    partial = folder / f"{MANIFEST}.partial"
    with partial.open("w", encoding="utf-8") as file:
        json.dump(tree, file, indent=2, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / MANIFEST)


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a corpus folder.

    Raises:
        DataError: no such folder, no corpus, one that was not finished, or one of another version.
    """
    from pydantic import TypeAdapter, ValidationError

    tree = _read_tree(folder)
    if tree.get("version") != VERSION:
        what = f"is a corpus of version {tree.get('version')}, and this program reads version {VERSION}"
        raise DataError(what, where=folder, fix=_AGAIN)
    try:
        return TypeAdapter(Manifest).validate_python(
            {k: v for k, v in tree.items() if k not in ("format", "version")}
        )
    except ValidationError as error:
        place = ".".join(map(str, error.errors()[0]["loc"]))
        raise DataError(f"is damaged at {place}", where=folder / MANIFEST, fix=_AGAIN) from error


def _read_tree(folder: Path) -> dict[str, Any]:
    fix = "A corpus is made by: bothways corpus build FILES --tokenizer FOLDER --out FOLDER."
    if not folder.is_dir():
        raise DataError("no such folder", where=folder, fix=fix)
    if not (folder / MANIFEST).is_file():
        raise DataError(
            f"is not a corpus, or one that was not finished: it has no {MANIFEST}",
            where=folder,
            fix=fix,
        )
    try:
        tree = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"is not JSON ({error})", where=folder / MANIFEST, fix=_AGAIN) from error
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        raise DataError("belongs to something else than a corpus", where=folder / MANIFEST, fix=fix)
    return tree


def describe_file(path: Path) -> Stored:
    """The size and digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return Stored(path.stat().st_size, digest.hexdigest())


def check_file(path: Path, stored: Stored, up_to: float = SMALL) -> None:
    """Compares a file with the manifest: its size, and if it is not larger than `up_to` bytes its contents.

    Raises:
        DataError: it is missing, cut short or changed.
    """
    if not path.is_file():
        raise DataError("is missing", where=path, fix=_AGAIN)
    if path.stat().st_size != stored.bytes:
        what = f"has {path.stat().st_size:,} bytes, and the manifest says {stored.bytes:,}"
        raise DataError(what, where=path, fix=_AGAIN)
    if stored.bytes <= up_to and describe_file(path) != stored:
        raise DataError("was changed since the corpus was built", where=path, fix=_AGAIN)
