"""Typed configurations: trees of frozen dataclasses, read from TOML and `key=value` texts.

A class is its own schema. Its fields are plain values, other such classes, tuples of them, or
closed unions, whose members are distinguished by a last field `kind: Literal[…]`, which one of them
may lack. Reading is strict: errors about unknown keys, wrong types and rules of `__post_init__`
name the dotted path. Values may be texts from a command line.

pydantic reads plain values. The walk over the tree is our own, so that errors of `__post_init__`
keep their paths, and a table without `kind` means the member that the base has. Naming another
member keeps what the base has set in fields that mean the same in both, those of equal type and
default: `schedule=cosine` keeps the warm-up of `linear`. `replaced_members` reports the rest.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bothways.core.config.values import (
    NONE,
    Replacement,
    Tree,
    depth,
    flatten,
    inline,
    join_path,
    merge,
    parse_overrides,
    read_inline,
    read_toml,
    write_toml,
)
from bothways.core.errors import ConfigError, UnknownKeyError, render, setting
from bothways.core.terminal import quantity

C = TypeVar("C")

CHANGEABLE = types.MappingProxyType({"changeable": True})
"""Metadata of a field that may change when a run is resumed, since it changes no update."""


def load(
    cls: type[C],
    *,
    base: C | None = None,
    file: Path | None = None,
    overrides: Tree | Iterable[str] = (),
    aliases: Mapping[str, str] = types.MappingProxyType({}),
    peers: Mapping[str, str] = types.MappingProxyType({}),
) -> C:
    """Load a configuration: defaults, then a TOML file, then overrides, of which later ones win.

    Args:
        cls: the dataclass to build.
        base: the defaults; None for the class's.
        overrides: a tree, or texts such as "encoder.depth=6".
        aliases: dotted paths by common names of settings, which a file does not have; the error of
            an unknown key suggests them.
        peers: settings to suggest for names of another library that are unknown here.

    Raises:
        ConfigError: a key is unknown, a value is missing or not allowed, or a text is not a
            setting; with the path and the file.
    """
    low = read_toml(file) if file else {}
    top = parse_overrides(overrides)
    names = [*(field.name for field in _fields(cls)), *aliases]
    try:
        for key in top:
            if key not in names:
                deeper = [peers[key]] if key in peers else _deeper(key, base)
                raise _unknown("key", key, names, key, deeper)
        paths = {key: aliases.get(name, name) for key, name in peers.items()} | dict(aliases)
        for key in low.keys() & paths.keys() - {field.name for field in _fields(cls)}:
            raise _unknown("key", key, names, key, [paths[key]])
        return read(cls, merge(low, top), base=base)
    except ConfigError as error:
        path = str(error.where)
        if depth(low, path) <= depth(top, path):
            raise
        fix = error.advice and render(error.advice, "toml")
        raise ConfigError(error.what, where=f"{file}: {path}", fix=fix) from error


def read(
    cls: type[C], tree: Tree, *, base: Any = None, where: str = "", union: Iterable[type] = ()
) -> C:
    """Build a configuration from a tree; other values are those of `base`, or the defaults.

    Args:
        union: the classes that `cls` was chosen from.

    Raises:
        ConfigError: as in `load`; paths begin with `where`.
    """
    fields, hints = {field.name: field for field in _fields(cls)}, _hints(cls)
    # Another member keeps the values of the base in fields that mean the same.
    kept = _shared(cls, type(base)) if type(base) in union else ()
    for key in tree:
        if key not in fields:
            path = join_path(where, key)
            kinds = [_kind(member) for member in union if key in {f.name for f in _fields(member)}]
            if kinds:
                message = f"is a setting of {' and '.join(kinds)}, and {where} is {_kind(cls)}"
                kind = setting(f"{where}.kind", kinds[0])
                fix = f"Choose the kind, too: {kind}, or leave {key} out."
                raise ConfigError(message, where=path, fix=fix)
            raise _unknown("key", key, fields, path, _deeper(key, base))
    values = {}
    for name, field in fields.items():
        is_kept = isinstance(base, cls) or name in kept
        below = getattr(base, name) if is_kept else _default(field)
        if name in tree:
            base_value = None if below is dataclasses.MISSING else below
            values[name] = _value(hints[name], tree[name], base_value, join_path(where, name))
        elif below is not dataclasses.MISSING:
            values[name] = below
        else:
            message = f"is missing: it must be {describe_type(hints[name])}"
            path = join_path(where, name)
            advice = _how_to_write(_shape(hints[name]), "", path)
            advice = advice or f"Set it: {setting(path, 'VALUE')}."
            raise ConfigError(message, where=path, fix=advice)
    try:
        return cls(**values)
    except ConfigError as error:
        # The error may name an absolute path: in the table "encoder.dropout", which has the field
        # `hidden`, "hidden" and "encoder.dropout.hidden" both become "encoder.dropout.hidden".
        names = str(error.where or "").split(".")
        index = next((i for i, name in enumerate(names) if name in fields), 1)
        inner = ".".join(names[index:])
        full_path = (join_path(where, inner) if inner else where) or error.where
        raise ConfigError(error.what, where=full_path, fix=error.advice) from error


def to_dict(config: Any) -> dict[str, Any]:
    """Return the configuration as plain values for JSON; `read` restores an equal one."""
    hints = _hints(type(config))
    return {
        field.name: _plain(hints[field.name], getattr(config, field.name))
        for field in _fields(config)
    }


def to_toml(config: Any) -> str:
    """Return the complete configuration as the text of a TOML file."""
    return write_toml(to_dict(config))


def changeable_settings(config: Any, location: str = "") -> frozenset[str]:
    """Return the paths of the settings that may change when a run is resumed.

    A field with metadata "fixed" has a configuration of which these names may not change.
    """
    paths = set[str]()
    for field in dataclasses.fields(config):
        path, value = join_path(location, field.name), getattr(config, field.name)
        if "changeable" in field.metadata:
            paths.add(path)
        elif dataclasses.is_dataclass(value):
            fixed = {join_path(path, name) for name in field.metadata.get("fixed", ())}
            paths |= changeable_settings(value, path) - fixed
    return frozenset(paths)


def config_difference(config: Any, base: Any, location: str = "") -> list[str]:
    """Return the lines of TOML that change `base` into `config`, a dataclass of the same type.

    Example: ["position.offset = 2"]. If the two have different members of a union, the line shows
    the new member with its settings that are not defaults.
    """
    lines = list[str]()
    for field in dataclasses.fields(config):
        new, old = getattr(config, field.name), getattr(base, field.name)
        path = join_path(location, field.name)
        if new != old and type(new) is type(old) and dataclasses.is_dataclass(new):
            lines += config_difference(new, old, path)
        elif new != old:
            lines.append(f"{path} = {inline(_short(new))}")
    return lines


def replaced_members(
    config: Any, base: Any, file: Path | Tree | None = None, location: str = ""
) -> Iterator[str]:
    """Yield a text for each union of which `config` has another member than `base`, if that one
    has settings that are not its defaults, and the new one has its own defaults there.

    Example: "training.optimizer=lamb has lr=0.00176, where adamw had 0.0005".

    Args:
        file: a TOML file that changed `base`, or its table at `location`. A member that it names
            replaces the base's, and settings that the new one lacks are reported, too.
    """
    tree = read_toml(file) if isinstance(file, Path) else file or {}
    for field in _fields(config):
        new, old = getattr(config, field.name), getattr(base, field.name)
        inherited = _set_in(old) if type(old) is type(new) and hasattr(new, "kind") else {}
        path, table = join_path(location, field.name), tree.get(field.name)
        table = table if isinstance(table, Mapping) else {}
        of_file = table.get("kind", NONE) not in (NONE, getattr(new, "kind", NONE))
        if of_file:
            old = _value(_hints(type(config))[field.name], table, old, path)
        if new == old or not (dataclasses.is_dataclass(new) and dataclasses.is_dataclass(old)):
            continue
        if type(new) is type(old):
            yield from replaced_members(new, old, table, path)
        elif hasattr(new, "kind") and hasattr(old, "kind"):
            values = flatten(to_dict(new))
            explicit = {
                name for name, value in _set_in(new).items() if inherited.get(name) != value
            }
            lost = [
                f"{name}={inline(values[name])}, where {old.kind} had {inline(value)}"
                for name, value in _set_in(old).items()
                if name in values and name not in explicit and values[name] != value
            ]
            missing = _set_in(old).keys() - values.keys() if of_file else ()
            lost += [f"no {name}, which {old.kind} had" for name in sorted(missing)]
            if lost:
                yield f"{path}={new.kind} has {'; '.join(lost)}"


def _set_in(config: Any) -> dict[str, object]:
    """Return the settings of a member that are not its defaults, by path."""
    hints = _hints(type(config))
    defaults = {field.name: _default(field) for field in _fields(config)}
    default_values = flatten({name: _plain(hints[name], value) for name, value in defaults.items()})
    values = flatten(to_dict(config))
    return {path: value for path, value in values.items() if default_values.get(path) != value}


def fingerprint(config: Any) -> str:
    """Return the SHA-256 of the configuration, equal for equal ones on any machine."""
    return hashlib.sha256(json.dumps(to_dict(config), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Members:
    """An annotation of a field that accepts more in Python than in a configuration file.

    `objective: Annotated[Objective, Members(MaskedLM | CausalLM)]` takes any `Objective` in
    Python, and one of the two from a TOML file or a command line.
    """

    union: Any


@dataclass(frozen=True)
class _Shape:
    """The alternatives of a type: dataclasses, other types, readers of texts for dataclasses.

    Attributes:
        is_open: True if a function or another dataclass is taken as it is; see `Members`.
    """

    classes: tuple[type[Any], ...] = ()
    others: tuple[Any, ...] = ()
    readers: tuple[Callable[..., Any], ...] = ()
    is_open: bool = False


@functools.cache
def _shape(hint: Any) -> _Shape:
    match typing.get_origin(hint):
        case typing.Annotated:
            from pydantic import BeforeValidator

            inner, *notes = typing.get_args(hint)
            members = [note.union for note in notes if isinstance(note, Members)]
            shape = _shape(members[0] if members else inner)
            readers = tuple(note.func for note in notes if isinstance(note, BeforeValidator))
            if shape.classes:
                return dataclasses.replace(shape, readers=readers, is_open=bool(members))
            return shape if members else _Shape(others=(hint,))
        case typing.Union | types.UnionType:
            shapes = [_shape(member) for member in typing.get_args(hint)]
            return _Shape(
                tuple(cls for member in shapes for cls in member.classes),
                tuple(other for member in shapes for other in member.others),
                tuple(reader for member in shapes for reader in member.readers),
            )
        case _:
            if isinstance(hint, type) and dataclasses.is_dataclass(hint):
                return _Shape(classes=(hint,))
            return _Shape(others=(hint,))


# typing evaluates each text again, which would be most of the time of reading a configuration.
_hints: Callable[[Any], dict[str, Any]] = functools.cache(
    functools.partial(typing.get_type_hints, include_extras=True)
)


def _fields(config: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(config) if field.init]


def _kind(cls: type[Any]) -> str:
    """Return the name of a class within its union."""
    return str(getattr(cls, "kind", cls.__name__))


def _default(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field; MISSING if it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _shared(cls: type[Any], other: type[Any]) -> set[str]:
    """Return the fields that mean the same in two members: those of equal type and default."""
    defaults, hints = {field.name: _default(field) for field in _fields(other)}, _hints(other)
    return {
        field.name
        for field in _fields(cls)
        if field.name in defaults
        and _hints(cls)[field.name] == hints[field.name]
        and dataclasses.MISSING is not _default(field) == defaults[field.name]
    }


def _value(hint: Any, raw: Any, base: Any, location: str) -> Any:
    """Build a value of any type."""
    shape = _shape(hint)
    if isinstance(raw, Replacement):
        raw = _replacing(shape, raw, base, location)
    if types.NoneType in shape.others and raw in (None, NONE):
        return None
    item = _item(hint)
    if isinstance(raw, str) and (item is not None or shape.classes):
        raw = read_inline(raw)  # as in a TOML file
    if item is not None and raw in map(_kind, _shape(item).classes):
        raw = [raw]
    if item is not None and isinstance(raw, Mapping | list | tuple):
        return _items(item, raw, base or (), location)
    if item is not None and raw is not base:
        message = f"{raw!r} is given, but it must be {describe_type(hint)}"
        fix = _how_to_write(_shape(item), raw, join_path(location, "0"))
        raise ConfigError(message, where=location, fix=fix)
    if shape.classes:
        if isinstance(raw, str) and raw in map(_kind, shape.classes):
            raw = {"kind": raw}  # the name of a member alone
        if isinstance(raw, Mapping):
            if "kind" in raw and not any(hasattr(cls, "kind") for cls in shape.classes):
                return _leaf(hint, shape, raw["kind"], location)  # a text in place of a table
            member = _member(shape.classes, raw, base, location)
            return read(member, raw, base=base, where=location, union=shape.classes)
        of_python = callable(raw) or dataclasses.is_dataclass(raw)
        if isinstance(raw, shape.classes) or (shape.is_open and of_python):
            return raw
    return _leaf(hint, shape, raw, location)


def _replacing(shape: _Shape, raw: Replacement, base: Any, location: str) -> Any:
    """Return the new value with what it keeps of the old table: settings that both kinds share."""
    new = raw.new if isinstance(raw.new, Mapping) else {"kind": raw.new}
    if new["kind"] not in map(_kind, shape.classes):
        return raw.new  # a value of another type, such as "auto", or none that is allowed
    cls, other = (_member(shape.classes, tree, base, location) for tree in (new, raw.old))
    lost = {field.name for field in _fields(other)} - _shared(cls, other) | {"kind"}
    kept = {key: value for key, value in raw.old.items() if key not in lost}
    return merge(kept, new, location)


def _item(hint: Any) -> Any:
    """Return the type of the items of a tuple of dataclasses; None for another type."""
    arguments = typing.get_args(hint)
    is_tuple = typing.get_origin(hint) is tuple
    return arguments[0] if is_tuple and _shape(arguments[0]).classes else None


def _items(
    item: Any, raw: Tree | Iterable[Any], base: tuple[Any, ...], location: str
) -> tuple[Any, ...]:
    """Build a tuple of dataclasses: a list replaces it, a table such as {"0": …} changes items."""
    if not isinstance(raw, Mapping):
        return tuple(
            _value(item, value, None, join_path(location, str(index)))
            for index, value in enumerate(raw)
        )
    # Indices that may be changed, or added without a gap.
    count = len(base) + sum(str(len(base) + n) in raw for n in range(len(raw)))
    for key in raw:
        if key not in map(str, range(count)):
            message = f"the list has {quantity(len(base), 'item(s)')}, counted from 0"
            fix = f"Change one of them, or add {len(base)} and those that follow."
            raise ConfigError(message, where=join_path(location, key), fix=fix)
    old = [*base, *(None for _ in range(len(base), count))]
    return tuple(
        _value(item, raw[str(index)], below, join_path(location, str(index)))
        if str(index) in raw
        else below
        for index, below in enumerate(old)
    )


def _member(classes: tuple[type[Any], ...], raw: Tree, base: Any, location: str) -> type[Any]:
    """Return the class of a table: by its kind, else the base's, else the one without."""
    kinds = {_kind(cls): cls for cls in classes}
    if "kind" not in raw:
        if type(base) in classes:
            return type(base)
        unnamed = [cls for cls in classes if not hasattr(cls, "kind")]
        if len(classes) > 1 and len(unnamed) != 1:
            message = f"is missing: it must be one of {', '.join(kinds)}"
            raise ConfigError(message, where=join_path(location, "kind"))
        return unnamed[0] if unnamed else classes[0]
    kind = str(raw["kind"])  # a file may hold a list
    if kind not in kinds:
        raise _unknown("kind", kind, kinds, join_path(location, "kind"))
    return kinds[kind]


