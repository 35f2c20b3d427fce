"""A cache of words for byte-level BPE: each distinct piece of text is tokenized once.

This is exact only if a tokenizer never looks across the boundaries of pieces, as one without a
normaliser, with ByteLevel and GPT-2's expression, and with BPE without dropout. A piece begins at a
run of spaces that follows a visible character. No alternative of the expression matches a space
after a visible character, and the only one with lookahead ("white space not before a visible
character") looks no further than its own run of white space, which is within one piece. A prefix
space is added only to a text that does not begin with white space: to its first piece.

The backend finds added tokens in the raw text first. They must not contain white space, nor absorb
what follows them.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from typing import Any

import tokenizers

_SPACED = re.compile(r" *[^ ]+(?:(?<=\s) +[^ ]+)*| +")

MEMORY = 64 * 2**20
"""The approximate size of the cache in bytes, at `_ENTRY` a piece and 8 a character; a full cache
is cleared."""
_ENTRY = 200


def is_cuttable(spec: Mapping[str, Any]) -> bool:
    """Return True if a `tokenizer.json` is proved to treat pieces independently."""
    match spec["normalizer"], spec["pre_tokenizer"], spec["model"]:
        case None, {"type": "ByteLevel", "use_regex": True}, {"type": "BPE", "dropout": None}:
            # A token with white space inside would be cut in two.
            return not any(
                token["rstrip"] or re.search(r"\s", token["content"])
                for token in spec["added_tokens"]
            )
        case _:
            return False


class PieceTable(dict[str, bytes]):
    """A mapping of pieces to their ids, as bytes of native int32; missing pieces are tokenized."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._room = MEMORY
        self._backend = backend

    def rows(self, texts: list[str]) -> list[bytes]:
        """Return the ids of each text, as bytes of native int32."""
        return [b"".join(map(self.__getitem__, _SPACED.findall(text))) for text in texts]

    def __missing__(self, piece: str) -> bytes:
        # A text without repetition would otherwise fill the memory with its words
        self._room -= _ENTRY + 8 * len(piece)
        if self._room < 0:
            self.clear()
            self._room = MEMORY
        tokens = self._backend.encode(piece, add_special_tokens=False).ids
        ids = self[piece] = array("i", tokens).tobytes()
        return ids
