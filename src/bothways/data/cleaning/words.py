"""Words of many texts at once, as arrays of positions and hashes.

Languages that are written without spaces have no words that can be found without a dictionary. So
each ideograph, kana, and letter of Thai, Lao, Myanmar or Khmer is a word of its own.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SPACE, WORD, LETTER, SINGLE = 1, 2, 4, 8
"""Bits of a character's class: white space; letters, marks, digits; letters; a word by itself."""

PIECE = 2**17
"""Characters that are hashed at once."""

_UNSPACED = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x31F0, 0x31FF),
    (0x3400, 0x4DBF),  # ideographs
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
)
_PLANES = (0x20000, 0x40000)  # the planes of further ideographs
_STEP = np.uint64(0xD6E8FEB86659FD93)
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64


@dataclass(frozen=True)
class WordTable:
    """The W words of D texts.

    Attributes:
        begins, ends: `(W)` positions of each word in all texts together.
        hashes: `(W)` 64-bit hashes, equal for equal words.
        singles: `(W)` True for characters that are words by themselves.
        letters: `(W)` True for words with a letter.
        offsets: `(D+1)`, text d has the words `[offsets[d], offsets[d+1])`.
    """

    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    hashes: NDArray[np.uint64]
    singles: NDArray[np.bool_]
    letters: NDArray[np.bool_]
    offsets: NDArray[np.int64]

    @functools.cached_property
    def counts(self) -> NDArray[np.int64]:
        """The number of words of each text, `(D)`."""
        return np.diff(self.offsets)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of characters of each word, `(W)`."""
        return self.ends - self.begins

    def total(self, values: NDArray[Any]) -> NDArray[np.int64]:
        """Return the sum of `(W)` values over the words of each text, `(D)`."""
        sums = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
        return np.diff(sums[self.offsets])


def find_words(texts: Sequence[str], *, letters: bool = False) -> WordTable:
    """Return the words of texts.

    Words are divided at white space: punctuation belongs to the word that it touches, and between
    spaces it is a word. With `letters` they are runs of letters, marks and digits.

    Example: ["A cat, 猫好。"] → "A" "cat," "猫" "好"; with `letters` "A" "cat" "猫" "好".
    """
    joined = "\n".join([*texts, ""])
    codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    classes = np.concatenate([[SPACE], character_classes()[codes]]).astype(np.uint8)
    inside = (classes & WORD) != 0 if letters else (classes & SPACE) == 0
    single = (classes & SINGLE) != 0
    # A word goes on where both neighbours are inside of words and neither is one by itself.
    joint = inside[1:] & inside[:-1] & ~single[1:] & ~single[:-1]
    begins = np.flatnonzero(inside[1:] & ~joint)
    ends = np.flatnonzero(inside[:-1] & ~joint)  # classes[i + 1] is that of character i
    # False for punctuation that touches other text.
    spaces = (classes & SPACE) != 0
    space_after = np.append(spaces[1:], True)
    apart: NDArray[np.bool_] = spaces[begins] & space_after[ends]
    lexical = apart | (_count(classes, WORD, begins, ends) > 0)
    begins, ends = begins[lexical], ends[lexical]
    edges = np.cumsum([0, *(len(text) + 1 for text in texts)])
    return WordTable(
        begins,
        ends,
        hash_words(codes, begins, ends),
        single[1:][begins],
        _count(classes, LETTER, begins, ends) > 0,
        np.searchsorted(begins, edges),
    )


def _count(
    classes: NDArray[np.uint8], kind: int, begins: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the number of characters of a kind in each word, `(W)`."""
    sums = np.cumsum((classes & kind) != 0, dtype=np.int64)
    counts: NDArray[np.int64] = sums[ends] - sums[begins]
    return counts


