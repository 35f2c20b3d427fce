"""Tokens added to a vocabulary, and tokens of one vocabulary in the form of another.

WordPiece and Unigram get a word as an entry of their model, so that it is found where words are
looked up: WordPiece takes the longest entry, and Unigram's new entry has a higher score than the
pieces that it replaces. Byte-level BPE has no entry without merges, which would change other words;
it gets an added token that matches whole words only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import tokenizers

from bothways.core.errors import ConfigError, TokenizerError
from bothways.core.terminal import listed
from bothways.text.tokenizer import Tokenizer, byte_of, is_spaceless

_PREFERRED = 1e-3
"""The score of a new Unigram entry above the sum of its pieces' scores."""


class Form(NamedTuple):
    """A token without the marks of its vocabulary."""

    text: str
    begins: bool
    """True at the beginning of a word: "the", "Ġthe" and "▁the", not "##the"."""


def with_words(tokenizer: Tokenizer, words: Sequence[str]) -> Tokenizer:
    """Return the tokenizer with words appended to the vocabulary; known ones are skipped.

    Raises:
        ConfigError: a word consists of several words for this tokenizer.
        TokenizerError: no word is new.
    """
    tokens = _new_tokens(tokenizer, words)
    spec: dict[str, Any] = json.loads(tokenizer.backend.to_str())
    next_id = tokenizer.size
    vocabulary = spec["model"]["vocab"]
    match tokenizer.kind:
        case "WordPiece":
            vocabulary |= {token: next_id + n for n, token in enumerate(tokens)}
        case "Unigram" if len(vocabulary) == next_id:
            scores = dict(map(tuple, vocabulary))
            lowest, split = min(scores.values()), tokenizer.backend.model.tokenize
            for token in tokens:
                score = sum(scores.get(piece.value, lowest) for piece in split(token))
                vocabulary.append([token, score + _PREFERRED])
        case _:
            backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
            flags = {"lstrip": True, "normalized": False}
            backend.add_tokens(
                [
                    tokenizers.AddedToken(word, single_word=not is_spaceless(word), **flags)
                    for word in tokens
                ]
            )
            return Tokenizer(backend, tokenizer.specials, tokenizer.flat, tokenizer.words)
    backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
    return Tokenizer(backend, tokenizer.specials, tokenizer.flat, tokenizer.words)


def form_of(tokenizer: Tokenizer, token: str) -> Form | None:
    """Return a token without marks; None for special tokens and parts of characters."""
    id = tokenizer.id(token)
    if id is None or tokenizer.special[id] or id == tokenizer.specials.unknown:
        return None
    added = tokenizer.backend.get_added_tokens_decoder().values()
    if token in {added_token.content for added_token in added}:
        return Form(token, not is_spaceless(token))
    match tokenizer.kind:
        case "BPE" if all(character in byte_of() for character in token):
            raw = bytes(byte_of()[character] for character in token)
            text = raw.decode("utf-8", "ignore")
            return Form(text.lstrip(" "), text.startswith(" ")) if text.encode() == raw else None
        case "WordPiece":
            return Form(token.removeprefix("##"), not token.startswith("##"))
        case _:
            return Form(token.removeprefix("▁"), token.startswith("▁"))


def pieces_of(tokenizer: Tokenizer, form: Form) -> list[int]:
    """Return the ids that a vocabulary has for a form, without unknown ones.

    Example: "anfield" in BERT's vocabulary → those of an, ##field.
    """
    normalizer = tokenizer.backend.normalizer
    text = form.text if normalizer is None else normalizer.normalize_str(form.text)
    text = text.strip().strip("▁")
    match tokenizer.kind:
        case "BPE":
            characters = {byte: character for character, byte in byte_of().items()}
            raw = (" " if form.begins else "") + text
            marked = "".join(characters[byte] for byte in raw.encode())
        case "WordPiece":
            marked = text if form.begins else f"##{text}"
        case _:
            marked = ("▁" if form.begins else "") + text
    if not text:
        return []
    ids = [token.id for token in tokenizer.backend.model.tokenize(marked)]
    return [id for id in ids if id != tokenizer.specials.unknown]


def _new_tokens(tokenizer: Tokenizer, words: Sequence[str]) -> list[str]:
    """Return words as entries of the vocabulary, without those that it has."""
    tokens, several, backend = dict[str, None](), list[str](), tokenizer.backend
    for word in words:
        if tokenizer.kind == "BPE":
            pieces = word.split()
        else:
            plain = word if backend.normalizer is None else backend.normalizer.normalize_str(word)
            cut = backend.pre_tokenizer
            pieces = [plain] if cut is None else [piece for piece, _ in cut.pre_tokenize_str(plain)]
            if tokenizer.kind == "Unigram" and is_spaceless(word):
                pieces = [piece.removeprefix("▁") for piece in pieces]
        if len(pieces) != 1:
            several.append(word)
        elif tokenizer.kind != "BPE" and tokenizer.id(pieces[0]) is None:
            tokens[pieces[0]] = None
        elif tokenizer.kind == "BPE" and len(tokenizer.encode(" " + word)) > 1:
            tokens[word] = None
    if several:
        spaced = [word for word in several if len(word.split()) > 1]
        message = f"several words on a line: {listed(list(map(repr, spaced)))}"
        fix = "Give one word a line: a vocabulary holds no white space."
        if not spaced:
            message = (
                f"for this tokenizer these are several words: {listed(list(map(repr, several)))}"
            )
            fix = (
                "Leave them out: it divides text at punctuation marks and, if it is BERT's, "
                "between Chinese characters, before it looks up words."
            )
        raise ConfigError(message, where="vocabulary", fix=fix)
    if not tokens:
        message = f"the vocabulary already has every word: {listed(list(map(repr, words)))}"
        raise TokenizerError(message, where="vocabulary", fix="Give words that it splits.")
    return list(tokens)
