"""TOML files as trees of plain values: read with the standard library, written here, since it only reads."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bothways.core.errors import ConfigError

NONE = "none"
"""How a text says that there is no value: TOML has no word for it."""


def read_toml(file: Path) -> dict[str, Any]:
    """The tree in a TOML file.

    Raises:
        ConfigError: there is no such file, it may not be read, or it is not TOML.
    """
    parser = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        tree: dict[str, Any] = parser.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=file) from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise ConfigError(
            f"is not TOML: {error}", where=file, fix="Write key = value under [table] headings."
        ) from error
    return tree


def write_toml(tree: Mapping[str, Any]) -> str:
    """The text of a TOML file with this tree: tables, lists, texts, numbers, booleans, and "none" for None."""
    return "\n".join([*_table(tree, ""), ""])


def _table(table: Mapping[str, Any], name: str) -> list[str]:
    """The lines of a table: its plain values first, since whatever follows a heading belongs to that heading."""
    tables = {
        key: value
        for key, value in table.items()
        if isinstance(value, Mapping) or _is_tables(value)
    }
    lines = [f"{_key(key)} = {inline(value)}" for key, value in table.items() if key not in tables]
    for key, value in tables.items():
        full = f"{name}.{_key(key)}" if name else _key(key)
        single = isinstance(value, Mapping)
        for part in [value] if single else value:
            lines += ["", f"[{full}]" if single else f"[[{full}]]", *_table(part, full)]
    return lines


def _is_tables(value: Any) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)
    )


def _key(key: str) -> str:
    return key if key.isidentifier() and key.isascii() else inline(key)


def inline(value: Any) -> str:
    """A plain value as it stands behind `key =`; "none" for None."""
    match value:
        case None:
            return inline(NONE)
        case bool():
            return str(value).lower()
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list():
            return f"[{', '.join(map(inline, value))}]"
        case Mapping():  # among plain values in a list, where no heading can stand
            return (
                "{"
                + ", ".join(f"{_key(key)} = {inline(item)}" for key, item in value.items())
                + "}"
            )
        case _:
            return repr(value)
