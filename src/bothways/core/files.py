"""Files and folders: names, complete or absent writes, strict reading of JSON, and locks.

A lock gives a folder to one process at a time. The operating system holds it, so it ends with its
process, even if that is killed.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import itertools
import json
import os
import platform
import re
import shutil
import stat
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bothways.core import errors
from bothways.core.errors import BothwaysError, ConfigError, DataError, ResourceError
from bothways.core.progress import SILENT, Progress

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import DTypeLike


def near_path(path: Path, accepts: Callable[[Path], bool] = Path.is_file) -> Path | None:
    """Return a file (or what else is accepted) next to a missing one with a similar name.

    Endings do not count, except among files whose names are equal without them: "nofile.tsv" is not
    near "few.tsv", and "dev.jsonl" is near "dev.jsonl.gz".
    """
    try:
        some = itertools.islice(path.parent.iterdir(), 10_000)  # a huge folder would take seconds
        names = [other.name for other in some if accepts(other)]
    except OSError:  # no folder, or one that this user may not list
        return None
    stems = {name: name.partition(".")[0] for name in names}
    near = difflib.get_close_matches(path.name.partition(".")[0], {*stems.values()}, 1, 0.7)
    same = [name for name, stem in stems.items() if stem in near]
    return path.parent / difflib.get_close_matches(path.name, same, 1, 0)[0] if same else None


def is_url(name: object) -> bool:
    """Return True for a URL such as "s3://bucket/text.txt"; a chain such as "a::b://c" is one."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+(://|::.*://)", str(name)) is not None


def local_path(name: str | os.PathLike[str]) -> Path:
    """Return a path on this machine; ~ and ~user are home folders, as in a shell.

    Where there is no such user, the name stays as it is, where pathlib raises an error.

    Raises:
        ConfigError: the name is empty, which pathlib takes for the working folder.
        ResourceError: this user may not look into the folder, or the one that it is in.
    """
    if not os.fspath(name):
        fix = "Name one, or check the variable that gives it."
        raise ConfigError("the name of a file or folder is empty", fix=fix)
    path = Path(os.path.expanduser(name))
    try:
        # `Path.exists` is False without permission in Python 3.14, where older ones raise an error.
        os.stat(os.path.join(path, "."))  # of a folder also its entries
    except PermissionError as error:
        fix = "Choose another name, or give this user the permissions."
        raise ResourceError("permission denied", where=os.fspath(name), fix=fix) from error
    except (OSError, ValueError):  # a file, or a path that does not exist
        pass
    return path


def require_text(text: str) -> None:
    """Check that the first string in a list of texts is not the name of a file.

    Raises:
        DataError: it is, so that names would be read as texts.
    """
    if len(text) < 256 and Path(text).suffix and os.path.isfile(text):
        fix = f"For the text in files give paths: [pathlib.Path({text!r}), …]."
        raise DataError(f"{text!r} is the name of a file", where="text 1", fix=fix)


def require_local(folder: Path) -> None:
    """Check that a folder is not a URL, of which `Path` has made s3:/bucket/run.

    Raises:
        ConfigError: it is one, or its name is not UTF-8, which safetensors cannot write.
    """
    require_utf8(folder)
    # `Path` has made s3:/bucket/run of s3://bucket/run.
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", folder.as_posix()):
        fix = "Name a folder here; copy it from or to the URL with the tools of its store."
        raise ConfigError("is a URL, not a folder of this machine", where=folder, fix=fix)


def require_utf8(folder: Path) -> None:
    """Raise ConfigError if the name of a folder has bytes that are not UTF-8.

    The bytes count: in the locale zh_CN.GB18030 a name of any characters has others.
    """
    try:
        os.fsencode(folder.absolute()).decode("utf-8")
    except UnicodeError:
        message = "has a name that is not UTF-8, which safetensors cannot open"
        fix = "Rename the folder, or one above it."
        raise ConfigError(message, where=folder, fix=fix) from None


HIDDEN = ".writing-"
"""The prefix of names of files and folders that are incomplete, or replaced."""

_FIX = "Free some space or choose another folder; what was saved before is intact."


