"""The settings of `tokenizer_config.json`, and the special tokens that every encoder needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from bothways.core.advice import call
from bothways.core.errors import TokenizerError
from bothways.core.json_reader import read_object
from bothways.core.terminal import surrogate_in

CONFIG = "tokenizer_config.json"

D = TypeVar("D", bound="bool | None")

NAMES: dict[str, tuple[str, ...]] = {
    "pad": ("[PAD]", "<pad>"),
    "unknown": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
}
"""The customary special tokens by use: BERT's, then RoBERTa's."""

SETTINGS = {use: f"{'unk' if use == 'unknown' else use}_token" for use in NAMES}
"""Their keys in `tokenizer_config.json`."""


@dataclass(frozen=True)
class Specials:
    """Ids of the tokens that every encoder needs."""

    pad: int
    unknown: int
    cls: int
    sep: int
    mask: int


def find_specials(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], where: Path | str
) -> Specials:
    """Find the special tokens that the configuration names, or else the customary ones.

    Raises:
        TokenizerError: special tokens are missing.
    """
    size = backend.get_vocab_size()
    if size < len(NAMES):
        what = f"the vocabulary has {size} tokens, fewer than the {len(NAMES)} special tokens"
        fix = f"Train one: {call('tokenizer train', 'FILES', out='FOLDER')}"
        raise TokenizerError(what, where=where, fix=fix)
    specials, missing = dict[str, int](), list[str]()
    for use, customary in NAMES.items():
        named = name_in(config, SETTINGS[use])
        names = (named,) if named else customary
        ids = (backend.token_to_id(name) for name in names)
        match next((id for id in ids if id is not None), None):
            case None:
                missing.append(" or ".join(names))
            case id:
                specials[use] = id
    if missing:
        what = f"the vocabulary of {size} tokens lacks special tokens: {', '.join(missing)}"
        settings = ", ".join(SETTINGS.values())
        fix = f"Add them, or name those it has in tokenizer_config.json ({settings})."
        raise TokenizerError(what, where=where, fix=fix)
    return Specials(**specials)


def name_in(config: Mapping[str, Any], setting: str) -> str | None:
    """Return the special token of a setting, a text or a table; None if there is none."""
    match config.get(setting):
        case str(name) | {"content": str(name)}:
            return name
        case _:
            return None


def read_settings(file: Path) -> dict[str, Any]:
    """Return the object in `tokenizer_config.json` or a file like it; empty if there is no file.

    Raises:
        TokenizerError: it holds something else, or text that is not made of characters.
        ResourceError: it cannot be read.
    """
    if not file.exists():
        return {}
    settings = read_object(file, TokenizerError)
    half = surrogate_in(json.dumps(settings, ensure_ascii=False))
    if half is not None:
        raise TokenizerError(f"holds {half}", where=file, fix="Correct or remove it.")
    return settings


def flag(config: Mapping[str, Any], file: Path, key: str, default: D) -> bool | D:
    """Return a setting of the tokenizer in `file`; null means the default.

    Raises:
        TokenizerError: it is neither true nor false.
    """
    match config.get(key):
        case None:
            return default
        case bool(value):
            return value
        case value:
            where, fix = file.with_name(CONFIG), "Set it to true or to false, without quotes."
            raise TokenizerError(f"{key!r} is {value!r}", where=where, fix=fix)