@functools.cache
def character_classes() -> NDArray[np.uint8]:
    """Return the class of every code point, `(0x110000)`."""
    table = np.zeros(0x110000, dtype=np.uint8)
    # The planes of rare ideographs as a whole: each of these is a word by itself.
    table[_PLANES[0] : _PLANES[1]] = WORD | LETTER | SINGLE
    for code in range(_PLANES[0]):
        character = chr(code)
        category = unicodedata.category(character)[0]
        if character.isspace():
            table[code] = SPACE
        elif category in "LMN":
            table[code] = WORD | (LETTER if category == "L" else 0)
    for low, high in _UNSPACED:
        range_classes = table[low : high + 1]
        range_classes[(range_classes & WORD) != 0] |= SINGLE
    return table


@functools.lru_cache(maxsize=8)
def word_finder(words: tuple[str, ...]) -> Callable[[str], Iterator[str]]:
    """Return a function that yields the occurrences of some words in a text, in lower case.

    An occurrence within a longer word does not count: "be" is not in "been", nor "न" in "ना", where
    a mark follows. Characters that are words by themselves have no such neighbours.
    """
    joined = (character_classes() & (WORD | SINGLE)) == WORD
    edges = np.flatnonzero(np.diff(joined.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    ranges = "".join(f"{chr(low)}-{chr(high - 1)}" for low, high in edges.tolist())
    single = [re.escape(word) for word in words if not joined[ord(word[-1])]]
    joined_words = "|".join(re.escape(word) for word in words if joined[ord(word[-1])])
    alternatives = [*([f"(?:{joined_words})(?![{ranges}])"] if joined_words else []), *single]
    pattern = re.compile("|".join(alternatives), re.IGNORECASE)

    def find(text: str) -> Iterator[str]:
        for match in pattern.finditer(text):
            begin = match.start()
            # A lookbehind at the beginning of the expression would make it slow.
            if begin and joined[ord(text[begin])] and joined[ord(text[begin - 1])]:
                continue
            yield match.group().lower()

    return find


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return well distributed 64-bit values, different for different ones.

    Source: the finalizer of SplitMix64 (Steele, Lea and Flood 2014, Fast Splittable Pseudorandom
    Number Generators).
    """
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))


def chain(hashes: NDArray[np.uint64], following: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
    """Return hashes of sequences that are longer by one value, before `mix`."""
    return np.asarray(hashes * _STEP + following.astype(np.uint64, copy=False))


def hash_words(
    codes: NDArray[np.uint32], begins: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """Return a hash of each word `codes[begins:ends]`, `(W)`, that depends only on its characters.

    The polynomial of a word's characters is a difference of prefix sums, modulo 2^64, so that no
    loop runs over words.
    """
    hashes = np.zeros(len(begins), dtype=np.uint64)
    stop = 0
    while (begin := stop) < len(begins):
        # Words that extend over at most PIECE characters, or one longer word.
        stop = int(np.searchsorted(ends, begins[begin] + PIECE, side="right"))
        stop = max(stop, begin + 1)
        start, end = begins[begin], ends[stop - 1]
        powers, inverses = _powers(max(PIECE, 1 << int(end - start).bit_length()))
        sums = np.zeros(end - start + 1, dtype=np.uint64)
        terms = (codes[start:end].astype(np.uint64) + np.uint64(1)) * powers[: end - start]
        np.cumsum(terms, out=sums[1:])
        low, high = begins[begin:stop] - start, ends[begin:stop] - start
        hashes[begin:stop] = (sums[high] - sums[low]) * inverses[low]
    return mix(hashes)


@functools.lru_cache(maxsize=2)
def _powers(count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the powers 0 … count − 1 of the base, and those of its inverse modulo 2^64."""
    inverse = pow(_BASE, -1, 2**64)
    tables = []
    for base in (_BASE, inverse):
        factors = np.full(count, base, dtype=np.uint64)
        factors[0] = 1
        tables.append(np.cumprod(factors, dtype=np.uint64))
    return tables[0], tables[1]
