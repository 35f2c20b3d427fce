"""A lock that gives a folder to one process at a time.

The operating system holds the lock, so it ends with its process, even if that is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from bothways.core.errors import BothwaysError, ResourceError, os_errors
from bothways.core.files import read_object, require_local
from bothways.core.progress import SILENT, Progress

LOCK, OWNER = ".lock", ".owner.json"


@contextlib.contextmanager
def lock_folder(folder: Path, patience: float = 0.0, progress: Progress = SILENT) -> Iterator[Path]:
    """Lock a folder, creating it if necessary, until the context ends.

    If it ends with an error before anything was written, the lock and new folders are removed.

    Args:
        patience: seconds to wait for another process that holds the lock.
        progress: receives a note about the wait.

    Raises:
        ConfigError: the folder is a URL.
        ResourceError: another process holds the lock, or the folder cannot be written.
    """
    require_local(folder)
    with os_errors(folder, "Choose another folder."):
        created = [path for path in (folder, *folder.parents) if not path.exists()]
        previous = set() if created else {file.name for file in folder.iterdir()}
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK)
        try:
            try:
                lock.acquire(timeout=0)
            except Timeout:
                if not patience:
                    raise
                progress.message(
                    f"note: {folder} is in use by {_owner(folder)}, which may be about to end"
                )
                lock.acquire(timeout=patience)
        except Timeout as error:
            fix = "Wait for it, stop it, or choose another folder."
            raise ResourceError(f"is in use by {_owner(folder)}", where=folder, fix=fix) from error
    try:
        with os_errors(folder, "Choose another folder."):
            (folder / OWNER).write_text(
                json.dumps({"pid": os.getpid(), "host": platform.node()}), encoding="utf8"
            )
        yield folder
    except BaseException:
        (folder / OWNER).unlink(missing_ok=True)
        new = LOCK not in previous and folder.is_dir()
        if new and {file.name for file in folder.iterdir()} == previous | {LOCK}:
            (folder / LOCK).unlink()  # while it is held: another process finds it, or a new one
            with contextlib.suppress(OSError):  # not empty
                for path in created:
                    path.rmdir()
        raise
    finally:
        (folder / OWNER).unlink(missing_ok=True)
        lock.release()


@contextlib.contextmanager
def discard_begun(
    folder: Path, begun: Collection[str], finished: Collection[str]
) -> Iterator[None]:
    """Delete what the context has begun in a locked folder, if it fails with no part finished.

    Args:
        begun: names in the folder to delete; what is there before stays.
        finished: globs of finished parts. If there is one, from an earlier process too, all stays.
    """
    previous = {path.name for path in folder.iterdir()}
    try:
        yield
    except BaseException:
        if not any(path for glob in finished for path in folder.glob(glob)):
            for name in {*begun} - previous:
                with contextlib.suppress(OSError):  # it would hide the error
                    path = folder / name
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        raise


def _owner(folder: Path) -> str:
    try:
        owner = read_object(folder / OWNER)
        return f"process {owner['pid']} on {owner['host']}"
    except (BothwaysError, KeyError):
        return "another process"
