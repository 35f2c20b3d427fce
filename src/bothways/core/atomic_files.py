"""Files and folders that are complete or absent: written elsewhere, flushed, then renamed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from bothways.core.errors import ResourceError, os_errors
from bothways.core.urls import local_path, require_local

HIDDEN = ".writing-"
"""The prefix of names of files and folders that are incomplete, or replaced."""

_FIX = "Free some space or choose another folder; what was saved before is intact."
_AT_FDCWD, _RENAME_EXCHANGE, _RENAME_SWAP = -100, 2, 2  # of Linux's fcntl.h, and of macOS's stdio.h
_NOT_SUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


@contextlib.contextmanager
def replace_folder(place: Path, fix: str = _FIX) -> Iterator[Path]:
    """Yield a hidden folder that becomes `place` when the context ends, or vanishes on an error.

    A folder that exists at `place` is replaced. Where the system can exchange two names, `place`
    exists at every moment; elsewhere `recover_folder` repairs what a crash between two renames
    leaves.

    Args:
        fix: what to do if it cannot be written.

    Raises:
        ConfigError: `place` is a URL.
        ResourceError: no space or no permission; `place` is as it was.
    """
    require_local(place)
    hidden = hidden_folder(place)
    with os_errors(place, fix):
        recover_folder(place)
        try:
            shutil.rmtree(hidden, ignore_errors=True)
            hidden.mkdir(parents=True)
            yield hidden
            for path in (*hidden.rglob("*"), hidden):
                _flush(path)
            if not (place.exists() and _exchange(hidden, place)):
                _rename_twice(hidden, place)
            _flush(place.parent)
        except ResourceError as error:
            if error.where is not None and Path(error.where).is_relative_to(hidden):
                error.where = place / Path(error.where).relative_to(hidden)
            raise
        finally:
            shutil.rmtree(hidden, ignore_errors=True)


def hidden_folder(place: Path) -> Path:
    """Return the hidden folder in which `place` is written first."""
    return place.with_name(f"{HIDDEN}new-{place.name}")


def recover_folder(place: Path) -> None:
    """Restore a folder whose replacement was killed between its two renames.

    Raises:
        OSError: no permission.
    """
    old = place.with_name(f"{HIDDEN}old-{place.name}")
    if old.exists() and not place.exists():
        with contextlib.suppress(FileNotFoundError):  # another process has restored it
            old.rename(place)


def make_folder(folder: Path) -> None:
    """Create a folder and those above it; one that exists stays as it is.

    Raises:
        ResourceError: no space or no permission.
    """
    with os_errors(folder, _FIX):
        folder.mkdir(parents=True, exist_ok=True)


def replace_file(place: Path, write: Callable[[Path], object]) -> None:
    """Write a file through a hidden one that replaces it.

    Raises:
        ResourceError: no space or no permission; the file is as it was.
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


def replace_text(place: Path, text: str) -> None:
    """Write a file of text in UTF-8 as `replace_file` does."""
    replace_file(place, lambda hidden: hidden.write_text(text, encoding="utf-8"))


def check_output_path(place: Path, inputs: Iterable[str | Path] = ()) -> None:
    """Check that a file can be written at `place`, before anything is read or computed for it.

    Args:
        inputs: files, or names of other sources, that are read for it.

    Raises:
        ResourceError: the parent folder does not exist, `place` is a folder, or one of the inputs.
    """
    if not place.absolute().parent.is_dir():
        fix = "Create the folder first, or name another file."
        raise ResourceError("the parent folder does not exist", where=place, fix=fix)
    if place.is_dir():
        raise ResourceError("is a folder, not a file", where=place, fix="Name a file.")
    check_not_input(place, inputs)


def check_not_input(place: Path, inputs: Iterable[str | Path]) -> None:
    """Raise ResourceError if the output is one of the inputs, under this name or another."""
    for name in inputs:
        path = local_path(name)
        if os.path.exists(place) and os.path.exists(path) and os.path.samefile(place, path):
            message = "the output is also an input, which would be overwritten"
            raise ResourceError(message, where=place, fix="Name another place for the output.")


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


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step of the file system; return False where that is not supported."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
    except (OSError, TypeError):  # Windows
        return False
    one, two = os.fsencode(first), os.fsencode(second)
    if hasattr(libc, "renameat2"):
        failed = libc.renameat2(_AT_FDCWD, one, _AT_FDCWD, two, _RENAME_EXCHANGE)
    elif hasattr(libc, "renamex_np"):
        failed = libc.renamex_np(one, two, _RENAME_SWAP)
    else:
        return False
    if failed and ctypes.get_errno() not in _NOT_SUPPORTED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return not failed


def _rename_twice(hidden: Path, place: Path) -> None:
    old = _put_aside(place)
    try:
        hidden.rename(place)
    except OSError:
        if place.exists() and not old.exists():  # a reader took the pause for a crash
            _rename_twice(hidden, place)
            return
        recover_folder(place)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _put_aside(place: Path) -> Path:
    """Rename a folder, if it exists, to a hidden name, and return that name."""
    old = place.with_name(f"{HIDDEN}old-{place.name}")
    if place.exists():
        shutil.rmtree(old, ignore_errors=True)
        place.rename(old)
    return old


def _flush(path: Path) -> None:
    if path.is_dir() and os.name == "nt":  # Windows cannot open folders
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
