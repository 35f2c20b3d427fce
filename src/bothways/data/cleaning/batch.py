"""Texts that are measured together by the rules for documents."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bothways.data.cleaning.words import WordTable, chain, find_words, mix


@dataclass(frozen=True)
class RepeatedNgrams:
    """The n-grams of words that occur more than once in their text.

    Attributes:
        size: n.
        positions: `(P)` words at which they begin, ascending.
        groups: `(P)` the number of the n-gram; equal n-grams of one text have one number.
        firsts: `(G)` the word at which each n-gram begins for the first time.
        counts: `(G)` occurrences of each n-gram.
    """

    size: int
    positions: NDArray[np.int64]
    groups: NDArray[np.int64]
    firsts: NDArray[np.int64]
    counts: NDArray[np.int64]


class TextBatch:
    """D texts with their words and lines, which are found once and when they are needed.

    Args:
        texts: the texts.
        languages: the ISO 639 code of each.
        split: returns the sentences of a text in a language.

    Attributes:
        undecided: `(D)` True for texts that no rule has rejected; a rule need not judge others.
    """

    def __init__(
        self, texts: Sequence[str], languages: Sequence[str], split: Callable[[str, str], list[str]]
    ) -> None:
        self.texts, self.languages, self._split = texts, languages, split
        self.undecided = np.ones(len(texts), dtype=np.bool_)
        self._search, self._ngrams = self._search_ngrams(), list[RepeatedNgrams]()

    def judge(self, rejects: Callable[[int, str], bool]) -> NDArray[np.bool_]:
        """Return `(D)`, True where a function of number and text does, for undecided texts."""
        rejected = np.zeros(len(self.texts), dtype=np.bool_)
        for number in np.flatnonzero(self.undecided).tolist():
            rejected[number] = rejects(number, self.texts[number])
        return rejected

    @functools.cached_property
    def words(self) -> WordTable:
        """The words of the texts, divided at spaces."""
        return find_words(self.texts)

    def sentences(self, number: int) -> list[str]:
        """Return the sentences of a text, by its number."""
        return self._split(self.texts[number], self.languages[number])

    def covered(self, begins: NDArray[np.int64], size: int) -> NDArray[np.float64]:
        """Return the share of each text's characters, without spaces, that n-grams cover, `(D)`.

        Characters in several n-grams count once.

        Args:
            begins: words at which the n-grams begin, each once.
            size: n.
        """
        words = self.words
        depth = np.zeros(len(words.lengths) + 1, dtype=np.int64)
        depth[begins] += 1
        depth[begins + size] -= 1
        inside = np.cumsum(depth)[:-1] > 0
        all_characters = words.total(words.lengths)
        return words.total(words.lengths * inside) / np.maximum(all_characters, 1)

    def repeated_ngrams(self, max_size: int) -> list[RepeatedNgrams]:
        """Return the repeated n-grams for n = 2 … `max_size`, each size searched for once."""
        while len(self._ngrams) < max_size - 1:
            self._ngrams.append(next(self._search))
        return self._ngrams[: max_size - 1]

    def _search_ngrams(self) -> Iterator[RepeatedNgrams]:
        """Yield the repeated n-grams for n = 2, 3, …

        Only where two (n − 1)-grams in a row are repeated an n-gram can be.
        """
        words = self.words
        count = len(words.hashes)
        owners = np.repeat(np.arange(len(self.texts)), words.counts)
        ends = words.offsets[1:][owners]
        # Equal n-grams of different texts differ.
        keys = words.hashes ^ mix(owners.astype(np.uint64))
        positions = np.arange(count)
        for size in itertools.count(2):
            positions = positions[positions + size <= ends[positions]]
            keys[positions] = mix(chain(keys[positions], words.hashes[positions + size - 1]))
            order = positions[np.argsort(keys[positions], kind="stable")]
            differs = keys[order[1:]] != keys[order[:-1]]
            starts = np.concatenate([[0], np.flatnonzero(differs) + 1])[: len(order)]
            counts = np.diff(np.append(starts, len(order)))
            groups = np.repeat(np.cumsum(counts > 1) - 1, counts)
            is_repeated = np.repeat(counts > 1, counts)
            back = np.argsort(order[is_repeated])
            ngrams = RepeatedNgrams(
                size,
                order[is_repeated][back],
                groups[is_repeated][back],
                order[starts][counts > 1],
                counts[counts > 1],
            )
            yield ngrams
            begins = np.zeros(count + 1, dtype=np.bool_)
            begins[ngrams.positions] = True
            positions = ngrams.positions[begins[ngrams.positions + 1]]
