"""The fit of a vocabulary to a domain, next to general text, and which words are worth adding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bothways.core.errors import DataError
from bothways.text.sampling import sample
from bothways.text.tokenizer import Tokenizer
from bothways.text.vocabulary_report import SplitWord, VocabularyReport, vocabulary_report

CEILING = 10_000_000
"""Characters of each text that are compared, an even sample."""
FEWEST, MOST, WORTH = 20, 1000, 0.03
"""Occurrences of a word that is worth adding, at least; words, at most; and the share of the tokens
that all of them must save. Rarer words are not learned, and fewer tokens are not noticed."""
_SPLIT = 20_000


@dataclass(frozen=True)
class VocabularyFit:
    """How a vocabulary fits the text of a domain.

    Attributes:
        domain, general: the measures; None without general text.
        words: candidates, those that save most tokens first.
        saved: the share of the domain's tokens that all of them save.
    """

    domain: VocabularyReport
    general: VocabularyReport | None
    words: tuple[SplitWord, ...]
    saved: float

    @property
    def worth(self) -> bool:
        """True if adding the words is worth it."""
        return self.saved >= WORTH

    @property
    def answer(self) -> str:
        """The answer, as a sentence."""
        if not self.words:
            return f"No: no word that is split occurs {FEWEST} times."
        found = f"the {len(self.words):,} best words save {self.saved:.1%} of the tokens"
        if self.worth:
            return f"Yes: {found}."
        return f"No: {found}, less than {WORTH:.0%}."


def vocabulary_fit(
    tokenizer: Tokenizer, domain: Iterable[str], general: Iterable[str] = ()
) -> VocabularyFit:
    """Measure the fit on an even sample of each text.

    Raises:
        DataError: the domain's text holds no word.
    """
    found = vocabulary_report(tokenizer, sample(domain, CEILING).read(), examples=_SPLIT)
    try:
        other = vocabulary_report(tokenizer, sample(general, CEILING).read())
    except DataError:  # there is none
        other = None
    merged: dict[str, SplitWord] = {}
    for split in (*found.split, *found.strange):
        word = split.word.lower() if tokenizer.lowercase else split.word
        before = merged[word].count if word in merged else 0
        merged[word] = SplitWord(word, split.pieces, before + split.count)
    ranked = sorted(merged.values(), key=lambda one: (-_saved(one), one.word))
    words = [one for one in ranked if one.count >= FEWEST and tokenizer.id(one.word) is None]
    words = words[:MOST]
    saved = sum(map(_saved, words)) / max(1, found.tokens)
    return VocabularyFit(found, other, tuple(words), saved)


def _saved(word: SplitWord) -> int:
    """Return the tokens that a word saves as an entry of its own; unknown words count once."""
    return word.count * max(1, len(word.pieces) - 1)