def _leaf(hint: Any, shape: _Shape, raw: Any, location: str) -> Any:
    """Build a value that is not a table, or a dataclass from a text."""
    from pydantic import ValidationError

    failure: ConfigError | None = None
    for other in shape.others:
        value = raw
        if other is int and isinstance(raw, str) and "." in raw:  # 1.000 may mean a thousand
            continue
        if other in (int, float) and isinstance(raw, bool):  # pydantic reads true as 1
            continue
        # A text for a tuple: "0.9, 0.98" and "[0.9, 0.98]" have two items.
        if isinstance(raw, str) and typing.get_origin(other) is tuple:
            text = raw.strip().removeprefix("[").removesuffix("]").strip().removesuffix(",")
            items = [item.strip().strip("\"'") for item in text.split(",")] if text else []
            value = items if all(items) else raw
        try:
            return _adapter(other).validate_python(value)
        except ValidationError:
            continue
    for reader in shape.readers:
        try:
            value = reader(str(raw) if type(raw) in (int, float) else raw)
        except ConfigError as error:
            failure = ConfigError(error.what, where=location, fix=error.advice)
            continue
        if isinstance(value, shape.classes):
            return value
    text = raw.isoformat() if hasattr(raw, "isoformat") else repr(raw)  # a date of a TOML file
    message = f"{text} is given, but it must be {describe_type(hint)}"
    raise failure or ConfigError(message, where=location, fix=_how_to_write(shape, raw, location))


