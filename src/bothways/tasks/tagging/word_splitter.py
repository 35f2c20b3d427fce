"""Word boundaries of running text. No character is changed or lost: words are slices of the text.

    auto         rules; a model that is trained on single characters of a script without blanks has
                 characters
    rules        words as in CoNLL data and spaCy: "U.N.", "O'Neil", "well-known" and "1,000"
                 stay whole, the clitic of "Germany's" and other marks are separate
    punctuation  every punctuation mark is separate: BERT's `BasicTokenizer`, without its
                 lower-casing, which is left to the model's tokenizer
    whitespace   separated by white space only
    characters   each character is a word, as in most Chinese data

Ideographs are words of their own, except with "whitespace". Every splitter takes time linear in the
length of the text.
"""

from __future__ import annotations

import functools
import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Literal

Splitter = Literal["auto", "rules", "punctuation", "whitespace", "characters"]

_IDEOGRAPHS = (
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
)  # fmt: skip
"""Han only, as in BERT: neither kana nor hangul."""

_CLITIC = re.compile(r"(?<=\w)['’](?:s|re|ve|ll|d|m)\b", re.IGNORECASE)
_URL = re.compile(r"(?:https?://|www\.)[^\s<>\"]*[^\s<>\".,;:!?'’)\]}]")
_HOST = re.compile(r"(?<=[\w.+-])@\w[\w-]*(?:\.\w[\w-]*)+")
"""The end of an e-mail address. The name before it is searched for backwards, from "@": a search
from each character for a name with an "@" after it takes quadratic time."""
_NAME = re.compile(r"[\w.+-]")
_TITLE = re.compile(r"(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|Inc|Ltd|Corp|Gen|Gov|Sen|Rep|Rev|vs)\.(?=\s)")
_SHAPE = re.compile(
    r"I"
    r"|(?:[aA]\.)+[aA](?![aA0])\.?"  # U.N., e.g.
    r"|A\.(?= +A)"  # the initial in J. Smith
    r"|[aA0]+(?:(?:['&-]|\.(?=[a0])|(?<=0)[,:/](?=0))[aA0]+)*"  # O'Neil, AT&T, 1-0, a.com, 1,000
    r"|`[aA]+"  # a clitic
    r"|[^ ]"
)
"""Words in the shape of a text: each letter is "a" or "A", each digit "0", each ideograph "I"."""


def split_words(text: str, splitter: Splitter = "auto") -> list[tuple[int, int]]:
    """Return begin and end of each word, in characters, in order."""
    match splitter:
        case "whitespace":
            words = re.finditer(r"\S+", text)
        case "characters":
            words = re.finditer(r"\S", text)
        case "punctuation":
            words = re.finditer(r"[aA0]+|[^ ]", "".join(map(_kind, text)))
        case "rules" | "auto":
            return _split_by_rules(text)
    return [word.span() for word in words]


def choose_splitter(words: Iterable[str]) -> Splitter:
    """Return the splitter that gives words like these: characters or auto.

    The words of Chinese data are often single characters, also the digits and letters in between.
    """
    counts = Counter(words)
    single = {word: count for word, count in counts.items() if len(word) == 1}
    # Ideographs, kana and hangul.
    wide = sum(
        count
        for word, count in single.items()
        if unicodedata.east_asian_width(word) in "WF" and unicodedata.category(word) == "Lo"
    )
    characters = sum(single.values()) > 0.98 * counts.total() and 2 * wide > counts.total()
    return "characters" if characters else "auto"


def _split_by_rules(text: str) -> list[tuple[int, int]]:
    letters = [_kind(character) for character in text]
    # The apostrophe of a clitic begins a word: it's → it 's.
    for clitic in _CLITIC.finditer(text):
        letters[clitic.start()] = "`"
    addresses = itertools.chain(_addresses(text), [(len(text), len(text), len(text))])
    shape, spans, position, address = "".join(letters), [], 0, next(addresses)
    while position < len(text):
        while address[1] <= position < len(text):
            address = next(addresses)
        if (word := _URL.match(text, position)) is not None:
            spans.append(word.span())
        elif address[0] <= position:
            spans.append((position, address[2]))
        elif (word := _TITLE.match(text, position) or _SHAPE.match(shape, position)) is not None:
            spans.append(word.span())
        # Behind the word that was found here, or one character on.
        position = spans[-1][1] if spans and spans[-1][0] == position else position + 1
    return spans


def _addresses(text: str) -> Iterator[tuple[int, int, int]]:
    """Yield the offsets of each e-mail address: its name, its "@" and its end."""
    for host in _HOST.finditer(text):
        start = at = host.start()
        while start and _NAME.match(text, start - 1):
            start -= 1
        yield start, at, host.end()


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
