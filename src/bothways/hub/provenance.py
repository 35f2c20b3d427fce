"""The origin of a result, to recognise results of equal settings, data and models.

Data and models are identified by their SHA-256; their paths do not matter.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bothways.core.files import file_digest
from bothways.core.terminal import listed
from bothways.hub.adapter import read_adapter
from bothways.hub.hf_config import RECORD
from bothways.hub.resolve import (
    MODEL_FILES,
    PICKLE_FILES,
    modules_folder,
    object_in,
    resolve,
    resolve_run,
)

_DECISIVE = ("config", "length", "source", "task")
"""Fields of a record that predictions depend on, `source` in an export; others describe the run."""


def without_places(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run as plain values, without paths."""
    plain = json.loads(json.dumps(settings))
    return {name: plain[name] for name in plain if name not in ("model", "train", "dev")}


def digest_of_model(name: str) -> str:
    """Return the SHA-256 of everything in a model folder that its predictions depend on.

    PyTorch's files count only where there is no safetensors file, which is read in their place.

    Args:
        name: a model folder, the folder of a run, or an id on the Hub.
    """
    folder = resolve(resolve_run(name)).absolute()
    root = modules_folder(folder)  # of older sentence encoders the folder around it
    pickles = () if any(folder.glob("*model*.safetensors")) else PICKLE_FILES
    files = {
        file
        for pattern in (*MODEL_FILES, *pickles)
        if pattern != RECORD
        for path in (*folder.glob(pattern), *root.glob(pattern))
        for file in (path, *path.rglob("*"))
        if file.is_file()
    }
    named = sorted((file.relative_to(root).as_posix(), file) for file in files)
    lines = "".join(f"{path} {_digest(file, stamp(file))}\n" for path, file in named)
    record = object_in(folder / RECORD)
    # A run that is continued may save the same model on another day and from other paths.
    decisive = {name: record[name] for name in _DECISIVE if name in record}
    lines += json.dumps(decisive, sort_keys=True)
    digest, adapter = hashlib.sha256(lines.encode()).hexdigest(), read_adapter(folder)
    if adapter is None:
        return digest
    digest += digest_of_model(str(adapter.base))
    return hashlib.sha256(digest.encode()).hexdigest()


def model_facts(name: str | Path, labels: Iterable[str] = ()) -> dict[str, str]:
    """Return base, data, date, labels and size of a model, as far as its folder says.

    Args:
        name: a model folder, the folder of a run, or an id on the Hub.
    """
    folder = resolve(resolve_run(str(name)))
    record = object_in(folder / RECORD)

    def source(*path: str) -> str:
        """Return the name of data or of a model in the record, with the number of examples."""
        value: Any = record
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        value = value if isinstance(value, Mapping) else {}
        examples = value.get("examples")
        count = f", {examples:,} examples" if isinstance(examples, int) else ""
        return f"{value['name']}{count}" if "name" in value else ""

    tokens = record.get("tokens")
    files = (*folder.glob("*"), *folder.glob("[0-9]_*/*"))  # those of sentence-transformers, too
    weights = (file for file in files if file.suffix in _WEIGHTS)
    facts = {
        "base": source("base"),
        "data": source("data", "train"),
        "dev": source("data", "dev"),
        "tokens": f"{tokens:,}" if isinstance(tokens, int) else "",
        "date": str(record.get("date", "")),
        "labels": listed(labels),
        "size": f"{sum(file.stat().st_size for file in weights) / 2**20:,.1f} MiB",
    }
    return {key: text for key, text in facts.items() if text}


_WEIGHTS = {".safetensors", ".bin", ".onnx", ".data"}


def today() -> str:
    """Return the date in UTC, for the record of a model: 2018-10-11."""
    return f"{datetime.now(timezone.utc):%Y-%m-%d}"


@functools.lru_cache
def _digest(file: Path, written: tuple[int, int] | None) -> str:
    """Return the SHA-256 of a file, computed once until it changes."""
    return file_digest(file)


def stamp(file: Path) -> tuple[int, int] | None:
    """Return size and time of a file, which change with it; None for anything but a file."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
