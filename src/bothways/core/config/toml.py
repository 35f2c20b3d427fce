"""TOML files as trees of plain values; written here, because the standard library only reads."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bothways.core.errors import ConfigError

NONE = "none"
"""The text for None, for which TOML has no value."""


def read_toml(file: Path) -> dict[str, Any]:
    """Return the tree in a TOML file.

    Raises:
        ConfigError: the file does not exist, cannot be read, or is not TOML.
    """
    parser = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        tree: dict[str, Any] = parser.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=file) from error
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, or nested too deeply
        fix = "Write key = value under [table] headings."
        raise ConfigError(f"is not TOML: {error}", where=file, fix=fix) from error
    return tree


def read_inline(text: str) -> Any:
    """Return the list or table in a text, such as "[{length = 64}]"; the text if it is none."""
    if not text.lstrip().startswith(("[", "{")):
        return text
    parser = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        return parser.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def write_toml(tree: Mapping[str, Any]) -> str:
    """Return the text of a TOML file with this tree; None becomes "none"."""
    return "\n".join([*_table(tree, ""), ""])


def _table(table: Mapping[str, Any], name: str) -> list[str]:
    """Return the lines of a table, plain values first: lines after a heading belong to it."""
    tables = {
        key: value
        for key, value in table.items()
        if isinstance(value, Mapping) or _is_tables(value)
    }
    lines = [f"{_key(key)} = {inline(value)}" for key, value in table.items() if key not in tables]
    for key, value in tables.items():
        full = f"{name}.{_key(key)}" if name else _key(key)
        single = isinstance(value, Mapping)
        for entry in [value] if single else value:
            lines += ["", f"[{full}]" if single else f"[[{full}]]", *_table(entry, full)]
    return lines


def _is_tables(value: Any) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)
    )


def _key(key: str) -> str:
    return key if key.isidentifier() and key.isascii() else inline(key)


def inline(value: Any) -> str:
    """Return a plain value as TOML writes it after `key =`; "none" for None."""
    match value:
        case None:
            return inline(NONE)
        case bool():
            return str(value).lower()
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list():
            return f"[{', '.join(map(inline, value))}]"
        case Mapping():  # among plain values in a list, where headings are not allowed
            return (
                f"{{{', '.join(f'{_key(key)} = {inline(item)}' for key, item in value.items())}}}"
            )
        case _:
            return repr(value)
