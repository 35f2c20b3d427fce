"""Tokens that a folder adds to its vocabulary outside `tokenizer.json`, with the ids that transformers gives them.

With an id each they stand in `added_tokens_decoder` of `tokenizer_config.json`, with their flags, or, where that is missing, in
the older `added_tokens.json`. Without an id special tokens stand in `extra_special_tokens` (`additional_special_tokens` before)
and in settings such as `bos_token`; what the vocabulary lacks of these gets the next ids, in that order from the last.
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
    """Adds the tokens whose ids are stated beside `file`; the flags of `added_tokens_decoder` count over the backend's own.

    Raises:
        TokenizerError: an entry that is no token with an id, or an id that the token does not get.
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
        found = backend.token_to_id(token.content)
        if found != id:
            what = f"gives the token {token.content!r} the id {id}; with the vocabulary beside it that is {found}"
            raise TokenizerError(
                what, where=where, fix="Fetch the vocabulary that it goes with, or correct the id."
            )


def add_special(backend: tokenizers.Tokenizer, config: Mapping[str, Any], file: Path) -> None:
    """Adds the special tokens that are named without an id, where they are not added tokens yet.

    Raises:
        TokenizerError: one that is no token.
    """
    known = _contents(backend)
    backend.add_tokens(
        [token for token in _special_tokens(config, file) if token.content not in known]
    )


def _older(
    table: Mapping[str, Any], special: set[str], where: Path
) -> list[tuple[int, tokenizers.AddedToken]]:
    """The tokens of `added_tokens.json`, from the lowest id on; what is not special is found in the normalised text."""
    stated = []
    for content, id in table.items():
        if type(id) is not int:
            raise TokenizerError(
                f"gives the token {content!r} the id {id!r}",
                where=where,
                fix="Give it a whole number.",
            )
        stated.append(
            (
                id,
                tokenizers.AddedToken(
                    content, special=content in special, normalized=content not in special
                ),
            )
        )
    return sorted(stated, key=operator.itemgetter(0))


def _numbered(table: Any, where: Path) -> list[tuple[int, tokenizers.AddedToken]]:
    """The tokens of `added_tokens_decoder`, from the lowest id on."""
    stated = []
    for id, entry in table.items() if isinstance(table, dict) else [("", table)]:
        token = _token(entry)
        if token is None or not id.isdecimal():
            what = f"{NUMBERED!r} holds {entry!r} under {id!r}"
            raise TokenizerError(
                what,
                where=where,
                fix='Write "ID": {"content": "TOKEN", "special": true} for each token.',
            )
        stated.append((int(id), token))
    return sorted(stated, key=operator.itemgetter(0))


def _contents(backend: tokenizers.Tokenizer) -> set[str]:
    """What the added tokens of a backend are called."""
    return {token.content for token in backend.get_added_tokens_decoder().values()}


def _special_tokens(config: Mapping[str, Any], file: Path) -> list[tokenizers.AddedToken]:
    """Those with a use, the first and the last of a text before the others, then those without."""
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
    """Special tokens without a use of their own, from a list, or from a table of names."""
    extras: Any = next((config[key] for key in _EXTRA if config.get(key)), [])
    if isinstance(extras, dict):
        return extras.values()
    return extras if isinstance(extras, list) else [extras]


def _token(entry: Any, **others: bool) -> tokenizers.AddedToken | None:
    """An added token as a file describes it, with other flags; none if that is no description of one."""
    match entry:
        case {"content": str(content), **said}:
            flags = {name: value for name, value in said.items() if name in _FLAGS}
            right = all(isinstance(value, bool) for value in flags.values())
            return tokenizers.AddedToken(content, **(flags | others)) if right else None
        case _:
            return None
