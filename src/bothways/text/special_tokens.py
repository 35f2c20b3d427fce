"""The special tokens that every encoder needs, by their use: what they are called, and which of a vocabulary they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from bothways.core.errors import TokenizerError

NAMES: dict[str, tuple[str, ...]] = {
    "pad": ("[PAD]", "<pad>"),
    "unknown": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
}
"""What the special tokens are called, by their use: BERT's name, then RoBERTa's."""

SETTINGS = {
    "pad": "pad_token",
    "unknown": "unk_token",
    "cls": "cls_token",
    "sep": "sep_token",
    "mask": "mask_token",
}
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
    """The special tokens by the names that the configuration gives them, or else by custom.

    Raises:
        TokenizerError: those that are missing, by name; a vocabulary with fewer tokens than that.
    """
    size = backend.get_vocab_size()
    if size < len(NAMES):
        what = f"the vocabulary has {size} tokens, fewer than the {len(NAMES)} special tokens that it must hold"
        raise TokenizerError(
            what, where=where, fix="Train one: bothways tokenizer train FILES --out FOLDER"
        )
    found, missing = dict[str, int](), list[str]()
    for use, customary in NAMES.items():
        named = name_in(config, SETTINGS[use])
        names = (named,) if named else customary
        ids = (backend.token_to_id(name) for name in names)
        match next((id for id in ids if id is not None), None):
            case None:
                missing.append(" or ".join(names))
            case id:
                found[use] = id
    if missing:
        what = f"the vocabulary of {size} tokens lacks special tokens: {', '.join(missing)}"
        fix = f"Add them, or name those it has in tokenizer_config.json ({', '.join(SETTINGS.values())})."
        raise TokenizerError(what, where=where, fix=fix)
    return Specials(**found)


def name_in(config: Mapping[str, Any], setting: str) -> str | None:
    """The special token that a `tokenizer_config.json` names, as a text or as a table; none if it names none."""
    match config.get(setting):
        case str(name) | {"content": str(name)}:
            return name
        case _:
            return None
