"""Two configurations beside each other: the settings that make the one of the other."""

from __future__ import annotations

import dataclasses
from typing import Any

from bothways.core.config.toml import inline


def config_difference(config: Any, base: Any) -> list[str]:
    """The lines of TOML that change `base` into `config`, dataclasses of one type, by dotted path: `position.offset = 2`.

    Where the two have different members of a union, the line has the new one with what it does not leave at its default.
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
    """A value as plainly as it can be said: a member of a union by its name, where all else is as that member has it."""
    if isinstance(value, tuple):
        return [_short(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    kind = {"kind": value.kind} if hasattr(value, "kind") else {}
    fields = [field for field in dataclasses.fields(value) if field.name != "kind"]
    said = [
        field.name for field in fields if not kind or getattr(value, field.name) != field.default
    ]
    return (
        {**kind, **{name: _short(getattr(value, name)) for name in said}}
        if said
        else kind.get("kind", {})
    )