def _how_to_write(shape: _Shape, raw: Any, location: str) -> str | None:
    """Return advice to choose a member of a union, or to set a field of a dataclass."""
    for cls in shape.classes:
        if not hasattr(cls, "kind"):
            return f"Set a part of it: {setting(f'{location}.{_fields(cls)[0].name}', 'VALUE')}."
    kinds = [_kind(cls) for cls in shape.classes]
    near = difflib.get_close_matches(str(raw), kinds, 1) or kinds
    return f"Write, for example, {setting(location, near[0])}." if near else None


@functools.cache
def _adapter(hint: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(hint)


def _unknown(
    kind: str, raw: str, names: Iterable[str], location: str, deeper: Iterable[str] = ()
) -> ConfigError:
    names = list(names)
    near = [*deeper, *difflib.get_close_matches(raw, names, 1)]
    guess = f"; did you mean {near[0]}?" if near else ""
    # A few names are all listed: "text" is near to "context", and may be meant for "question".
    fix = None if near and len(names) > 6 else f"Known here: {', '.join(names)}."
    error = UnknownKeyError if kind == "key" else ConfigError
    return error(f"unknown {kind} {raw!r}{guess}", where=location, fix=fix)


def _deeper(key: str, config: Any) -> list[str]:
    """Return the paths of the settings and tables of this name within a configuration."""
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        return []
    leaves = [path.split(".") for path in flatten(to_dict(config))]
    paths = {".".join(keys[: keys.index(key) + 1]) for keys in leaves if key in keys}
    return sorted(paths, key=lambda path: (path.count("."), path))


_WORDS = {
    int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path",
    types.NoneType: NONE,
}  # fmt: skip


def describe_type(hint: Any) -> str:
    """Describe the values of a type."""
    shape, arguments = _shape(hint), typing.get_args(hint)
    if shape.classes or shape.others != (hint,):
        kinds = [_kind(cls) for cls in shape.classes if hasattr(cls, "kind")]
        choices = [_one_of(kinds)] if kinds else []
        table = ["a table"] if len(kinds) < len(shape.classes) else []
        return " or ".join([*map(describe_type, shape.others), *table, *choices])
    match typing.get_origin(hint):
        case typing.Literal:
            return _one_of([*map(str, arguments)])
        case origin if origin is tuple:
            length = "any number" if Ellipsis in arguments else str(len(arguments))
            return f"a list of {length}, each {describe_type(arguments[0])}"
        case origin if origin is Mapping:
            return f"a table of names, each {describe_type(arguments[1])}"
        case _:
            return _WORDS.get(hint, str(hint))


def _one_of(names: list[str]) -> str:
    return f"one of {', '.join(names)}" if len(names) > 1 else names[0]


def _plain(hint: Any, value: Any) -> Any:
    """Return a value for JSON; a dataclass becomes a text if that reads as an equal one."""
    if dataclasses.is_dataclass(value):
        if [field.name for field in _fields(value)] == ["kind"]:
            return _kind(type(value))
        for reader in _shape(hint).readers if hint is not None else ():
            try:
                if (text := str(value)) and reader(text) == value:
                    return text
            except ConfigError:
                continue
        return to_dict(value)
    match value:
        case tuple() | list():
            item = _item(hint)
            return [_plain(item, entry) for entry in value]
        case Mapping():
            return {str(key): _plain(None, entry) for key, entry in value.items()}
        case Path():
            return str(value)
        case _ if callable(value):
            name = getattr(value, "__qualname__", "")
            return f"{value.__module__}.{name}" if name else repr(value)
        case _:
            return value


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


@dataclass(frozen=True)
class Setting:
    """A setting, as a command or a file can give it.

    Attributes:
        path: the dotted path; 0 is the first entry of a list.
        name: a common name that means the same, or "".
        kinds: the kinds of its table that have it, such as ("adamw", "lamb"); empty if all have.
        values: the values that it takes, in words.
        default: as a file would write it; "" if there is none, or if it is a table.
        meaning: of the docstring of its table: the entry in "Attributes:", or the first sentence.
    """

    path: str
    name: str
    kinds: tuple[str, ...]
    values: str
    default: str
    meaning: str


def list_settings(
    config: Any, aliases: Mapping[str, str] = types.MappingProxyType({})
) -> list[Setting]:
    """Return the settings of a configuration, in the order of its fields, defaults from its values.

    Settings of several kinds that differ in nothing but the kind are one.

    Args:
        aliases: dotted paths by common name.
    """
    # Of several names, the one that the path ends with.
    ordered = sorted(aliases.items(), key=lambda item: item[1].endswith(f".{item[0]}"))
    names = {path: name for name, path in ordered}
    merged = dict[tuple[str, str, str, str], tuple[str, ...]]()
    for entry in _settings(type(config), config, "", (), ""):
        key = (entry.path, entry.values, entry.default, entry.meaning)
        merged[key] = tuple(dict.fromkeys((*merged.get(key, ()), *entry.kinds)))
    return [
        Setting(path, names.get(path, ""), kinds, values, default, meaning)
        for (path, values, default, meaning), kinds in merged.items()
    ]


def _settings(
    cls: type[Any], config: Any, location: str, enclosing: tuple[type[Any], ...], kind: str
) -> Iterator[Setting]:
    hints, meanings = _hints(cls), _meanings(cls)
    for field in _fields(cls):
        if field.name == "kind":
            continue
        path, hint = join_path(location, field.name), hints[field.name]
        value = _default(field) if config is dataclasses.MISSING else getattr(config, field.name)
        default = ""
        if value is not dataclasses.MISSING:
            plain = _plain(hint, value)
            if isinstance(plain, dict):  # of a table its kind
                default = str(getattr(value, "kind", ""))
            elif not (isinstance(plain, list) and any(isinstance(item, dict) for item in plain)):
                default = inline(plain)
        members, prefix, entry = _tables(hint), path, value
        values, meaning = describe_type(hint), meanings.get(field.name)
        if not meaning:
            text = inspect.getdoc(members[0] if len(members) == 1 else cls) or ""
            meaning = " ".join(text.partition("\n\n")[0].split())
        yield Setting(path, "", (kind,) if kind else (), values, default, meaning)
        if typing.get_origin(hint) is tuple:
            members, prefix = _tables(typing.get_args(hint)[0]), f"{path}.0"
            entry = value[0] if isinstance(value, tuple) and value else dataclasses.MISSING
        for member in members:
            if member in enclosing:
                continue
            chosen = _kind(member) if len(members) > 1 and hasattr(member, "kind") else kind
            table = entry if type(entry) is member else dataclasses.MISSING
            yield from _settings(member, table, prefix, (*enclosing, cls), chosen)


def _meanings(cls: type[Any]) -> dict[str, str]:
    """Return the meaning of each field, from the part "Attributes:" of the docstrings."""
    meanings = dict[str, str]()
    for base in reversed(cls.__mro__):
        text = (inspect.getdoc(base) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
        for entry in re.split(r"\n(?= {4}\w)", text):
            names, colon, meaning = " ".join(entry.split()).partition(": ")
            if colon:
                meanings |= dict.fromkeys(names.split(", "), meaning)
    return meanings


def _tables(hint: Any) -> tuple[type[Any], ...]:
    """Return the classes of which a setting is a table; none if it is written as a text."""
    shape = _shape(hint)
    return () if shape.readers else shape.classes
