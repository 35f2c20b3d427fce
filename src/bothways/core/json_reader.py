"""A JSON reader for files from outside: every flaw is an error with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bothways.core.errors import BothwaysError, DataError, ResourceError

_FIX = "Correct the file, or restore it from its source."


def parse_json(
    text: str, where: object, error: type[BothwaysError] = DataError, fix: str = _FIX
) -> Any:
    """Return the value in a JSON text.

    Args:
        where: the place of the text, for messages.
        error: the class of the error to raise.
        fix: what to do about a text that is not JSON.

    Raises:
        BothwaysError: of class `error`: the text is not JSON, is nested too deeply, or holds an
            integer with more digits than Python converts.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as failure:
        line = f"line {failure.lineno} " if failure.lineno > 1 else ""
        what = f"is not JSON: {failure.msg} at {line}column {failure.colno}"
        raise error(what, where=str(where), fix=fix) from failure
    except (ValueError, RecursionError) as failure:
        what = "holds a number with too many digits, or brackets nested too deeply"
        raise error(what, where=str(where), fix="Remove it.") from failure


def parse_object(
    text: str, where: object, error: type[BothwaysError] = DataError, fix: str = _FIX
) -> dict[str, Any]:
    """Return the object in a JSON text; errors as `parse_json`, also for any other value."""
    value = parse_json(text, where, error, fix)
    if not isinstance(value, dict):
        what = f"holds a JSON {type(value).__name__}, not an object"
        raise error(what, where=str(where), fix=fix)
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
    """Return the text of a file; errors as `read_json`."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as failure:
        what = f"is not UTF-8 text (byte {failure.start})"
        raise error(what, where=file, fix=fix) from failure
    except OSError as failure:
        what = f"cannot be read: {failure.strerror}"
        raise ResourceError(what, where=file, fix="Check the name and permissions.") from failure
