"""Tokens that a folder adds outside `tokenizer.json`, with the ids that transformers gives them.

`added_tokens_decoder` in `tokenizer_config.json`, or the older `added_tokens.json`, lists tokens
with ids. Settings such as `bos_token`, and `extra_special_tokens` (`additional_special_tokens` in
older files), name special tokens without ids; those missing from the vocabulary get the next ids,
in this order.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from bothways.core.errors import TokenizerError
from bothways.text.special_tokens import CONFIG, name_in, read_settings

NUMBERED, OLDER = "added_tokens_decoder", "added_tokens.json"
_EXTRA = ("extra_special_tokens", "additional_special_tokens")
_FLAGS = {"single_word", "lstrip", "rstrip", "normalized", "special"}


def add_numbered(backend: tokenizers.Tokenizer, config: Mapping[str, Any], file: Path) -> None:
    """Add the tokens that files next to `file` list with ids; flags in `added_tokens_decoder` win.

    Raises:
        TokenizerError: an entry is not a token with an id, or the token gets another id.
    """
    if config.get(NUMBERED) is None:
        where, known = file.with_name(OLDER), _contents(backend)
        stated = _older(
            read_settings(where), {token.content for token in _special_tokens(config, file)}, where
        )
    else:
        where, known = file.with_name(CONFIG), set()
        stated = _numbered(config[NUMBERED], where)
    backend.add_tokens([token for _, token in stated if token.content not in known])
    for id, token in stated:
        actual = backend.token_to_id(token.content)
        if actual != id:
            what = (
                f"gives the token {token.content!r} the id {id}; "
                f"with the vocabulary of the folder that is {actual}"
            )
            raise TokenizerError(
                what, where=where, fix="Fetch the vocabulary that it goes with, or correct the id."
            )


def add_special(backend: tokenizers.Tokenizer, config: Mapping[str, Any], file: Path) -> None:
    """Add the special tokens that are named without ids and are not added tokens yet.

    Raises:
        TokenizerError: an entry is not a token.
    """
    known = _contents(backend)
    backend.add_tokens(
        [token for token in _special_tokens(config, file) if token.content not in known]
    )


def _older(
    table: Mapping[str, Any], special: set[str], where: Path
) -> list[tuple[int, tokenizers.AddedToken]]:
    """Return the tokens of `added_tokens.json` by id; text is normalised before ordinary ones."""
    stated = []
    for content, id in table.items():
        if type(id) is not int:
            what = f"gives the token {content!r} the id {id!r}"
            raise TokenizerError(what, where=where, fix="Give it a whole number.")
        flags = {"special": content in special, "normalized": content not in special}
        stated.append((id, tokenizers.AddedToken(content, **flags)))
    return sorted(stated, key=operator.itemgetter(0))


def _numbered(table: Any, where: Path) -> list[tuple[int, tokenizers.AddedToken]]:
    """Return the tokens of `added_tokens_decoder` by id."""
    stated = []
    for id, entry in table.items() if isinstance(table, dict) else [("", table)]:
        token = _token(entry)
        if token is None or not id.isdecimal():
            what = f"{NUMBERED!r} holds {entry!r} under {id!r}"
            fix = 'Write "ID": {"content": "TOKEN", "special": true} for each token.'
            raise TokenizerError(what, where=where, fix=fix)
        stated.append((int(id), token))
    return sorted(stated, key=operator.itemgetter(0))


def _contents(backend: tokenizers.Tokenizer) -> set[str]:
    """Return the contents of the added tokens of a backend."""
    return {token.content for token in backend.get_added_tokens_decoder().values()}


def _special_tokens(config: Mapping[str, Any], file: Path) -> list[tokenizers.AddedToken]:
    """Return the special tokens with a use, `bos_token` and `eos_token` first, then the others."""
    named = [
        config[key]
        for key in ("bos_token", "eos_token", *config)
        if key.endswith("_token") and name_in(config, key)
    ]
    tokens = []
    for entry in (*named, *_extras(config)):
        token = _token({"content": entry} if isinstance(entry, str) else entry, special=True)
        if token is None:
            what = f"names the special token {entry!r}"
            fix = 'Write "TOKEN", or {"content": "TOKEN"} with flags that are true or false.'
            raise TokenizerError(what, where=file.parent, fix=fix)
        tokens.append(token)
    return tokens


def _extras(config: Mapping[str, Any]) -> Iterable[Any]:
    """Return the special tokens without a use, from a list or a table of names."""
    extras: Any = next((config[key] for key in _EXTRA if config.get(key)), [])
    if isinstance(extras, dict):
        return extras.values()
    return extras if isinstance(extras, list) else [extras]


def _token(entry: Any, **others: bool) -> tokenizers.AddedToken | None:
    """Return the added token of an entry, with further flags; None if the entry is invalid."""
    match entry:
        case {"content": str(content), **settings}:
            flags = {name: value for name, value in settings.items() if name in _FLAGS}
            right = all(isinstance(value, bool) for value in flags.values())
            return tokenizers.AddedToken(content, **(flags | others)) if right else None
        case _:
            return None