@contextlib.contextmanager
def replace_folder(target: Path, fix: str = _FIX) -> Iterator[Path]:
    """Yield a hidden folder that becomes `target` when the context ends, or vanishes on an error.

    A folder that exists at `target` is replaced by two renames; `recover_folder` repairs what a
    crash between them leaves. A link to a folder stays one.

    Args:
        fix: what to do if it cannot be written.

    Raises:
        ConfigError: `target` is a URL, or "." or "..".
        ResourceError: no space or no permission, or another process is writing it; `target` is as
            it was.
    """
    from filelock import FileLock, Timeout

    require_local(target)
    if target.name in ("", ".."):  # a shell there would be left in a deleted folder
        message = "is the current folder, or one above it, and would be replaced"
        raise ConfigError(message, where=target, fix="Name a folder in it, or another one.")
    real, hidden = target.resolve(), hidden_folder(target)
    with errors.os_errors(target, fix):
        hidden.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(real.with_name(f"{HIDDEN}use-{real.name}"))
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            message = "is being written by another process"
            advice = "Wait for it, or choose another folder."
            raise ResourceError(message, where=target, fix=advice) from error
        try:
            recover_folder(real)
            shutil.rmtree(hidden, ignore_errors=True)
            hidden.mkdir()
            yield hidden
            for path in (*hidden.rglob("*"), hidden):
                _flush(path)
            _rename_twice(hidden, real)
            _flush(real.parent)
        except ResourceError as error:
            if error.where is not None and Path(error.where).is_relative_to(hidden):
                error.where = target / Path(error.where).relative_to(hidden)
            raise
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
            # While it is held, as `lock_folder` does; Windows, where `release` deletes it, refuses.
            with contextlib.suppress(PermissionError):
                Path(lock.lock_file).unlink(missing_ok=True)
            lock.release()


def hidden_folder(path: Path) -> Path:
    """Return the hidden folder in which `path` is written first."""
    real = path.resolve()
    return real.with_name(f"{HIDDEN}new-{real.name}")


def recover_folder(path: Path) -> None:
    """Restore a folder whose replacement was killed between its two renames.

    Raises:
        ResourceError: no permission.
    """
    real = path.resolve()
    old = real.parent / f"{HIDDEN}old-{real.name}"
    if os.path.exists(old) and not real.exists():  # False for a name that is too long
        with (
            errors.os_errors(path, "Rename the hidden folder next to it by hand."),
            contextlib.suppress(FileNotFoundError),  # another process has restored it
        ):
            old.rename(real)


def make_folder(folder: Path) -> None:
    """Create a folder and those above it; one that exists stays as it is.

    Raises:
        ResourceError: no space or no permission.
    """
    with errors.os_errors(folder, _FIX):
        folder.mkdir(parents=True, exist_ok=True)


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file through a hidden one that replaces it; its mode stays, and a link to it one.

    Raises:
        ResourceError: no space or no permission, or a pipe or a device; the file is as it was.
    """
    check_output_path(path)
    if path.exists() and not path.is_file():  # /dev/null would become a file
        raise ResourceError("is a pipe or a device, not a file", where=path, fix="Name a file.")
    target = path.resolve()
    # Two threads may write one file. In the main thread the next write replaces what is left of one
    # that was killed.
    is_main = threading.current_thread() is threading.main_thread()
    writer = "new" if is_main else threading.get_native_id()
    hidden = target.with_name(f"{HIDDEN}{writer}-{target.name}")
    with errors.os_errors(path, _FIX):
        try:
            hidden.unlink(missing_ok=True)  # in a folder that others made, a link to any file
            write(hidden)
            _flush(hidden)
            if target.exists():
                shutil.copymode(target, hidden)
            hidden.replace(target)
        finally:
            hidden.unlink(missing_ok=True)


def create_array(path: Path, dtype: DTypeLike, shape: tuple[int, ...]) -> np.memmap[Any, Any]:
    """Create a .npy file of zeros, mapped for writing, and reserve its space.

    Without, it has only a size, and a write that finds the disk full ends the process by SIGBUS.

    Raises:
        OSError: there is too little space.
    """
    from numpy.lib.format import open_memmap

    array: np.memmap[Any, Any] = open_memmap(path, "w+", dtype, shape)
    if hasattr(os, "posix_fallocate"):  # Linux
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def replace_text(path: Path, text: str) -> None:
    """Write a file of text in UTF-8 as `replace_file` does.

    Raises:
        DataError: the text holds half of a surrogate pair.
    """
    if (half := surrogate_in(text)) is not None:
        message = f"cannot hold {half}, as in the name of a file that is not UTF-8"
        raise DataError(message, where=path, fix="Rename the file.")
    replace_file(path, lambda hidden: hidden.write_text(text, encoding="utf-8"))


def check_output_path(path: Path, inputs: Iterable[str | Path] = ()) -> None:
    """Check that a file can be written at `path`, before anything is read or computed for it.

    Args:
        inputs: files, or names of other sources, that are read for it.

    Raises:
        ResourceError: the parent folder does not exist or may not be written, or `path` is a folder
            or one of the inputs.
    """
    if not path.absolute().parent.is_dir():
        fix = "Create the folder first, or name another file."
        raise ResourceError("the parent folder does not exist", where=path, fix=fix)
    if path.is_dir():
        raise ResourceError("is a folder, not a file", where=path, fix="Name a file.")
    # A file is replaced by one that is written next to it; a device or a pipe is written itself.
    written = path if path.exists() and not path.is_file() else path.resolve().parent
    if written.exists() and not os.access(written, os.W_OK):
        raise ResourceError("permission denied", where=path, fix="Name another file.")
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
        ResourceError: it cannot be read.
    """
    result = hashlib.sha256()
    with errors.read_errors(file), file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            result.update(chunk)
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


