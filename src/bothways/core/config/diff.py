"""The difference of two configurations, as lines of TOML."""

from __future__ import annotations

import dataclasses
from typing import Any

from bothways.core.config.toml import inline


def config_difference(config: Any, base: Any) -> list[str]:
    """Return the lines of TOML that change `base` into `config`, a dataclass of the same type.

    Example: ["position.offset = 2"]. If the two have different members of a union, the line shows
    the new member with its settings that are not defaults.
    """
    return [f"{path} = {inline(value)}" for path, value in _changes(config, base).items()]


def _changes(config: Any, base: Any) -> dict[str, Any]:
    result = dict[str, Any]()
    for field in dataclasses.fields(config):
        mine, other = getattr(config, field.name), getattr(base, field.name)
        if mine == other:
            continue
        if type(mine) is type(other) and dataclasses.is_dataclass(mine):
            result |= {
                f"{field.name}.{path}": value for path, value in _changes(mine, other).items()
            }
        else:
            result[field.name] = _short(mine)
    return result


def _short(value: Any) -> Any:
    """Return the shortest value that reads as this one: a union's default member as its name."""
    if isinstance(value, tuple):
        return [_short(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    kind = {"kind": value.kind} if hasattr(value, "kind") else {}
    fields = [field for field in dataclasses.fields(value) if field.name != "kind"]
    changed = {
        field.name: _short(getattr(value, field.name))
        for field in fields
        if not kind or getattr(value, field.name) != field.default
    }
    return {**kind, **changed} if changed else kind.get("kind", {})
