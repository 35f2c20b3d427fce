"""Files and folders that are complete or absent: written elsewhere, flushed, then renamed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from bothways.core.errors import ResourceError, os_errors
from bothways.core.paths import local_path, require_local

HIDDEN = ".writing-"
"""The prefix of names of files and folders that are incomplete, or replaced."""

_FIX = "Free some space or choose another folder; what was saved before is intact."


@contextlib.contextmanager
def replace_folder(target: Path, fix: str = _FIX) -> Iterator[Path]:
    """Yield a hidden folder that becomes `target` when the context ends, or vanishes on an error.

    A folder that exists at `target` is replaced by two renames; `recover_folder` repairs what a
    crash between them leaves.

    Args:
        fix: what to do if it cannot be written.

    Raises:
        ConfigError: `target` is a URL.
        ResourceError: no space or no permission; `target` is as it was.
    """
    require_local(target)
    hidden = hidden_folder(target)
    with os_errors(target, fix):
        recover_folder(target)
        try:
            shutil.rmtree(hidden, ignore_errors=True)
            hidden.mkdir(parents=True)
            yield hidden
            for path in (*hidden.rglob("*"), hidden):
                _flush(path)
            _rename_twice(hidden, target)
            _flush(target.parent)
        except ResourceError as error:
            if error.where is not None and Path(error.where).is_relative_to(hidden):
                error.where = target / Path(error.where).relative_to(hidden)
            raise
        finally:
            shutil.rmtree(hidden, ignore_errors=True)


def hidden_folder(path: Path) -> Path:
    """Return the hidden folder in which `path` is written first."""
    return path.with_name(f"{HIDDEN}new-{path.name}")


def recover_folder(path: Path) -> None:
    """Restore a folder whose replacement was killed between its two renames.

    Raises:
        OSError: no permission.
    """
    old = path.with_name(f"{HIDDEN}old-{path.name}")
    if old.exists() and not path.exists():
        with contextlib.suppress(FileNotFoundError):  # another process has restored it
            old.rename(path)


def make_folder(folder: Path) -> None:
    """Create a folder and those above it; one that exists stays as it is.

    Raises:
        ResourceError: no space or no permission.
    """
    with os_errors(folder, _FIX):
        folder.mkdir(parents=True, exist_ok=True)


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file through a hidden one that replaces it.

    Raises:
        ResourceError: no space or no permission; the file is as it was.
    """
    check_output_path(path)
    hidden = path.with_name(f"{HIDDEN}new-{path.name}")
    with os_errors(path, _FIX):
        try:
            write(hidden)
            _flush(hidden)
            hidden.replace(path)
        finally:
            hidden.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Write a file of text in UTF-8 as `replace_file` does."""
    replace_file(path, lambda hidden: hidden.write_text(text, encoding="utf-8"))


def check_output_path(path: Path, inputs: Iterable[str | Path] = ()) -> None:
    """Check that a file can be written at `path`, before anything is read or computed for it.

    Args:
        inputs: files, or names of other sources, that are read for it.

    Raises:
        ResourceError: the parent folder does not exist, `path` is a folder, or one of the inputs.
    """
    if not path.absolute().parent.is_dir():
        fix = "Create the folder first, or name another file."
        raise ResourceError("the parent folder does not exist", where=path, fix=fix)
    if path.is_dir():
        raise ResourceError("is a folder, not a file", where=path, fix="Name a file.")
    check_not_input(path, inputs)


def check_not_input(output: Path, inputs: Iterable[str | Path]) -> None:
    """Raise ResourceError if the output is one of the inputs, under this name or another."""
    for name in inputs:
        path = local_path(name)
        if os.path.exists(output) and os.path.exists(path) and os.path.samefile(output, path):
            message = "the output is also an input, which would be overwritten"
            raise ResourceError(message, where=output, fix="Name another place for the output.")


def remove_folder(folder: Path) -> None:
    """Delete a folder so that a partly deleted one is never taken for a complete one."""
    shutil.rmtree(_put_aside(folder))


def file_digest(file: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal.

    Raises:
        FileNotFoundError: it is not there.
        ResourceError: it cannot be read.
    """
    result = hashlib.sha256()
    try:
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                result.update(chunk)
    except FileNotFoundError:
        raise
    except OSError as error:
        message, fix = (
            f"cannot be read: {error.strerror or error}",
            "Check the disk and permissions.",
        )
        raise ResourceError(message, where=file, fix=fix) from error
    return result.hexdigest()


def _rename_twice(hidden: Path, path: Path) -> None:
    old = _put_aside(path)
    try:
        hidden.rename(path)
    except OSError:
        if path.exists() and not old.exists():  # a reader took the pause for a crash
            _rename_twice(hidden, path)
            return
        recover_folder(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _put_aside(path: Path) -> Path:
    """Rename a folder, if it exists, to a hidden name, and return that name."""
    old = path.with_name(f"{HIDDEN}old-{path.name}")
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    return old


def _flush(path: Path) -> None:
    if path.is_dir() and os.name == "nt":  # Windows cannot open folders
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
