"""Files that are whole or are not there: written beside their place, flushed to the disk, then renamed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError

from bothways.core.errors import ResourceError

HIDDEN = ".writing-"
"""What the name of something begins with that is not yet whole, or no longer."""


@contextlib.contextmanager
def new_folder(place: Path) -> Iterator[Path]:
    """A hidden folder to write files in, which takes its `place` when all of them are on the disk, or vanishes.

    Raises:
        ResourceError: there is no room or no permission; what stood at `place` stands there as before.
    """
    hidden = place.with_name(HIDDEN + place.name)
    with refusals(place):
        remove(hidden)
        try:
            hidden.mkdir(parents=True)
            yield hidden
            for file in hidden.iterdir():
                _flush(file)
            _flush(hidden)
            remove(place)
            hidden.rename(place)
            _flush(place.parent)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)


def replace_file(place: Path, write: Callable[[Path], object]) -> None:
    """Write a file anew.

    Raises:
        ResourceError: there is no room or no permission; the file is as it was.
    """
    hidden = place.with_name(HIDDEN + place.name)
    with refusals(place):
        try:
            write(hidden)
            _flush(hidden)
            hidden.replace(place)
        finally:
            hidden.unlink(missing_ok=True)


def remove(folder: Path) -> None:
    """Delete a folder in such a way that half of it is never taken for the whole."""
    if folder.exists():
        hidden = folder.with_name(f"{HIDDEN}old-{folder.name}")
        shutil.rmtree(hidden, ignore_errors=True)
        folder.rename(hidden)
        shutil.rmtree(hidden)


def digest(file: Path) -> str:
    """The sha256 of a file."""
    result = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            result.update(chunk)
    return result.hexdigest()


def _flush(path: Path) -> None:
    if os.name == "nt":  # Windows flushes neither folders nor files opened for reading.
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def refusals(place: Path) -> Iterator[None]:
    """What the operating system refuses, as ResourceError. safetensors and torch hide its error in one of their own."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        cause = error.__context__ if isinstance(error, RuntimeError) else error
        if not isinstance(cause, OSError | SafetensorError):
            raise
        raise ResourceError(
            f"cannot be written: {cause}",
            where=place,
            fix="Make room or choose another folder; what was saved before is whole.",
        ) from error
