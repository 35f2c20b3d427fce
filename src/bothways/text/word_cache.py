"""A cache of words: each distinct piece of text is tokenized once, then looked up.

This is exact only if a tokenizer never looks across the boundaries of pieces. `find_cutter` accepts
two kinds of tokenizers, and others tokenize each text as a whole:

BERT, where `wordpiece` is not compiled (BertNormalizer, BertPreTokenizer, WordPiece). A piece is a
run without white space, ASCII punctuation and ideographs, or one ASCII punctuation mark, or one
ideograph. The normaliser works on single characters, except for the canonical reordering of
combining marks, which never crosses a character of combining class 0. Space, newline, tab, ASCII
punctuation and ideographs have class 0, and none of them disappears. The pre-tokenizer then splits
at white space, around each punctuation mark, and around each ideograph, which the normaliser
surrounds with spaces. WordPiece reads one word at a time.

Byte-level BPE (no normaliser, ByteLevel with GPT-2's expression, BPE without dropout). A piece
begins at a run of spaces that follows a visible character. No alternative of the expression matches
a space after a visible character, and the only one with lookahead ("white space not before a
visible character") looks no further than its own run of white space, which is within one piece. A
prefix space is added only to a text that does not begin with white space: to its first piece.

The backend finds added tokens in the raw text first. They must not contain white space, nor absorb
it where it matters, and for BERT must begin with ASCII punctuation, so that the expression finds
them where the backend does.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

_PUNCTUATION = r"!-/:-@\[-`{-~"
_IDEOGRAPHS = r"\u3400-\u4DBF\u4E00-\u9FFF\uF900-\uFAFF\U00020000-\U0002A6DF"
_SPACED = re.compile(r" *[^ ]+(?:(?<=\s) +[^ ]+)*| +")

MEMORY = 64 * 2**20
"""The approximate size of the cache in bytes, at `_ENTRY` a piece and 8 a character; a full cache
is cleared."""
_ENTRY = 200


@dataclass(frozen=True)
class Cutter:
    """The expression that finds the pieces of a tokenizer, BERT's (`bert`) or byte-level BPE."""

    expression: re.Pattern[str]
    bert: bool


def find_cutter(spec: Mapping[str, Any]) -> Cutter | None:
    """Return the pieces that a `tokenizer.json` treats independently; None if not proved."""
    added = spec["added_tokens"]
    # A token with white space inside would be cut in two.
    if any(re.search(r"\s", token["content"]) for token in added):
        return None
    match spec["normalizer"], spec["pre_tokenizer"], spec["model"]:
        case {"type": "BertNormalizer"} as normalizer, {"type": "BertPreTokenizer"}, {
            "type": "WordPiece"
        }:
            contents = [token["content"] for token in added]
            independent = not any(token["normalized"] or token["single_word"] for token in added)
            if independent and all(re.match(f"[{_PUNCTUATION}]", content) for content in contents):
                return Cutter(bert_words(contents, normalizer["handle_chinese_chars"]), bert=True)
        case None, {"type": "ByteLevel", "use_regex": True}, {"type": "BPE", "dropout": None}:
            if not any(token["rstrip"] for token in added):
                return Cutter(_SPACED, bert=False)
    return None


def bert_words(added: list[str], spaces_ideographs: bool) -> re.Pattern[str]:
    """Return an expression for words, added tokens, punctuation marks and ideographs.

    Args:
        added: tokens to match whole, which begin with ASCII punctuation. The longest wins, as in
            the backend.
        spaces_ideographs: if True, each ideograph is a piece.
    """
    separators = _PUNCTUATION + (_IDEOGRAPHS if spaces_ideographs else "")
    tokens = [re.escape(token) for token in sorted(added, key=len, reverse=True)]
    return re.compile("|".join([rf"[^{separators} \n\t]+", *tokens, f"[{separators}]"]))


class PieceTable(dict[str, bytes]):
    """A mapping of pieces to their ids, as bytes of native int32; missing pieces are tokenized."""

    def __init__(self, backend: tokenizers.Tokenizer, cut: Cutter) -> None:
        super().__init__()
        self._find = cut.expression.findall
        self._room = MEMORY
        self._backend, self._bert = backend, cut.bert

    def rows(self, texts: list[str]) -> list[bytes]:
        """Return the ids of each text, as bytes of native int32."""
        return [b"".join(map(self.__getitem__, self._find(text))) for text in texts]

    def __missing__(self, piece: str) -> bytes:
        # A text without repetition would otherwise fill the memory with its words
        self._room -= _ENTRY + 8 * len(piece)
        if self._room < 0:
            self.clear()
            self._room = MEMORY
        # A normalised piece of letters and digits alone is one word to BERT's pre-tokenizer: the
        # model is called directly, three times as fast.
        word = self._backend.normalizer.normalize_str(piece) if self._bert else ""
        if word.isalnum():
            tokens = [token.id for token in self._backend.model.tokenize(word)]
        else:
            tokens = self._backend.encode(piece, add_special_tokens=False).ids
        ids = self[piece] = array("i", tokens).tobytes()
        return ids
