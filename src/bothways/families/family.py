"""What a family is to the model folder: its settings, its classes and its weight names in transformers' terms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from bothways.core.errors import FolderError
from bothways.families.keys import KeyTable
from bothways.model.config import EncoderConfig

HeadKind = Literal["masked", "pooler", "pair", "labels", "tags", "span", "choice"]


@dataclass(frozen=True)
class Architecture:
    """A class of transformers.

    Attributes:
        name: as `architectures` in `config.json` has it.
        heads: what it has beside the encoder.
        bare: whether its files leave out the family's prefix.
    """

    name: str
    heads: frozenset[HeadKind]
    bare: bool = False


@dataclass(frozen=True)
class Family:
    """Attributes:
    model_type: as `config.json` has it.
    keys: weight names.
    architectures: its classes, one for each set of heads that a folder can hold.
    read: (`config.json` as a tree, its path for messages) → our configuration; FolderError for what it cannot say.
    write: our configuration → the settings of `config.json`; none if the family cannot express it.
    """

    model_type: str
    keys: KeyTable
    architectures: tuple[Architecture, ...]
    read: Callable[[Mapping[str, Any], str], EncoderConfig]
    write: Callable[[EncoderConfig], dict[str, Any] | None]

    def architecture_named(self, names: Iterable[str]) -> Architecture | None:
        """The first of these classes that the family has."""
        known = {architecture.name: architecture for architecture in self.architectures}
        return next((known[name] for name in names if name in known), None)

    def architecture_with(self, heads: Iterable[str]) -> Architecture | None:
        """The class with exactly these heads."""
        wanted = frozenset(heads)
        return next((architecture for architecture in self.architectures if architecture.heads == wanted), None)


def read_number(raw: Mapping[str, Any], key: str, default: int | float, where: str) -> Any:
    """A setting that must be a number of the default's type; one that is absent has the default."""
    value, kind = raw.get(key, default), type(default)
    if isinstance(value, bool) or not isinstance(value, (int, kind)):
        raise FolderError(f"{key} must be {'a number' if kind is float else 'a whole number'}, not {value!r}", where=where)
    return kind(value)


def read_choice(raw: Mapping[str, Any], key: str, allowed: Mapping[Any, Any], default: Any, where: str) -> Any:
    """What a setting that must be one of the keys of `allowed` means; one that is absent has the default."""
    value = raw.get(key, default)
    if not isinstance(value, str | bool) or value not in allowed:
        choices = ", ".join(map(repr, allowed))
        raise FolderError(f"{key} {value!r} has no counterpart here: it must be one of {choices}", where=where)
    return allowed[value]