LARGEST = 2**30
"""Bytes of the largest file of settings or a vocabulary; those of published models have 2**25."""

_CORRECT = "Correct the file, or restore it from its source."


class DuplicateKey(Exception):
    """An object that has a key twice, of which Python keeps the last value."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; an `object_pairs_hook` of the json module.

    Raises:
        DuplicateKey: it has a key twice.
    """
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise DuplicateKey(next(name for name in names if names.count(name) > 1))
    return result


def parse_json(
    text: str,
    where: object,
    error: type[BothwaysError] = DataError,
    fix: str = _CORRECT,
    *,
    unique: bool = False,
) -> Any:
    """Return the value in a JSON text.

    Args:
        fix: what to do about a text that is not JSON.
        unique: refuse an object that has a key twice; else the last value counts.

    Raises:
        BothwaysError: of class `error`: the text is not JSON, is nested too deeply, or holds an
            integer with more digits than Python converts.
    """
    try:
        return json.loads(text, object_pairs_hook=unique_keys if unique else None)
    except DuplicateKey as failure:
        message = f"has the key {str(failure)!r} twice"
        raise error(message, where=str(where), fix="Remove one of the two.") from failure
    except json.JSONDecodeError as failure:
        line = f"line {failure.lineno} " if failure.lineno > 1 else ""
        message = f"is not JSON: {failure.msg} at {line}column {failure.colno}"
        raise error(message, where=str(where), fix=fix) from failure
    except (ValueError, RecursionError) as failure:
        message = "holds a number with too many digits, or brackets nested too deeply"
        raise error(message, where=str(where), fix="Remove it.") from failure


def parse_object(
    text: str, where: object, error: type[BothwaysError] = DataError, fix: str = _CORRECT
) -> dict[str, Any]:
    """Return the object in a JSON text; errors as `parse_json`, also for any other value."""
    value = parse_json(text, where, error, fix)
    if not isinstance(value, dict):
        message = f"holds a JSON {type(value).__name__}, not an object"
        raise error(message, where=str(where), fix=fix)
    return value


def read_json(file: Path, error: type[BothwaysError] = DataError) -> Any:
    """Return the value in a JSON file.

    Raises:
        BothwaysError: of class `error`: not UTF-8, or as `parse_json`.
        ResourceError: the file cannot be read.
    """
    return parse_json(read_utf8(file, error), file, error)


def read_object(
    file: Path, error: type[BothwaysError] = DataError, fix: str = _CORRECT
) -> dict[str, Any]:
    """Return the object in a JSON file; errors as `read_json`, also for any other value."""
    return parse_object(read_utf8(file, error, fix), file, error, fix)


