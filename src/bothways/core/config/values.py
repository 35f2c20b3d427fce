"""Plain values before they have types: settings as trees and TOML files, arguments, ranges."""

from __future__ import annotations

import contextlib
import difflib
import errno
import functools
import importlib
import inspect
import json
import math
import numbers
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, get_args

from bothways.core.errors import ConfigError, UnknownKeyError, argument

Tree = Mapping[str, Any]
P = ParamSpec("P")
R = TypeVar("R")


def parse_overrides(overrides: Tree | Iterable[str]) -> dict[str, Any]:
    """Return values by dotted paths, or texts such as "encoder.depth=6", as a tree.

    They are in any order: a table comes before its settings.

    Example: {"encoder.depth": 6} → {"encoder": {"depth": 6}}.

    Raises:
        ConfigError: a text without a key or "=".
    """
    values = overrides if isinstance(overrides, Mapping) else split_overrides(overrides)
    tree: dict[str, Any] = {}
    for path, value in sorted(values.items(), key=lambda item: item[0].count(".")):
        leaf = value
        for key in reversed(path.split(".")):
            leaf = {key: leaf}
        tree = merge(tree, leaf)
    return tree


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
                folder = os.path.isdir(text)
                message = (
                    f"{text!r} is a {'folder' if folder else 'file'}, and settings follow here"
                )
                name = argument(corpus="FOLDER") if folder else argument(dev="FILE")
                fix = f"Give it by its name, such as {name}; the help of the command lists all."
            raise ConfigError(message, fix=fix)
        path, value = path.strip(), value.strip()
        if len(value) > 1 and value[0] == value[-1] == '"':
            # A text that JSON cannot read stays as it is.
            with contextlib.suppress(ValueError):
                value = str(json.loads(value))
        # Set anew, so that the order is that of the last settings.
        values.pop(path, None)
        # Without its table, earlier settings below the path have no place.
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
    if isinstance(low, Mapping) and (isinstance(high, Mapping) or str(high).isidentifier()):
        # A name is the kind of a table: a table of this kind, or without one, keeps its settings.
        kind = high.get("kind") if isinstance(high, Mapping) else high
        if kind not in (NONE, None):
            if low.get("kind", kind) != kind:
                return Replacement(high, low)
            high = {"kind": kind} if isinstance(high, str) else high
    if not isinstance(high, Mapping):
        return high
    match low:
        case Mapping():
            return merge(low, high, location)
        case "none":  # a file without this table
            return high
        case str():  # the short form of a table: "linear" is {kind = "linear"}
            return merge({"kind": low}, high, location)
        case list():
            table = {str(index): item for index, item in enumerate(low)}
            # Items may be added without a gap.
            count = len(low) + sum(str(len(low) + n) in high for n in range(len(high)))
            for key in high.keys() - {*map(str, range(count))}:
                message = f"there are items 0 to {len(low) - 1}"
                fix = f"Change one of them, or add {len(low)} and those that follow."
                raise ConfigError(message, where=join_path(location, key), fix=fix)
            merged = merge(table, high, location)
            return [merged[str(index)] for index in range(count)]
        case _:
            return high


@dataclass(frozen=True)
class Replacement:
    """A table, or its kind, that replaces one of another kind, but for settings that both share."""

    new: Tree | str
    old: Tree


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
    tables: dict[str, Any] = {
        key: value
        for key, value in table.items()
        if isinstance(value, Mapping)
        or (isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value))
    }
    lines = [f"{_key(key)} = {inline(value)}" for key, value in table.items() if key not in tables]
    for key, value in tables.items():
        full = f"{name}.{_key(key)}" if name else _key(key)
        single = isinstance(value, Mapping)
        for entry in [value] if single else value:
            lines += ["", f"[{full}]" if single else f"[[{full}]]", *_table(entry, full)]
    return lines


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


_BOUNDS = {"[": "at least", "(": "above", "]": "at most", ")": "below"}


def require_range(
    interval: str, location: str = "", /, *, fix: str | None = None, **numbers: float | int | None
) -> None:
    """Check that settings are in an interval; None passes.

    Args:
        interval: such as "(0, 1]", above 0 and at most 1; "[0, inf]" allows infinity, "[0, inf)"
            does not.
        location: the dotted path of their table.
        fix: what to do instead.
        numbers: the values by the names of their settings.

    Raises:
        ConfigError: a value is outside, NaN or no number.
    """
    opening, closing, (low, high) = interval[0], interval[-1], interval[1:-1].split(", ")
    minimum, maximum = float(low), float(high)
    for name, number in numbers.items():
        if isinstance(number, str):  # which cannot be compared
            raise ConfigError(f"must be a number, not {number!r}", where=join_path(location, name))
        if number is None or (
            (number >= minimum if opening == "[" else number > minimum)
            and (number <= maximum if closing == "]" else number < maximum)
        ):
            continue
        bounds = f"{_BOUNDS[opening]} {low}"
        if maximum == math.inf:
            bounds += " and finite" * (number == math.inf)
        elif opening + closing == "[]":
            bounds = f"from {low} to {high}"
        else:
            bounds += f" and {_BOUNDS[closing]} {high}"
        message = f"must be {bounds}, not {number}"
        raise ConfigError(message, where=join_path(location, name), fix=fix)


