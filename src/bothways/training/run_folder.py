"""The folder of a run: one run at a time, and nothing in it is overwritten unasked."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from bothways.core.advice import argument
from bothways.core.atomic_files import HIDDEN
from bothways.core.errors import ResourceError, os_errors
from bothways.core.folder_lock import LOCK, OWNER, lock_folder
from bothways.core.progress import SILENT, Progress
from bothways.training.checkpoint import latest_checkpoint

MARK = ".run"
"""Empty file that marks the folder of a run, also before its first checkpoint."""
LAST_RANK = 120.0
"""Seconds for a rank that is ending: torchrun kills it after 30, and a file server takes up to 90
to free what a machine has locked that is gone."""


@contextlib.contextmanager
def run_folder(folder: Path, *, resume: bool, progress: Progress = SILENT) -> Iterator[Path]:
    """Create the folder if it is missing, and lock it for this process.

    A rank that torchrun has started again waits for the one before it, which may be on another
    machine and slow to end.

    Args:
        folder: of the run's checkpoints and records.
        resume: continue with the checkpoints in it; without, it must hold none.
        progress: receives a note about the wait.

    Raises:
        ResourceError: it is locked, holds checkpoints or other files, or cannot be written.
    """
    with os_errors(folder, "Choose another folder."):
        _check(folder, resume)
    patience = LAST_RANK if resume and "TORCHELASTIC_RUN_ID" in os.environ else 0.0
    with lock_folder(folder, patience, progress):
        with os_errors(folder, "Choose another folder."):
            begun = (folder / MARK).exists()
            (folder / MARK).touch()
            for left in folder.glob(f"{HIDDEN}*"):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        try:
            yield folder
        except BaseException:
            if not begun and {file.name for file in folder.iterdir()} <= {MARK, LOCK, OWNER}:
                (folder / MARK).unlink()  # the run was refused
            raise


def _check(folder: Path, resume: bool) -> None:
    if not folder.exists() or (folder / MARK).exists():
        if latest_checkpoint(folder) is not None and not resume:
            fix = f"Add {argument(resume=True)} to continue it, or choose another folder."
            raise ResourceError("holds the checkpoints of an earlier run", where=folder, fix=fix)
    elif any(folder.iterdir()):
        raise ResourceError(
            "is not empty, and not the folder of a run", where=folder, fix="Choose another folder."
        )
