"""What a result came of, so that it is found again where it is of the same, and only there.

Data and models count by their sha256. The places where they lie do not, nor how these are spelled.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bothways.core.atomic_files import file_digest
from bothways.hub.hf_config import RECORD
from bothways.hub.resolve import MODEL_FILES, PICKLE_FILES, SENTENCE_FILES, resolve, resolve_run

PLACES = ("model", "train", "dev")
"""The settings of a run that are places."""
READ = tuple(
    name for name in (*MODEL_FILES, *PICKLE_FILES) if name not in (*SENTENCE_FILES, RECORD)
)
"""What of a model folder decides what is trained from it: configuration, tokenizer, weights."""


def without_places(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run, in plain values, that are to be equal for equal results."""
    plain = json.loads(json.dumps(settings))
    return {name: value for name, value in plain.items() if name not in PLACES}


def digest_of_model(name: str) -> str:
    """The sha256 of a model: of its configuration, its tokenizer and its weights, file by file.

    Args:
        name: a model folder, the folder of a run, or a Hub id.

    Raises:
        FolderError: it is neither a folder nor an id, or cannot be fetched.
    """
    folder = resolve(resolve_run(name))
    files = sorted(
        file for file in folder.iterdir() if any(fnmatch.fnmatch(file.name, read) for read in READ)
    )
    return hashlib.sha256(
        "".join(f"{file.name} {digest_of_file(file)}\n" for file in files).encode()
    ).hexdigest()


def digest_of_file(file: Path) -> str:
    """The sha256 of a file, computed once for as long as it is not written anew."""
    return _digest(file, stamp(file))


@functools.lru_cache
def _digest(file: Path, written: tuple[int, int] | None) -> str:
    return file_digest(file)


def stamp(file: Path) -> tuple[int, int] | None:
    """Size and time by which a file that was written anew is told; none for what is no file, such as a data set of the Hub."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
