"""A folder for one process at a time, and what the operating system refuses, as errors of ours.

The lock is the operating system's, so it ends with the process that holds it, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from bothways.core.errors import ResourceError, os_errors

LOCK, OWNER = ".lock", ".owner.json"


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[Path]:
    """The folder, made if missing, for this process alone until the context ends.

    Raises:
        ResourceError: another process holds it, or it may not be written.
    """
    with os_errors(folder, "Choose another folder."):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK)
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            fix = "Wait for it, stop it, or choose another folder."
            raise ResourceError(f"is in use by {_owner(folder)}", where=folder, fix=fix) from error
    try:
        with os_errors(folder, "Choose another folder."):
            (folder / OWNER).write_text(
                json.dumps({"pid": os.getpid(), "host": platform.node()}), encoding="utf8"
            )
        yield folder
    finally:
        (folder / OWNER).unlink(missing_ok=True)
        lock.release()


def _owner(folder: Path) -> str:
    try:
        owner = json.loads((folder / OWNER).read_text(encoding="utf8"))
        return f"process {owner['pid']} on {owner['host']}"
    except (OSError, ValueError, KeyError):
        return "another process"
