"""Trees of plain values, as a configuration is before it has types: from texts, and one over another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bothways.core.errors import ConfigError

Tree = Mapping[str, Any]


def parse_overrides(texts: Iterable[str]) -> dict[str, Any]:
    """Texts such as "encoder.depth=6" → a tree; of two for one key the later holds.

    Raises:
        ConfigError: a text without a key or "=".
    """
    tree: dict[str, Any] = {}
    for text in texts:
        path, equals, value = text.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise ConfigError(
                f"{text!r} is no setting",
                fix="Write key=value, such as training.optimizer.lr=3e-5.",
            )
        leaf: Any = value.strip()
        for key in reversed(keys):
            leaf = {key: leaf}
        tree = merge(tree, leaf)
    return tree


def merge(low: Tree, high: Tree, where: str = "") -> dict[str, Any]:
    """Both trees in one: what `high` says holds. Numbers as keys reach into a list of `low`.

    Raises:
        ConfigError: such a number lies outside the list.
    """
    return {
        **low,
        **{key: _merged(low.get(key), value, join_path(where, key)) for key, value in high.items()},
    }


def _merged(low: Any, high: Any, where: str) -> Any:
    if not isinstance(high, Mapping):
        return high
    match low:
        case Mapping():
            return merge(low, high, where)
        case str():  # a text that stands for a table, as "linear" does for {kind = "linear"}
            return merge({"kind": low}, high, where)
        case list():
            table = {str(place): item for place, item in enumerate(low)}
            for key in high.keys() - table.keys():
                raise ConfigError(
                    f"there are items 0 to {len(low) - 1}", where=join_path(where, key)
                )
            return list(merge(table, high, where).values())
        case _:
            return high


def join_path(where: str, key: str) -> str:
    """The dotted path of a key at a place."""
    return f"{where}.{key}" if where else key


def depth(tree: Tree, where: str) -> int:
    """How many keys of a dotted path a tree has, from the first on."""
    key, _, rest = where.partition(".")
    if key not in tree:
        return 0
    return 1 + (depth(tree[key], rest) if isinstance(tree[key], Mapping) else 0)


def flatten(tree: Tree, where: str = "") -> dict[str, object]:
    """Nested tables → dotted path → value."""
    rows: dict[str, object] = {}
    for key, value in tree.items():
        path = join_path(where, key)
        rows |= flatten(value, path) if isinstance(value, Mapping) else {path: value}
    return rows
