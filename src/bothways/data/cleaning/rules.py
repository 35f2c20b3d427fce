"""Rules that remove lines of documents, and rules that leave out whole documents.

Sources: C4 (Raffel et al. 2020, Exploring the Limits of Transfer Learning, section 2.2); Gopher
(Rae et al. 2021, Scaling Language Models, appendix A.1.1 and table A1). Words are divided at white
space, and each character of a script that is written without spaces is a word.
"""

from __future__ import annotations

import functools
import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bothways.core.config.values import require_at_least, require_range
from bothways.core.errors import ConfigError
from bothways.data.cleaning.words import WordTable, chain, find_words, mix, word_finder

Rejected = NDArray[np.bool_]

UNSPACED_SHARE = 0.2
"""The share of single characters among the words from which a text counts as one without spaces."""

_ENDS = (".", "!", "?", '"', "”", "’", "»", "。", "！", "？", "」", "』", "۔", "؟", "।")
_PARAGRAPH = re.compile(r"\n[^\S\n]*\n")


class LineRule(ABC):
    """Base class of the rules for lines."""

    @abstractmethod
    def keeps(self, line: str) -> bool:
        """Return True for a line that stays."""


@dataclass(frozen=True)
class TerminalPunctuation(LineRule):
    """Remove lines that do not end in one of some marks, such as headings, menus and buttons.

    Attributes:
        marks: ends of a line that is kept; C4 has full stop, exclamation mark, question mark and
            end quotation mark, and here those of other scripts are added.
        ellipsis: ends of a line that is removed nevertheless.
    """

    marks: tuple[str, ...] = _ENDS
    ellipsis: tuple[str, ...] = ("...", "…")

    def keeps(self, line: str) -> bool:
        return line.endswith(self.marks) and not line.endswith(self.ellipsis)


@dataclass(frozen=True)
class LineWords(LineRule):
    """Remove lines with few words; an ideograph is a word.

    Attributes:
        least: the number of words of a line that is kept.
    """

    least: int = 5

    def __post_init__(self) -> None:
        require_at_least(1, least=self.least)

    def keeps(self, line: str) -> bool:
        # Words between spaces are fast to count: never more than all words, and all in ASCII text.
        enough = len(line.split()) >= self.least
        return enough or (not line.isascii() and len(find_words([line]).begins) >= self.least)


@dataclass(frozen=True)
class UnwantedLines(LineRule):
    """Remove lines with one of some phrases, in any case. The phrases are English.

    Attributes:
        phrases: of notices about scripts, cookies and terms.
    """

    phrases: tuple[str, ...] = (
        "javascript", "terms of use", "privacy policy", "cookie policy", "uses cookies",
        "use of cookies", "use cookies",
    )  # fmt: skip

    def keeps(self, line: str) -> bool:
        lower = line.lower()
        return not any(phrase.lower() in lower for phrase in self.phrases)


