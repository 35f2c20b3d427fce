"""A corpus in the store of `flaky_store`, cut into small parts."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from pathlib import Path

from bothways.data.manifest import Stored, read_manifest, write_manifest
from flaky_store import FlakyStore

URL = "flaky://bucket/corpus"


def cut(folder: Path, part: int) -> None:
    """Describe the arrays of a corpus as parts of this size."""
    manifest = read_manifest(folder)

    def described(name: str, stored: Stored) -> Stored:
        data = (folder / name).read_bytes()
        pieces = [data[at : at + part] for at in range(0, len(data), part)]
        digests = tuple(hashlib.sha256(piece).hexdigest() for piece in pieces)
        return dataclasses.replace(
            stored, parts=digests if len(digests) > 1 and name.endswith(".bin") else ()
        )

    files = {name: described(name, stored) for name, stored in manifest.files.items()}
    write_manifest(folder, dataclasses.replace(manifest, files=files, part=part))


def put(folder: Path, work: Path, part: int) -> str:
    """Copy a corpus into the store; return its URL."""
    copy = shutil.copytree(folder, work / "sent")
    cut(copy, part)
    for path in copy.iterdir():
        if path.is_file() and not path.name.startswith("."):
            FlakyStore.files[f"bucket/corpus/{path.name}"] = path.read_bytes()
    return URL
