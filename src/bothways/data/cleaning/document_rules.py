"""Rules that leave out whole documents.

Sources: Gopher (Rae et al. 2021, Scaling Language Models, appendix A.1.1 and table A1); C4 (Raffel
et al. 2020, section 2.2). Words are divided at white space, and each character of a script that is
written without spaces is a word.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bothways.core.config.values import require_at_least
from bothways.core.errors import ConfigError
from bothways.data.cleaning.batch import TextBatch
from bothways.data.cleaning.words import word_finder

Rejected = NDArray[np.bool_]

UNSPACED_SHARE = 0.2
"""The share of single characters among the words from which a text counts as one without spaces."""

_PARAGRAPH = re.compile(r"\n[^\S\n]*\n")


class Rule(ABC):
    """Base class of the rules."""

    @abstractmethod
    def rejects(self, batch: TextBatch) -> Rejected:
        """Return `(D)`, True for documents to leave out."""


@dataclass(frozen=True)
class WordCount(Rule):
    """Documents with too few or too many words (Gopher: 50 to 100,000)."""

    least: int = 50
    most: int = 100_000

    def __post_init__(self) -> None:
        _require_range(self.least, self.most)

    def rejects(self, batch: TextBatch) -> Rejected:
        counts = batch.words.counts
        return (counts < self.least) | (counts > self.most)


@dataclass(frozen=True)
class MeanWordLength(Rule):
    """Documents whose words are too short or too long on average (Gopher: 3 to 10 characters).

    Does not apply to scripts without spaces.
    """

    least: float = 3.0
    most: float = 10.0

    def __post_init__(self) -> None:
        _require_range(self.least, self.most)

    def rejects(self, batch: TextBatch) -> Rejected:
        words = batch.words
        counts = np.maximum(words.counts, 1)
        spaced = words.total(words.singles) < UNSPACED_SHARE * counts
        means = words.total(words.lengths) / counts
        return spaced & ((means < self.least) | (means > self.most))


@dataclass(frozen=True)
class Symbols(Rule):
    """Documents with many hash signs, or many ellipses, per word (Gopher: above 0.1)."""

    most: float = 0.1

    def __post_init__(self) -> None:
        _require_shares("most", [self.most])

    def rejects(self, batch: TextBatch) -> Rejected:
        limits = self.most * batch.words.counts

        def many(number: int, text: str) -> bool:
            ellipses = text.count("...") + text.count("…")
            return bool(max(text.count("#"), ellipses) > limits[number])

        return batch.judge(many)


class LineShare(Rule):
    """Documents with a high share of some lines."""

    most: float

    def __post_init__(self) -> None:
        _require_shares("most", [self.most])

    @abstractmethod
    def counts(self, line: str) -> bool:
        """Return True for one of these lines."""

    def rejects(self, batch: TextBatch) -> Rejected:
        def many(_: int, text: str) -> bool:
            lines = _lines(text)
            return sum(map(self.counts, lines)) / max(len(lines), 1) > self.most

        return batch.judge(many)


@dataclass(frozen=True)
class BulletLines(LineShare):
    """Documents most of whose lines begin with a bullet (Gopher: above 0.9)."""

    most: float = 0.9
    marks: tuple[str, ...] = ("•", "‣", "◦", "●", "▪", "■", "►", "- ", "* ")

    def counts(self, line: str) -> bool:
        return line.startswith(self.marks)


@dataclass(frozen=True)
class EllipsisLines(LineShare):
    """Documents many of whose lines end in an ellipsis (Gopher: above 0.3)."""

    most: float = 0.3

    def counts(self, line: str) -> bool:
        return line.endswith(("...", "…"))


@dataclass(frozen=True)
class AlphabeticWords(Rule):
    """Documents with few words that have a letter, such as tables (Gopher: below 0.8)."""

    least: float = 0.8

    def __post_init__(self) -> None:
        _require_shares("least", [self.least])

    def rejects(self, batch: TextBatch) -> Rejected:
        return batch.words.total(batch.words.letters) < self.least * batch.words.counts


@dataclass(frozen=True)
class StopWords(Rule):
    """Documents with too few different words of a list (Gopher: fewer than 2 of 8).

    Applies only to documents of one language.

    Attributes:
        least: different words of the list that a document must have.
        words: the list, in lower case.
        language: the ISO 639 code of the documents that it applies to.
    """

    least: int = 2
    words: tuple[str, ...] = ("the", "be", "to", "of", "and", "that", "have", "with")
    language: str = "en"

    def __post_init__(self) -> None:
        require_at_least(1, least=self.least)
        if self.least > len(set(self.words)):
            message = f"{self.least} different words cannot be in a list of {len(set(self.words))}"
            raise ConfigError(message, where="least")
        if not all(self.words):
            raise ConfigError("holds an empty word", where="words")

    def rejects(self, batch: TextBatch) -> Rejected:
        find = word_finder(self.words)

        def few(number: int, text: str) -> bool:
            """Return True for a text of the language with too few of its words."""
            if batch.languages[number] != self.language:
                return False
            distinct = set[str]()
            for word in find(text):
                distinct.add(word)
                if len(distinct) >= self.least:
                    return False
            return True

        return batch.judge(few)


@dataclass(frozen=True)
class RepeatedParts(Rule):
    """Documents too many of whose parts, or of their characters, occurred in them before."""

    most: float = 0.3
    most_characters: float = 0.2

    def __post_init__(self) -> None:
        _require_shares("most", [self.most])
        _require_shares("most_characters", [self.most_characters])

    @abstractmethod
    def parts(self, text: str) -> list[str]:
        """Return the parts of a text."""

    def rejects(self, batch: TextBatch) -> Rejected:
        def repeats(_: int, text: str) -> bool:
            parts = self.parts(text)
            distinct, characters = set(parts), sum(map(len, parts))
            repeated = characters - sum(map(len, distinct))
            too_many = len(parts) - len(distinct) > self.most * len(parts)
            return too_many or repeated > self.most_characters * characters

        return batch.judge(repeats)


class RepeatedLines(RepeatedParts):
    """Documents that repeat lines (Gopher: above 0.3 of the lines, 0.2 of their characters)."""

    def parts(self, text: str) -> list[str]:
        return _lines(text)


class RepeatedParagraphs(RepeatedParts):
    """Documents that repeat paragraphs, between blank lines (Gopher: above 0.3, or 0.2 of the
    characters)."""

    def parts(self, text: str) -> list[str]:
        return [bare for paragraph in _PARAGRAPH.split(text) if (bare := paragraph.strip())]


@dataclass(frozen=True)
class TopNgrams(Rule):
    """Documents much of which is the most frequent n-gram of words.

    Attributes:
        most: the share of the characters for n = 2, 3, … (Gopher: 0.2, 0.18, 0.16). Of equally
            frequent n-grams the first in the text counts; an n-gram that occurs once does not.
    """

    most: tuple[float, ...] = (0.2, 0.18, 0.16)

    def __post_init__(self) -> None:
        _require_shares("most", self.most)

    def rejects(self, batch: TextBatch) -> Rejected:
        rejected = np.zeros(len(batch.texts), dtype=np.bool_)
        for ngrams, limit in zip(batch.repeated_ngrams(len(self.most) + 1), self.most, strict=True):
            owners = np.searchsorted(batch.words.offsets, ngrams.firsts, side="right") - 1
            # The most frequent n-gram of each text, of equals the first: the head of its group.
            order = np.lexsort((ngrams.firsts, -ngrams.counts, owners))
            _, best = np.unique(owners[order], return_index=True)
            top = np.zeros(len(ngrams.firsts), dtype=np.bool_)
            top[order[best]] = True
            rejected |= batch.covered(ngrams.positions[top[ngrams.groups]], ngrams.size) > limit
        return rejected


@dataclass(frozen=True)
class RepeatedWords(Rule):
    """Documents much of which repeats n-grams of words that occurred in them before.

    Attributes:
        shortest: the first n.
        most: the share of the characters for n, n + 1, … (Gopher: 0.15 to 0.1 for n = 5 to 10). The
            first occurrence of an n-gram does not count.
    """

    shortest: int = 5
    most: tuple[float, ...] = (0.15, 0.14, 0.13, 0.12, 0.11, 0.1)

    def __post_init__(self) -> None:
        require_at_least(2, shortest=self.shortest)
        _require_shares("most", self.most)

    def rejects(self, batch: TextBatch) -> Rejected:
        rejected = np.zeros(len(batch.texts), dtype=np.bool_)
        for ngrams in batch.repeated_ngrams(self.shortest + len(self.most) - 1):
            if ngrams.size >= self.shortest:
                repeats = ngrams.positions[ngrams.positions != ngrams.firsts[ngrams.groups]]
                share = batch.covered(repeats, ngrams.size)
                rejected |= share > self.most[ngrams.size - self.shortest]
        return rejected


@dataclass(frozen=True)
class UnwantedText(Rule):
    """Documents with one of some phrases, in any case (C4: filler text, and curly brackets, which
    programs have)."""

    phrases: tuple[str, ...] = ("lorem ipsum", "{", "}")

    def rejects(self, batch: TextBatch) -> Rejected:
        phrases = [phrase.lower() for phrase in self.phrases]

        def has_one(_: int, text: str) -> bool:
            lower = text.lower()
            return any(phrase in lower for phrase in phrases)

        return batch.judge(has_one)


@dataclass(frozen=True)
class SentenceCount(Rule):
    """Documents with few sentences (C4: fewer than 3)."""

    least: int = 3

    def __post_init__(self) -> None:
        require_at_least(1, least=self.least)

    def rejects(self, batch: TextBatch) -> Rejected:
        return batch.judge(lambda number, _: len(batch.sentences(number)) < self.least)


DocumentRule = (
    WordCount | MeanWordLength | Symbols | BulletLines | EllipsisLines | AlphabeticWords | StopWords
    | RepeatedLines | RepeatedParagraphs | TopNgrams | RepeatedWords | UnwantedText | SentenceCount
)  # fmt: skip


def _lines(text: str) -> list[str]:
    return [bare for line in text.splitlines() if (bare := line.strip())]


def _require_range(least: float | int, most: float | int) -> None:
    if not least >= 0:
        raise ConfigError(f"must be at least 0, not {least}", where="least")
    if not most >= least:
        raise ConfigError(f"must be at least {least}, the value of least, not {most}", where="most")


def _require_shares(name: str, shares: Iterable[float]) -> None:
    for share in shares:
        if not 0 <= share <= 1:
            raise ConfigError(f"must be from 0 to 1, not {share}", where=name)