def read_utf8(file: Path, error: type[BothwaysError], fix: str = _CORRECT) -> str:
    """Return the text of a file, with "\\n" at the ends of lines; errors as `read_json`."""
    try:
        text = read_regular(file, error, fix).decode("utf-8-sig")  # Windows may write the mark
    except UnicodeDecodeError as failure:
        raise error(f"is not UTF-8 text (byte {failure.start})", where=file, fix=fix) from failure
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_regular(file: Path, error: type[BothwaysError], fix: str = _CORRECT) -> bytes:
    """Return the bytes of a file of a folder that others made.

    A pipe may never end, and neither does a link to /dev/zero.

    Raises:
        BothwaysError: of class `error`: a pipe or a device, or larger than `LARGEST`.
        ResourceError: the file cannot be read.
    """
    check_regular(file, error, fix)
    with errors.read_errors(file):
        return file.read_bytes()


def check_regular(file: Path, error: type[BothwaysError], fix: str = _CORRECT) -> None:
    """Refuse a pipe, a device or a file that is too large, before a library opens it.

    Errors as `read_regular`.
    """
    with errors.read_errors(file):
        status = file.stat()
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise error("is a pipe or a device, not a file", where=file, fix=fix)
    if status.st_size > LARGEST:
        raise error(f"has {status.st_size:,} bytes, more than {LARGEST:,}", where=file, fix=fix)


def surrogate_in(text: str) -> str | None:
    r"""Describe the first half of a surrogate pair in a text; None if there is none.

    JSON and Python strings can hold such halves, UTF-8 cannot.

    Example: "ab\ud800" → "U+D800 at character 2, half of a surrogate pair".
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X} at character {error.start}"
        return f"{half}, half of a surrogate pair"
    return None


def without_surrogates(text: str) -> str:
    """Join the halves of surrogate pairs that belong together, and replace others by U+FFFD."""
    if surrogate_in(text) is None:
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


LOCK, OWNER = ".lock", ".owner.json"


@contextlib.contextmanager
def lock_folder(
    folder: Path,
    patience: float = 0.0,
    progress: Progress = SILENT,
    begun: Collection[str] = (),
    finished: Collection[str] = (),
) -> Iterator[Path]:
    """Lock a folder, creating it if necessary, until the context ends.

    If it ends with an error before anything was written, the lock and new folders are removed.

    Args:
        patience: seconds to wait for another process that holds the lock.
        progress: receives a note about the wait.
        begun: names in the folder that do not count as written, unless they are there before: an
            error deletes them while no part is finished.
        finished: globs of finished parts. If there is one, from an earlier process too, all stays.

    Raises:
        ConfigError: the folder is a URL.
        ResourceError: another process holds the lock, or the folder cannot be written.
    """
    from filelock import FileLock, Timeout

    require_local(folder)
    with errors.os_errors(folder, "Choose another folder."):
        created = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        new = not (folder / LOCK).exists()
        lock = FileLock(folder / LOCK)
        try:
            try:
                lock.acquire(timeout=0)
            except Timeout:
                if not patience:
                    raise
                owner = _owner(folder)
                progress.message(f"note: {folder} is in use by {owner}, which may be about to end")
                lock.acquire(timeout=patience)
        except Timeout as error:
            fix = "Wait for it, stop it, or choose another folder."
            raise ResourceError(f"is in use by {_owner(folder)}", where=folder, fix=fix) from error
        previous = {file.name for file in folder.iterdir()} - {LOCK, OWNER}
    try:
        with errors.os_errors(folder, "Choose another folder."):
            record = json.dumps({"pid": os.getpid(), "host": platform.node()})
            (folder / OWNER).unlink(missing_ok=True)  # which may be a link to any file
            (folder / OWNER).write_text(record, encoding="utf8")
        yield folder
    except BaseException:
        (folder / OWNER).unlink(missing_ok=True)
        if not any(path for glob in finished for path in folder.glob(glob)):
            for path in (folder / name for name in {*begun} - previous):
                with contextlib.suppress(OSError):  # it would hide the error
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        if new and {file.name for file in folder.glob("*")} == previous | {LOCK}:
            with contextlib.suppress(OSError):  # not empty, or Windows, which keeps open files
                (folder / LOCK).unlink()  # while it is held: another process finds it, or a new one
                for path in created:
                    path.rmdir()
        raise
    finally:
        (folder / OWNER).unlink(missing_ok=True)
        lock.release()


def _owner(folder: Path) -> str:
    try:
        owner = read_object(folder / OWNER)
        return f"process {owner['pid']} on {owner['host']}"
    except (BothwaysError, KeyError):
        return "another process"
