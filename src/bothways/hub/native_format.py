"""Our own folder format, for a model that no class of transformers can be.

`config.json` has the model type "bothways" and, under a key of that name, our configuration and
heads; weights have our own names. Everything else (tokenizer, labels, card, record) is as in any
other folder. transformers does not open it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bothways.core.config import reader as configs
from bothways.core.config.tree import join_path
from bothways.core.errors import ConfigError, FolderError
from bothways.model.config import EncoderConfig
from bothways.model.families.config_rules import LARGEST, check_size
from bothways.model.families.family import Architecture
from bothways.model.families.weight_names import KeyTable, Rename
from bothways.model.heads import HEADS, Head
from bothways.model.init import without_weights
from bothways.model.model import Model

NATIVE = "bothways"
"""The model type, and the key of our configuration in `config.json`."""


def native_keys(heads: Iterable[Head]) -> KeyTable:
    """Return the names of the tensors: our own, for every head of the library and for these."""
    kinds = dict.fromkeys([*HEADS, *(head.kind for head in heads)])
    renames = (Rename(f"heads.{kind}", f"heads.{kind}") for kind in kinds)
    return KeyTable("", (Rename("encoder", "encoder"), *renames))


@dataclass(frozen=True)
class NativeConfig:
    """The content of the key.

    Attributes:
        encoder: the encoder's configuration.
        heads: the heads of the folder, at most one of each kind.
    """

    encoder: EncoderConfig
    heads: tuple[Head, ...] = ()

    def __post_init__(self) -> None:
        kinds = [head.kind for head in self.heads]
        if len(set(kinds)) < len(kinds):
            message = f"must hold at most one head of each kind, not {', '.join(kinds)}"
            raise ConfigError(message, where="heads")


def native_architecture(heads: Iterable[Head]) -> Architecture:
    """Return the stand-in for a class of transformers."""
    return Architecture("bothways.Model", frozenset(head.kind for head in heads), own=True)


def native_settings(config: EncoderConfig, heads: tuple[Head, ...]) -> dict[str, Any]:
    """Return the content of `config.json`, without labels."""
    return {
        "architectures": [native_architecture(heads).name],
        "model_type": NATIVE,
        "dtype": "float32",
        NATIVE: configs.to_dict(NativeConfig(config, heads)),
    }


def read_native(
    raw: Mapping[str, Any], file: Path, custom: Iterable[Head] = ()
) -> tuple[EncoderConfig, tuple[Head, ...]]:
    """Return the encoder and the heads that a `config.json` in our own format describes.

    Args:
        custom: heads from outside the library, which the file may name.

    Raises:
        FolderError: a key or value is missing, unknown or malformed; it has the dotted path.
    """
    tree = raw.get(NATIVE)
    if not isinstance(tree, Mapping):
        message = f"{NATIVE}: must be an object with encoder and heads, not {tree!r:.40}"
        raise FolderError(message, where=file, fix="Save the model again, or copy the file again.")
    custom_heads: dict[str, Head] = {head.kind: head for head in custom if head.kind not in HEADS}
    tree, outside = _without(tree, custom_heads, file)
    try:
        config = configs.read(NativeConfig, tree, where=NATIVE)
        _compare(tree, configs.to_dict(config), NATIVE)
        check_size(config.encoder, f"{NATIVE}.encoder")
        # Impossible shapes are found by building, which allocates nothing here.
        with without_weights():
            Model(config.encoder, (*config.heads, *outside))
    except ConfigError as error:
        raise FolderError(f"{error.where}: {error.what}", where=file, fix=error.fix) from error
    return config.encoder, (*config.heads, *outside)


def _without(
    tree: Mapping[str, Any], custom_heads: Mapping[str, Head], file: Path
) -> tuple[Mapping[str, Any], list[Head]]:
    """Return the tree without the heads that are given, and these heads."""
    entries, remaining, outside = tree.get("heads"), [], []
    if not custom_heads or not isinstance(entries, list):
        return tree, []
    for entry in entries:
        head = custom_heads.get(str(entry.get("kind") if isinstance(entry, Mapping) else entry))
        if head is None:
            remaining.append(entry)
        elif entry in (head.kind, configs.to_dict(head)):
            outside.append(head)
        else:
            message = f"{NATIVE}.heads: holds {entry!r:.80}, and {configs.to_dict(head)} is given"
            raise FolderError(
                message, where=file, fix="Give the head that the model was saved with."
            )
    return {**tree, "heads": remaining}, outside


def _compare(raw: Any, parsed: Any, location: str) -> None:
    """Refuse values of another type, which the config reader accepts for the command line."""
    if isinstance(raw, Mapping) and isinstance(parsed, Mapping):
        for key in raw:
            _compare(raw[key], parsed[key], join_path(location, str(key)))
    elif isinstance(raw, list) and isinstance(parsed, list) and len(raw) == len(parsed):
        for at, pair in enumerate(zip(raw, parsed, strict=True)):
            _compare(*pair, join_path(location, str(at)))
    elif isinstance(raw, Mapping) and isinstance(parsed, str):
        pass  # {"kind": "masked"} is written as "masked"
    elif type(raw) is not type(parsed) and not (type(raw) is int and type(parsed) is float):
        raise ConfigError(f"must be {parsed!r:.40}, not {raw!r:.40}", where=location)
    elif isinstance(parsed, int | float) and not abs(parsed) <= LARGEST:
        raise ConfigError(f"must be at most {LARGEST:,}, not {raw!r:.40}", where=location)
