"""JSON files that someone else may have written: one clear error for whatever is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bothways.core.errors import BothwaysError, FolderError

_FIX = "Copy or download the file again."


def read_json(file: Path, error: type[BothwaysError] = FolderError, fix: str = _FIX) -> Any:
    """Return the content of a JSON file.

    Args:
        error: the class of the error to raise.
        fix: what the error recommends.

    Raises:
        BothwaysError: of the class `error`, if the file cannot be read, is not JSON, is nested too
            deeply, or holds an integer with too many digits.
    """
    try:
        return json.loads(file.read_text(encoding="utf8"))
    except RecursionError as problem:
        raise error("is nested too deeply to be read as JSON", where=file, fix=fix) from problem
    except (OSError, ValueError) as problem:
        raise error(f"cannot be read as JSON: {problem}", where=file, fix=fix) from problem


def read_json_object(
    file: Path, error: type[BothwaysError] = FolderError, fix: str = _FIX
) -> dict[str, Any]:
    """Return the content of a JSON file that must hold an object; arguments as `read_json`.

    Raises:
        BothwaysError: of the class `error`, as `read_json`, or if it holds something else.
    """
    tree = read_json(file, error, fix)
    if not isinstance(tree, dict):
        raise error(f"must hold a JSON object, not {type(tree).__name__}", where=file, fix=fix)
    return tree