def remove_lines(text: str, rules: Sequence[LineRule]) -> tuple[str, list[tuple[int, str]]]:
    """Return the text without the lines that a rule removes; empty lines stay.

    Also return each line that was removed, after the number of the first rule that removes it.
    """
    if not rules:
        return text, []
    lines, removed = list[str](), list[tuple[int, str]]()
    for line in text.splitlines(keepends=True):
        bare = line.strip()
        rule = next((n for n, rule in enumerate(rules) if bare and not rule.keeps(bare)), None)
        if rule is None:
            lines.append(line)
        else:
            removed.append((rule, line))
    return "".join(lines), removed


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
        languages: the ISO 639 code of each text.
        split: returns the sentences of a text in a language.

    Attributes:
        undecided: `(D)` True for texts that no rule has rejected; a rule need not judge others.
    """

    def __init__(
        self, texts: Sequence[str], languages: Sequence[str], split: Callable[[str, str], list[str]]
    ) -> None:
        self.texts, self.languages, self.split = texts, languages, split
        self.undecided = np.ones(len(texts), dtype=np.bool_)
        self._search, self._ngrams = self._search_ngrams(), list[RepeatedNgrams]()

    @functools.cached_property
    def words(self) -> WordTable:
        """The words of the texts, divided at spaces."""
        return find_words(self.texts)

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
            positions, groups = order[is_repeated][back], groups[is_repeated][back]
            firsts = order[starts][counts > 1]
            yield RepeatedNgrams(size, positions, groups, firsts, counts[counts > 1])
            begins = np.zeros(count + 1, dtype=np.bool_)
            begins[positions] = True
            positions = positions[begins[positions + 1]]


class DocumentRule(ABC):
    """Base class of the rules for documents."""

    @abstractmethod
    def rejects(self, batch: TextBatch) -> Rejected:
        """Return `(D)`, True for documents to leave out."""


class TextRule(DocumentRule):
    """Base class of the rules that judge one document after the other."""

    def rejects(self, batch: TextBatch) -> Rejected:
        rejected = np.zeros(len(batch.texts), dtype=np.bool_)
        for number in np.flatnonzero(batch.undecided).tolist():
            rejected[number] = self.rejects_text(batch.texts[number], batch, number)
        return rejected

    @abstractmethod
    def rejects_text(self, text: str, batch: TextBatch, number: int) -> bool:
        """Return True for a document to leave out, the one of this number in its batch."""


@dataclass(frozen=True)
class WordCount(DocumentRule):
    """Documents with too few or too many words (Gopher: 50 to 100,000)."""

    least: int = 50
    most: int = 100_000

    def __post_init__(self) -> None:
        _require_bounds(self.least, self.most)

    def rejects(self, batch: TextBatch) -> Rejected:
        counts = batch.words.counts
        return (counts < self.least) | (counts > self.most)


@dataclass(frozen=True)
class MeanWordLength(DocumentRule):
    """Documents whose words are too short or too long on average (Gopher: 3 to 10 characters).

    Does not apply to scripts without spaces.
    """

    least: float = 3.0
    most: float = 10.0

    def __post_init__(self) -> None:
        _require_bounds(self.least, self.most)

    def rejects(self, batch: TextBatch) -> Rejected:
        words = batch.words
        counts = np.maximum(words.counts, 1)
        spaced = words.total(words.singles) < UNSPACED_SHARE * counts
        means = words.total(words.lengths) / counts
        return spaced & ((means < self.least) | (means > self.most))


@dataclass(frozen=True)
class Symbols(TextRule):
    """Documents with many hash signs, or many ellipses, per word (Gopher: above 0.1)."""

    most: float = 0.1

    def __post_init__(self) -> None:
        require_range("[0, 1]", most=self.most)

    def rejects_text(self, text: str, batch: TextBatch, number: int) -> bool:
        ellipses = text.count("...") + text.count("…")
        return bool(max(text.count("#"), ellipses) > self.most * batch.words.counts[number])


class LineShare(TextRule):
    """Documents with a high share of some lines."""

    most: float

    def __post_init__(self) -> None:
        require_range("[0, 1]", most=self.most)

    @abstractmethod
    def counts(self, line: str) -> bool:
        """Return True for one of these lines."""

    def rejects_text(self, text: str, batch: TextBatch, number: int) -> bool:
        lines = _lines(text)
        return sum(map(self.counts, lines)) / max(len(lines), 1) > self.most


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
class AlphabeticWords(DocumentRule):
    """Documents with few words that have a letter, such as tables (Gopher: below 0.8)."""

    least: float = 0.8

    def __post_init__(self) -> None:
        require_range("[0, 1]", least=self.least)

    def rejects(self, batch: TextBatch) -> Rejected:
        return batch.words.total(batch.words.letters) < self.least * batch.words.counts


@dataclass(frozen=True)
class StopWords(TextRule):
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

    def rejects_text(self, text: str, batch: TextBatch, number: int) -> bool:
        if batch.languages[number] != self.language:
            return False
        distinct = set[str]()
        for word in word_finder(self.words)(text):
            distinct.add(word)
            if len(distinct) >= self.least:
                return False
        return True


@dataclass(frozen=True)
class RepeatedParts(TextRule):
    """Documents too many of whose parts, or of their characters, occurred in them before."""

    most: float = 0.3
    most_characters: float = 0.2

    def __post_init__(self) -> None:
        require_range("[0, 1]", most=self.most, most_characters=self.most_characters)

    @abstractmethod
    def parts(self, text: str) -> list[str]:
        """Return the parts of a text."""

    def rejects_text(self, text: str, batch: TextBatch, number: int) -> bool:
        parts = self.parts(text)
        distinct, characters = set(parts), sum(map(len, parts))
        repeated = characters - sum(map(len, distinct))
        too_many = len(parts) - len(distinct) > self.most * len(parts)
        return too_many or repeated > self.most_characters * characters


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
class TopNgrams(DocumentRule):
    """Documents much of which is the most frequent n-gram of words.

    Attributes:
        most: the share of the characters for n = 2, 3, … (Gopher: 0.2, 0.18, 0.16). Of equally
            frequent n-grams the first in the text counts; an n-gram that occurs once does not.
    """

    most: tuple[float, ...] = (0.2, 0.18, 0.16)

    def __post_init__(self) -> None:
        for share in self.most:
            require_range("[0, 1]", most=share)

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
class RepeatedWords(DocumentRule):
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
        for share in self.most:
            require_range("[0, 1]", most=share)

    def rejects(self, batch: TextBatch) -> Rejected:
        rejected = np.zeros(len(batch.texts), dtype=np.bool_)
        for ngrams in batch.repeated_ngrams(self.shortest + len(self.most) - 1):
            if ngrams.size >= self.shortest:
                repeats = ngrams.positions[ngrams.positions != ngrams.firsts[ngrams.groups]]
                share = batch.covered(repeats, ngrams.size)
                rejected |= share > self.most[ngrams.size - self.shortest]
        return rejected


@dataclass(frozen=True)
class UnwantedText(TextRule):
    """Documents with one of some phrases, in any case (C4: filler text, and curly brackets, which
    programs have)."""

    phrases: tuple[str, ...] = ("lorem ipsum", "{", "}")

    def rejects_text(self, text: str, batch: TextBatch, number: int) -> bool:
        lower = text.lower()
        return any(phrase.lower() in lower for phrase in self.phrases)


@dataclass(frozen=True)
class SentenceCount(TextRule):
    """Documents with few sentences (C4: fewer than 3)."""

    least: int = 3

    def __post_init__(self) -> None:
        require_at_least(1, least=self.least)

    def rejects_text(self, text: str, batch: TextBatch, number: int) -> bool:
        return len(batch.split(text, batch.languages[number])) < self.least


def _lines(text: str) -> list[str]:
    return [bare for line in text.splitlines() if (bare := line.strip())]


def _require_bounds(least: float | int, most: float | int) -> None:
    require_at_least(0, least=least)
    if not most >= least:
        raise ConfigError(f"must be at least {least}, the value of least, not {most}", where="most")
