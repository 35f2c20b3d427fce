"""The folder of a run: one run at a time in it, and nothing of an earlier run lost.

The lock is the operating system's, so it ends with the process that holds it, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from bothways.core.errors import ResourceError
from bothways.training.checkpoint import latest
from bothways.training.files import HIDDEN, refusals

LOCK, OWNER = ".lock", ".owner.json"


@contextlib.contextmanager
def run_folder(folder: Path, *, resume: bool) -> Iterator[Path]:
    """The folder, made if missing, for this process alone until it is closed.

    Args:
        folder: where the run's checkpoints and records lie.
        resume: whether to go on with the checkpoints in it; without, it must hold none.

    Raises:
        ResourceError: another process runs in it, it holds checkpoints or other things, or it cannot be written.
    """
    with refusals(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _check_free(folder, resume)
        lock = FileLock(folder / LOCK)
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            fix = "Wait for it, stop it, or choose another folder."
            raise ResourceError(f"is in use by {_owner(folder)}", where=folder, fix=fix) from error
    try:
        with refusals(folder):
            (folder / OWNER).write_text(json.dumps({"pid": os.getpid(), "host": platform.node()}), encoding="utf8")
            for left in folder.glob(f"{HIDDEN}*"):
                shutil.rmtree(left, ignore_errors=True)
        yield folder
    finally:
        lock.release()


def _check_free(folder: Path, resume: bool) -> None:
    if latest(folder) is not None:
        if not resume:
            fix = "Add --resume to go on with it, or choose another folder."
            raise ResourceError("holds the checkpoints of an earlier run", where=folder, fix=fix)
    elif any(folder.iterdir()) and not (folder / LOCK).exists():
        raise ResourceError(
            "is not empty, and not the folder of a run", where=folder, fix="Choose another folder, or empty it."
        )


def _owner(folder: Path) -> str:
    try:
        owner = json.loads((folder / OWNER).read_text(encoding="utf8"))
        return f"process {owner['pid']} on {owner['host']}"
    except (OSError, ValueError, KeyError):
        return "another process"
