"""Trees of plain values: a configuration before it has types; parsing and merging."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from bothways.core.advice import argument
from bothways.core.errors import ConfigError

Tree = Mapping[str, Any]


def nest(values: Tree) -> dict[str, Any]:
    """Return values by dotted paths as a tree, in any order: a table before its settings.

    Example: {"encoder.depth": 6} → {"encoder": {"depth": 6}}.
    """
    tree: dict[str, Any] = {}
    for path, value in sorted(values.items(), key=lambda item: item[0].count(".")):
        leaf = value
        for key in reversed(path.split(".")):
            leaf = {key: leaf}
        tree = merge(tree, leaf)
    return tree


def parse_overrides(texts: Iterable[str]) -> dict[str, Any]:
    """Return the tree of texts such as "encoder.depth=6"; later texts win.

    Raises:
        ConfigError: a text without a key or "=".
    """
    return nest(split_overrides(texts))


def split_overrides(texts: Iterable[str]) -> dict[str, str]:
    """Return the values of texts such as "encoder.depth=6" by their dotted paths; later texts win.

    "shuffle=none" drops earlier settings of the table, such as "shuffle.documents=24". Blanks
    around a value do not belong to it; a value in double quotes is read as in JSON, and keeps them:
    `prompt="query: "`.

    Raises:
        ConfigError: a text without a key or "=".
    """
    values: dict[str, str] = {}
    for text in texts:
        path, equals, value = text.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            message = f"{text!r} is not a setting"
            fix = "Write key=value without blanks, such as training.optimizer.lr=3e-5."
            if os.path.exists(text):
                message = f"{text!r} is a file, and settings follow here"
                fix = f"Name a further file by its name, such as {argument(dev='FILE')}."
            raise ConfigError(message, fix=fix)
        path, value = path.strip(), _unquoted(value.strip())
        values.pop(path, None)
        if value == "none":
            values = {key: other for key, other in values.items() if not key.startswith(f"{path}.")}
        values[path] = value
    return values


def rename(tree: Tree, aliases: Mapping[str, str]) -> dict[str, Any]:
    """Return a tree in which settings under an alias have their own name.

    Raises:
        ConfigError: a setting is given under two names.
    """
    renamed: dict[str, Any] = {}
    for name, value in tree.items():
        path = aliases.get(name, name)
        if path in renamed:
            message = f"{name!r} is another name of {path!r}, which is given, too"
            raise ConfigError(message, where=name, fix="Leave one of them out.")
        renamed[path] = value
    return renamed


def _unquoted(value: str) -> str:
    """Return the text within double quotes; what JSON cannot read as one text is left as it is."""
    if len(value) < 2 or value[0] != '"' or value[-1] != '"':
        return value
    try:
        text = json.loads(value)
    except ValueError:
        return value
    return str(text)


def merge(low: Tree, high: Tree, location: str = "") -> dict[str, Any]:
    """Merge two trees; values of `high` win. In a list of `low`, a number as a key is an index.

    Raises:
        ConfigError: such an index is out of range, or a function gets settings.
    """
    merged = {
        key: _merged(low.get(key), value, join_path(location, key)) for key, value in high.items()
    }
    return {**low, **merged}


def _merged(low: Any, high: Any, location: str) -> Any:
    for value, other in ((low, high), (high, low)):
        if callable(value) and isinstance(other, Mapping):
            message = f"a function has no settings, such as {next(iter(other), 'lr')}"
            fix = "Set them in the function: functools.partial(function, lr=0.1)."
            raise ConfigError(message, where=location, fix=fix)
    if not isinstance(high, Mapping):
        return high
    match low:
        case Mapping():
            return merge(low, high, location)
        case str():  # the short form of a table: "linear" is {kind = "linear"}
            return merge({"kind": low}, high, location)
        case list():
            table = {str(index): item for index, item in enumerate(low)}
            for key in high.keys() - table.keys():
                message = f"there are items 0 to {len(low) - 1}"
                raise ConfigError(message, where=join_path(location, key))
            return list(merge(table, high, location).values())
        case _:
            return high


def join_path(location: str, key: str) -> str:
    """Append a key to a dotted path."""
    return f"{location}.{key}" if location else key


def depth(tree: Tree, location: str) -> int:
    """Return the number of leading keys of a dotted path that a tree has."""
    key, _, remainder = location.partition(".")
    if key not in tree:
        return 0
    return 1 + (depth(tree[key], remainder) if isinstance(tree[key], Mapping) else 0)


def flatten(tree: Tree, location: str = "") -> dict[str, object]:
    """Return the values of nested tables by dotted path."""
    rows: dict[str, object] = {}
    for key, value in tree.items():
        path = join_path(location, key)
        rows |= flatten(value, path) if isinstance(value, Mapping) else {path: value}
    return rows
