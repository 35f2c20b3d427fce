"""Words of running text, with their places in it: BERT's basic tokenisation, but that no character is changed or lost.

Words are cut at white space; punctuation marks and ideographs are words of their own. Source: `BasicTokenizer` of
google-research/bert tokenization.py. It also lower-cases, strips accents and drops control characters; here that is left to
the tokenizer of the model, so that words are slices of the text.
"""

from __future__ import annotations

import functools
import unicodedata
from typing import Literal

_IDEOGRAPHS = (
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F), (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
)  # fmt: skip
"""Han only, as in BERT: neither kana nor hangul."""


def split_words(text: str) -> list[tuple[int, int]]:
    """Begin and end of each word, in characters, in order."""
    spans: list[tuple[int, int]] = []
    open_word = False
    for place, character in enumerate(text):
        kind = _kind(character)
        if kind == "letter" and open_word:
            spans[-1] = (spans[-1][0], place + 1)
        elif kind != "space":
            spans.append((place, place + 1))
        open_word = kind == "letter"
    return spans


@functools.lru_cache(maxsize=4096)
def _kind(character: str) -> Literal["space", "alone", "letter"]:
    if character.isspace():
        return "space"
    mark = unicodedata.category(character).startswith("P") or (
        character.isascii() and not character.isalnum() and character.isprintable()
    )
    ideograph = any(first <= ord(character) <= last for first, last in _IDEOGRAPHS)
    return "alone" if mark or ideograph else "letter"
