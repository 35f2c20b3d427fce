"""What stands beside a vocabulary: `tokenizer_config.json` and the like, and their settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from bothways.core.errors import ResourceError, TokenizerError

CONFIG = "tokenizer_config.json"

D = TypeVar("D", bool, None)


def read_text_file(file: Path) -> str:
    """The text of a file.

    Raises:
        TokenizerError: it is not UTF-8.
        ResourceError: it cannot be read.
    """
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        what = f"is not UTF-8 text (byte {error.start})"
        raise TokenizerError(
            what, where=file, fix="Give a tokenizer.json or a vocab.txt, not compressed."
        ) from error
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
        raise ResourceError(what, where=file, fix="Check the name and the permissions.") from error


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one where there is no file.

    Raises:
        TokenizerError: it holds something else.
        ResourceError: it cannot be read.
    """
    if not file.exists():
        return {}
    try:
        content = json.loads(read_text_file(file))
    except json.JSONDecodeError as error:
        what = f"is not JSON: {error.msg}"
        raise TokenizerError(
            what, where=f"{file}:{error.lineno}", fix="Mend it, or take it away."
        ) from error
    if not isinstance(content, dict):
        what = f"holds a JSON {type(content).__name__}, not an object"
        raise TokenizerError(what, where=file, fix="Mend it, or take it away.")
    return content


def flag(config: Mapping[str, Any], file: Path, key: str, default: D) -> bool | D:
    """A setting of the tokenizer in `file`; null stands for the default.

    Raises:
        TokenizerError: it is neither true nor false.
    """
    match config.get(key):
        case None:
            return default
        case bool(value):
            return value
        case value:
            where = file.with_name(CONFIG)
            raise TokenizerError(
                f"{key!r} is {value!r}",
                where=where,
                fix="Set it to true or to false, without quotes.",
            )
