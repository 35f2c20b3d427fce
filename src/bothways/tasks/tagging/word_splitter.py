"""Word boundaries of running text. No character is changed or lost: words are slices of the text.

    rules        words as in CoNLL data and spaCy: "U.N.", "O'Neil", "well-known" and "1,000"
                 stay whole, the clitic of "Germany's" and other marks are separate
    punctuation  every punctuation mark is separate: BERT's `BasicTokenizer`, without its
                 lower-casing, which is left to the model's tokenizer
    whitespace   separated by white space only

Ideographs are words of their own, except with "whitespace".
"""

from __future__ import annotations

import functools
import re
import unicodedata
from typing import Literal

Splitter = Literal["rules", "punctuation", "whitespace"]

_IDEOGRAPHS = (
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
)  # fmt: skip
"""Han only, as in BERT: neither kana nor hangul."""

_CLITIC = re.compile(r"(?<=\w)['’](?:s|re|ve|ll|d|m)\b", re.IGNORECASE)
_WHOLE = re.compile(
    r"(?:https?://|www\.)[^\s<>\"]*[^\s<>\".,;:!?'’)\]}]"  # URLs
    r"|[\w.+-]+@\w[\w-]*(?:\.\w[\w-]*)+"  # e-mail addresses
    r"|(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|Inc|Ltd|Corp|Gen|Gov|Sen|Rep|Rev|vs)\.(?=\s)"
)
_SHAPE = re.compile(
    r"I"
    r"|(?:[aA]\.)+[aA](?![aA0])\.?"  # U.N., e.g.
    r"|A\.(?= +A)"  # the initial in J. Smith
    r"|[aA0]+(?:(?:['&-]|\.(?=[a0])|(?<=0)[,:/](?=0))[aA0]+)*"  # O'Neil, AT&T, 1-0, a.com, 1,000
    r"|`[aA]+"  # a clitic
    r"|[^ ]"
)
"""Words in the shape of a text: each letter is "a" or "A", each digit "0", each ideograph "I"."""


def split_words(text: str, splitter: Splitter = "rules") -> list[tuple[int, int]]:
    """Return begin and end of each word, in characters, in order."""
    match splitter:
        case "whitespace":
            return [match.span() for match in re.finditer(r"\S+", text)]
        case "punctuation":
            shape = "".join(map(_kind, text))
            return [match.span() for match in re.finditer(r"[aA0]+|[^ ]", shape)]
        case "rules":
            return _split_by_rules(text)


def _split_by_rules(text: str) -> list[tuple[int, int]]:
    letters = [_kind(character) for character in text]
    for clitic in _CLITIC.finditer(text):
        letters[clitic.start()] = "`"
    shape, spans, place = "".join(letters), [], 0
    while place < len(text):
        word = _WHOLE.match(text, place) or _SHAPE.match(shape, place)
        if word is not None:
            spans.append(word.span())
        place = word.end() if word is not None else place + 1
    return spans


@functools.lru_cache(maxsize=4096)
def _kind(character: str) -> str:
    """Return the shape of a character; marks that may join words represent themselves."""
    if character.isspace():
        return " "
    if character in ".,:/&-":
        return character
    if character in "'’":
        return "'"
    if character.isdecimal():
        return "0"
    if any(first <= ord(character) <= last for first, last in _IDEOGRAPHS):
        return "I"
    mark = unicodedata.category(character).startswith("P") or (
        character.isascii() and not character.isalnum() and character.isprintable()
    )
    return "!" if mark else "A" if character.isupper() else "a"
