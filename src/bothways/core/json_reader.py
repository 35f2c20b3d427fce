"""A JSON reader for files from outside: every flaw is an error with its place."""

from __future__ import annotations

import contextlib
import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bothways.core.errors import BothwaysError, DataError, ResourceError

LARGEST = 2**30
"""Bytes of the largest file of settings or a vocabulary; those of published models have 2**25."""

_FIX = "Correct the file, or restore it from its source."


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
    fix: str = _FIX,
    *,
    unique: bool = False,
) -> Any:
    """Return the value in a JSON text.

    Args:
        where: the place of the text, for messages.
        error: the class of the error to raise.
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
    text: str,
    where: object,
    error: type[BothwaysError] = DataError,
    fix: str = _FIX,
    *,
    unique: bool = False,
) -> dict[str, Any]:
    """Return the object in a JSON text; errors as `parse_json`, also for any other value."""
    value = parse_json(text, where, error, fix, unique=unique)
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
    file: Path, error: type[BothwaysError] = DataError, fix: str = _FIX
) -> dict[str, Any]:
    """Return the object in a JSON file; errors as `read_json`, also for any other value."""
    return parse_object(read_utf8(file, error, fix), file, error, fix)


def read_utf8(file: Path, error: type[BothwaysError], fix: str = _FIX) -> str:
    """Return the text of a file, with "\\n" at the ends of lines; errors as `read_json`."""
    try:
        text = read_regular(file, error, fix).decode("utf-8")
    except UnicodeDecodeError as failure:
        message = f"is not UTF-8 text (byte {failure.start})"
        raise error(message, where=file, fix=fix) from failure
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_regular(file: Path, error: type[BothwaysError], fix: str = _FIX) -> bytes:
    """Return the bytes of a file of a folder that others made.

    A pipe may never end, and neither does a link to /dev/zero.

    Raises:
        BothwaysError: of class `error`: a pipe or a device, or larger than `LARGEST`.
        ResourceError: the file cannot be read.
    """
    check_regular(file, error, fix)
    with _reading(file):
        return file.read_bytes()


def check_regular(file: Path, error: type[BothwaysError], fix: str = _FIX) -> None:
    """Refuse a pipe, a device or a file that is too large, before a library opens it.

    Errors as `read_regular`.
    """
    with _reading(file):
        status = file.stat()
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise error("is a pipe or a device, not a file", where=file, fix=fix)
    if status.st_size > LARGEST:
        message = f"has {status.st_size:,} bytes, more than {LARGEST:,}"
        raise error(message, where=file, fix=fix)


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as failure:
        message = f"cannot be read: {failure.strerror}"
        raise ResourceError(message, where=file, fix="Check the name and permissions.") from failure
