"""The origin of a result, to recognise results of equal settings, data and models.

Data and models are identified by their SHA-256; their paths do not matter.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bothways.core.files import file_digest
from bothways.hub.adapter import read_adapter
from bothways.hub.hf_config import RECORD
from bothways.hub.resolve import MODEL_FILES, PICKLE_FILES, SENTENCE_FILES, resolve, resolve_run

PATHS = ("model", "train", "dev")
"""The settings of a run that are paths."""
_DECISIVE = tuple(
    name for name in (*MODEL_FILES, *PICKLE_FILES) if name not in (*SENTENCE_FILES, RECORD)
)
"""The files of a model that training depends on: configuration, tokenizer, weights."""


def without_places(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run as plain values, without paths."""
    plain = json.loads(json.dumps(settings))
    return {name: value for name, value in plain.items() if name not in PATHS}


def digest_of_model(name: str, *, whole: bool = False) -> str:
    """Return the SHA-256 of a model's configuration, tokenizer and weights.

    Args:
        name: a model folder, the folder of a run, or an id on the Hub.
        whole: whether everything counts that predictions depend on: also the record of the task
            and the files of sentence-transformers, but PyTorch's files only where there is no
            safetensors file.
    """
    folder, patterns = resolve(resolve_run(name)), _DECISIVE
    if whole:
        # Where both exist, only safetensors are read: a pickle next to them changes nothing.
        pickles = () if any(folder.glob("*model*.safetensors")) else PICKLE_FILES
        patterns = (*MODEL_FILES, *pickles)
    # The SHA-256 of names and contents of files, and of those in folders, that match.
    matching = [
        path
        for path in folder.iterdir()
        if any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns)
    ]
    inner = [file for path in matching if path.is_dir() for file in path.rglob("*")]
    files = sorted(file for file in (*matching, *inner) if file.is_file())
    names = ((file.relative_to(folder).as_posix(), file) for file in files)
    lines = "".join(f"{name} {digest_of_file(file)}\n" for name, file in names)
    digest, adapter = hashlib.sha256(lines.encode()).hexdigest(), read_adapter(folder)
    if adapter is None:
        return digest
    digest += digest_of_model(str(adapter.base), whole=whole)
    return hashlib.sha256(digest.encode()).hexdigest()


def digest_of_file(file: Path) -> str:
    """Return the SHA-256 of a file, computed once until the file changes."""
    return _digest(file, stamp(file))


@functools.lru_cache
def _digest(file: Path, written: tuple[int, int] | None) -> str:
    return file_digest(file)


def stamp(file: Path) -> tuple[int, int] | None:
    """Return size and time of a file, which change with it; None for anything but a file."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