def require_at_least(least: float, location: str = "", /, **numbers: float | int | None) -> None:
    """Check that settings are at least `least` and finite, as `require_range`."""
    require_range(f"[{least}, inf)", location, fix=None, **numbers)


def require_choice(choices: object, location: str, *values: object, fix: str | None = None) -> None:
    """Check that values are among the choices of a `Literal`, or a union of these; None passes.

    Args:
        location: the name of the parameter.
        fix: advice instead of the list of choices.

    Raises:
        ConfigError: a value is none of them.
    """
    allowed = [name for kind in get_args(choices) for name in get_args(kind) or (kind,)]
    for value in values:
        if value is not None and value not in allowed:
            fix = fix or f"Choose one of {', '.join(allowed)}."
            raise ConfigError(f"unknown {location} {value!r}", where=location, fix=fix)


def require_seed(**seeds: int | None) -> None:
    """Check that seeds have at most 62 bits; arguments and errors as `require_range`."""
    for name, seed in seeds.items():
        if seed is not None and not -(2**62) <= seed <= 2**62:
            raise ConfigError(f"must be from -2**62 to 2**62, not {seed}", where=name)


def is_integer(text: str) -> bool:
    """Return True for digits that `int` converts: at most 4,300."""
    return len(text) <= 4300 and text.isdecimal()


_KINDS: dict[str, tuple[type, str]] = {
    "bool": (int, "True or False"),
    "int": (numbers.Integral, "a whole number"),
    "float": (numbers.Real, "a number"),
    "str": (str, "a text"),
    "Path": (os.PathLike, "a path"),
    "None": (type(None), "None"),
}
"""Kinds of arguments by their annotation: their types, and their names in messages."""


def _has_kind(value: Any, kind: str) -> bool:
    # numpy's booleans are known by their names. 0 and 1 are flags, too; a flag is not a number.
    is_flag = type(value).__name__ in {"bool", "bool_"}
    if kind == "bool":
        return is_flag or (isinstance(value, int) and value in (0, 1))
    is_nan = isinstance(value, numbers.Real) and value != value  # noqa: PLR0124
    return isinstance(value, _KINDS[kind][0]) and not is_flag and not is_nan


_MODELS = {"model", "teacher", "student"}
"""Arguments that are often given as objects, and are names, which a run or an index records."""


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Check plain arguments of a public function before it runs; others it reads itself.

    Raises:
        ConfigError: an argument that is annotated with plain kinds alone has another one, as a
            `length="12"`, which would fail later and elsewhere; or a name is too long for a file.
            A setting that is unknown is near to the name of an argument, as `lenght=12`.
    """
    parameters = inspect.signature(function).parameters
    kinds = {name: str(p.annotation).split(" | ") for name, p in parameters.items()}
    kinds = {name: words for name, words in kinds.items() if _KINDS.keys() >= set(words)}
    kinds.pop("device", None)  # also given as an object

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        arguments = dict(zip(parameters, args, strict=False)) | kwargs
        for name in filter(arguments.__contains__, kinds):
            value, words = arguments[name], kinds[name]
            if not any(_has_kind(value, word) for word in words):
                plain = isinstance(value, str | int | float)
                allowed = " or ".join(_KINDS[word][1] for word in words)
                fix = None
                if name in _MODELS:
                    allowed = "a model folder or a Hub id"
                    fix = "Name its folder, or save it: bothways.save_model(folder, model, …)."
                message = f"must be {allowed}, not {repr(value) if plain else type(value).__name__}"
                raise ConfigError(message, where=name, fix=fix)
        try:
            return function(*args, **kwargs)
        except UnknownKeyError as error:
            name = str(error.where)
            names = [key for key, p in parameters.items() if p.kind is not p.VAR_KEYWORD]
            near = name in kwargs and difflib.get_close_matches(name, names, 1, 0.7)
            if not near:
                raise
            message = f"unknown argument {name!r}; did you mean {near[0]}?"
            raise ConfigError(message, where=name) from None
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            raise ConfigError("is longer than a file name can be", where=error.filename) from error

    return call
