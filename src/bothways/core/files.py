"""Folders that are whole or are not there: written beside their place, flushed to the disk, then renamed."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from bothways.core.errors import ResourceError

HIDDEN = ".writing-"
"""What the name of a folder begins with that is not yet whole, or no longer."""


@contextlib.contextmanager
def new_folder(place: Path) -> Iterator[Path]:
    """A hidden folder to write files in, which takes its `place` when all of them are on the disk, or vanishes.

    A folder that stands at `place` already is replaced.

    Raises:
        ResourceError: there is no room or no permission; what stood at `place` stands there as before.
    """
    hidden, old = (place.with_name(f"{HIDDEN}{kind}-{place.name}") for kind in ("new", "old"))
    try:
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir(parents=True)
        yield hidden
        for file in hidden.iterdir():
            _flush(file)
        if place.exists():
            shutil.rmtree(old, ignore_errors=True)
            place.rename(old)
        hidden.rename(place)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        fix = "Make room or choose another folder; what was saved before is whole."
        raise ResourceError(f"cannot be written: {error.strerror or error}", where=place, fix=fix) from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _flush(file: Path) -> None:
    with file.open("rb+") as stream:
        os.fsync(stream.fileno())
