"""The fit of a vocabulary to a domain, next to general text, and which words are worth adding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bothways.core.errors import DataError
from bothways.text.tokenizer import Tokenizer
from bothways.text.trainers import sample
from bothways.text.vocabulary_report import SplitWord, VocabularyReport, vocabulary_report

CEILING = 10_000_000
"""Characters of each text that are compared, an even sample."""
FEWEST, MOST, WORTH = 20, 1000, 0.03
"""Occurrences of a word that is worth adding, at least; words, at most; and the share of the tokens
that all of them must save beyond what the best words of general text save there: of any text, the
most frequent words that are split save some. Rarer words are not learned, and fewer tokens are not
noticed."""
_SPLIT = 20_000


@dataclass(frozen=True)
class VocabularyFit:
    """How a vocabulary fits the text of a domain.

    Attributes:
        domain, general: the measures; None without general text.
        words: candidates, those that save most tokens first.
        saved: the share of the domain's tokens that all of them save.
        saved_general: the same of general text by its own best words; 0 without general text.
    """

    domain: VocabularyReport
    general: VocabularyReport | None
    words: tuple[SplitWord, ...]
    saved: float
    saved_general: float = 0.0

    @property
    def worth(self) -> bool:
        """True if adding the words is worth it."""
        return self.saved - self.saved_general >= WORTH

    def rows(self) -> list[list[str]]:
        """Return the measures on the domain and on general text, as texts."""
        reports = [self.domain, *([self.general] if self.general else [])]
        return [
            ["tokens per word", *(f"{report.fertility:.3f}" for report in reports)],
            ["unknown tokens", *(f"{report.unknown:.3%}" for report in reports)],
            ["words of one token", *(f"{report.whole_words:.1%}" for report in reports)],
        ]

    @property
    def answer(self) -> str:
        """The answer, as a sentence."""
        if not self.words:
            return f"No: no word that is split occurs {FEWEST} times."
        savings = f"the {len(self.words):,} best words save {self.saved:.1%} of the tokens"
        if self.general is not None:
            savings += f", those of general text {self.saved_general:.1%} there"
        return (
            f"Yes: {savings}." if self.worth else f"No: {savings}, a gain of less than {WORTH:.0%}."
        )


def vocabulary_fit(
    tokenizer: Tokenizer, domain: Iterable[str], general: Iterable[str] = ()
) -> VocabularyFit:
    """Measure the fit on an even sample of each text.

    Raises:
        DataError: the domain's text holds no word.
    """
    domain_report = vocabulary_report(tokenizer, sample(domain, CEILING).read(), examples=_SPLIT)
    words, saved = _best_words(tokenizer, domain_report)
    try:
        other = vocabulary_report(tokenizer, sample(general, CEILING).read(), examples=_SPLIT)
    except DataError:  # there is none
        return VocabularyFit(domain_report, None, words, saved)
    return VocabularyFit(domain_report, other, words, saved, _best_words(tokenizer, other)[1])


def _best_words(
    tokenizer: Tokenizer, report: VocabularyReport
) -> tuple[tuple[SplitWord, ...], float]:
    """Return the words that save most tokens as entries, and the share of tokens they save."""
    merged: dict[str, SplitWord] = {}
    for split in (*report.split, *report.strange):
        word = split.word.lower() if tokenizer.lowercase else split.word
        previous = merged[word].count if word in merged else 0
        merged[word] = SplitWord(word, split.pieces, previous + split.count)
    ranked = sorted(merged.values(), key=lambda entry: (-_saved(entry), entry.word))
    words = [
        entry for entry in ranked if entry.count >= FEWEST and tokenizer.id(entry.word) is None
    ]
    words = words[:MOST]
    return tuple(words), sum(map(_saved, words)) / max(1, report.tokens)


def _saved(word: SplitWord) -> int:
    """Return the tokens that a word saves as an entry of its own; unknown words count once."""
    return word.count * max(1, len(word.pieces) - 1)
