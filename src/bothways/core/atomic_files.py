"""Files and folders that are whole or are not there: written beside their place, flushed to the disk, then renamed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from bothways.core.errors import ResourceError, os_errors

HIDDEN = ".writing-"
"""What the name of something begins with that is not yet whole, or no longer."""

_FIX = "Make room or choose another folder; what was saved before is whole."


@contextlib.contextmanager
def replace_folder(place: Path) -> Iterator[Path]:
    """A hidden folder to write files in, which takes its `place` when all of them are on the disk, or vanishes.

    A folder that stands at `place` already is replaced.

    Raises:
        ResourceError: there is no room or no permission; what stood at `place` stands there as before.
    """
    hidden = place.with_name(f"{HIDDEN}new-{place.name}")
    with os_errors(place, _FIX):
        try:
            shutil.rmtree(hidden, ignore_errors=True)
            hidden.mkdir(parents=True)
            yield hidden
            for path in (*hidden.rglob("*"), hidden):
                _flush(path)
            old = _put_aside(place)
            try:
                hidden.rename(place)
            except OSError:
                if old.exists():
                    old.rename(place)
                raise
            _flush(place.parent)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)


def replace_file(place: Path, write: Callable[[Path], object]) -> None:
    """Write a file anew.

    Raises:
        ResourceError: there is no room or no permission; the file is as it was.
    """
    check_output_path(place)
    hidden = place.with_name(f"{HIDDEN}new-{place.name}")
    with os_errors(place, _FIX):
        try:
            write(hidden)
            _flush(hidden)
            hidden.replace(place)
        finally:
            hidden.unlink(missing_ok=True)


def check_output_path(place: Path, inputs: Iterable[str | Path] = ()) -> None:
    """Whether a file can be written at a place, before anything is read or computed for it.

    Args:
        inputs: what is read for it: files, or names of something else.

    Raises:
        ResourceError: its folder is not there, a folder stands in its place, or it is one of the inputs.
    """
    if not place.absolute().parent.is_dir():
        raise ResourceError(
            "has no folder to lie in", where=place, fix="Make it first, or name another file."
        )
    if place.is_dir():
        raise ResourceError(
            "is a folder, where a file is to be written", where=place, fix="Name a file."
        )
    check_not_input(place, inputs)


def check_not_input(place: Path, inputs: Iterable[str | Path]) -> None:
    """ResourceError: what is to be written is one of the inputs, under this name or another."""
    for name in inputs:
        path = os.path.expanduser(name)
        if os.path.exists(place) and os.path.exists(path) and os.path.samefile(place, path):
            raise ResourceError(
                "is an input too, and would be lost",
                where=place,
                fix="Name another place for what is written.",
            )


def remove_folder(folder: Path) -> None:
    """Delete a folder in such a way that half of it is never taken for the whole."""
    shutil.rmtree(_put_aside(folder))


def file_digest(file: Path) -> str:
    """The sha256 of a file."""
    result = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            result.update(chunk)
    return result.hexdigest()


def _put_aside(place: Path) -> Path:
    """Where the folder at a place is afterwards, if there is one."""
    old = place.with_name(f"{HIDDEN}old-{place.name}")
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        place.rename(old)
    return old


def _flush(path: Path) -> None:
    if path.is_dir() and os.name == "nt":  # Windows opens no folders.
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
