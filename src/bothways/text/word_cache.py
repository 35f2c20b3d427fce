"""Real text repeats its words: tokenize each distinct piece of text once, then look it up.

This is exact only where a tokenizer never looks across the cuts between pieces. `cutter` says where that is so:

BERT (BertNormalizer, BertPreTokenizer, WordPiece). Pieces are runs without white space, ASCII punctuation and ideographs, or
one ASCII punctuation mark, or one ideograph. The normaliser works on single characters, but for the canonical reordering of
combining marks, which never crosses a character of combining class 0; space, newline, tab, ASCII punctuation and ideographs
are of class 0, and none of them vanishes. After it, the pre-tokenizer breaks at white space, around each punctuation mark, and
around each ideograph, which the normaliser has put between spaces. WordPiece sees one word at a time.

Byte-level BPE (no normaliser, ByteLevel with GPT-2's expression, BPE without dropout). A piece begins at a run of spaces that
follows a visible character. No alternative of the expression holds a space after a visible character, and the only one that
looks ahead ("white space not before a visible character") looks no further than the run of white space it stands in, which
lies in one piece. A prefix space is put only before a text that does not begin with white space: the first piece.

Added tokens are found in the raw text before all that. They must not hold white space, nor reach into it where it counts, and
for BERT begin with ASCII punctuation, so that the expression meets them where the backend does. Everything else goes through
the backend, text by text.
"""

from __future__ import annotations

import functools
import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers
from typing_extensions import assert_never

_PUNCTUATION = r"!-/:-@\[-`{-~"
_IDEOGRAPHS = r"\u3400-\u4DBF\u4E00-\u9FFF\uF900-\uFAFF\U00020000-\U0002A6DF"
_SPACED = re.compile(r" *[^ ]+(?:(?<=\s) +[^ ]+)*| +")

MEMORY = 64 * 2**20
"""Bytes of known pieces, about; when they are exceeded, all are forgotten. A piece costs `_ENTRY` and 8 a character."""
_ENTRY = 200


@dataclass(frozen=True)
class BertWords:
    """Pieces of a BERT tokenizer, as this expression finds them."""

    expression: re.Pattern[str]


@dataclass(frozen=True)
class SpacedWords:
    """Pieces of a byte-level BPE tokenizer, as this expression finds them."""

    expression: re.Pattern[str]


Cutter = BertWords | SpacedWords


def cutter(spec: Mapping[str, Any]) -> Cutter | None:
    """Where the tokenizer of this `tokenizer.json` can be cut without changing an id; none where that is not proved."""
    added = spec["added_tokens"]
    if any(re.search(r"\s", token["content"]) for token in added):
        return None
    match spec["normalizer"], spec["pre_tokenizer"], spec["model"]:
        case {"type": "BertNormalizer"} as normalizer, {"type": "BertPreTokenizer"}, {
            "type": "WordPiece"
        }:
            if all(_stands_alone(token) for token in added):
                return BertWords(
                    bert_words(
                        [token["content"] for token in added], normalizer["handle_chinese_chars"]
                    )
                )
        case None, {"type": "ByteLevel", "use_regex": True}, {"type": "BPE", "dropout": None}:
            if not any(token["rstrip"] for token in added):
                return SpacedWords(_SPACED)
    return None


def _stands_alone(token: Mapping[str, Any]) -> bool:
    return not (token["normalized"] or token["single_word"]) and bool(
        re.match(f"[{_PUNCTUATION}]", token["content"])
    )


def bert_words(added: list[str], spaces_ideographs: bool) -> re.Pattern[str]:
    """Finds words (runs without white space, ASCII punctuation and ideographs), added tokens, single characters.

    Args:
        added: tokens to find whole; each begins with ASCII punctuation. The longest wins, as in the backend.
        spaces_ideographs: whether ideographs stand alone.
    """
    alone = _PUNCTUATION + (_IDEOGRAPHS if spaces_ideographs else "")
    tokens = [re.escape(token) for token in sorted(added, key=len, reverse=True)]
    return re.compile("|".join([rf"[^{alone} \n\t]+", *tokens, f"[{alone}]"]))


class PieceTable(dict[str, bytes]):
    """Piece → its ids, as the bytes of native 32-bit integers. A piece that is not in it is tokenized when it is looked up."""

    def __init__(self, backend: tokenizers.Tokenizer, cut: Cutter) -> None:
        super().__init__()
        self._find = cut.expression.findall
        self._room = MEMORY
        match cut:
            case BertWords():
                self._tokenize = functools.partial(_tokenize_word, backend)
            case SpacedWords():
                self._tokenize = functools.partial(_tokenize, backend)
            case _:
                assert_never(cut)

    def rows(self, texts: list[str]) -> list[bytes]:
        """For each text its ids, as the bytes of native 32-bit integers."""
        return [b"".join(map(self.__getitem__, self._find(text))) for text in texts]

    def __missing__(self, piece: str) -> bytes:
        self._room -= _ENTRY + 8 * len(piece)
        if self._room < 0:
            self.clear()
            self._room = MEMORY
        ids = self[piece] = array("i", self._tokenize(piece)).tobytes()
        return ids


def _tokenize(backend: tokenizers.Tokenizer, piece: str) -> list[int]:
    return backend.encode(piece, add_special_tokens=False).ids


def _tokenize_word(backend: tokenizers.Tokenizer, piece: str) -> list[int]:
    """What is letters and digits alone once normalised is one word to BERT's pre-tokenizer: for a third of the price, the model
    can be asked directly."""
    word = backend.normalizer.normalize_str(piece)
    if not word.isalnum():
        return _tokenize(backend, piece)
    return [token.id for token in backend.model.tokenize(word)]
