"""The cleaning of a corpus as a value: which steps, in their order, with their settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from bothways.core.config.values import require_at_least
from bothways.core.errors import ConfigError
from bothways.data.cleaning import document_rules as documents, line_rules as lines
from bothways.data.cleaning.near_duplicates import NearDuplicates


@dataclass(frozen=True)
class Cleaning:
    """The steps of a cleaning, in the order of the fields; None is a step that is not taken.

    Rules for lines come first, and rules for documents read what is left. A document is dropped by
    the first rule that rejects it. Documents with fewer than `min_tokens` tokens are dropped after
    that, then documents with the same sentences as an earlier one; near-duplicates are searched
    for among the rest.
    """

    terminal_punctuation: lines.TerminalPunctuation | None = None
    line_words: lines.LineWords | None = None
    unwanted_lines: lines.UnwantedLines | None = None
    word_count: documents.WordCount | None = None
    mean_word_length: documents.MeanWordLength | None = None
    symbols: documents.Symbols | None = None
    bullet_lines: documents.BulletLines | None = None
    ellipsis_lines: documents.EllipsisLines | None = None
    alphabetic_words: documents.AlphabeticWords | None = None
    stop_words: documents.StopWords | None = None
    repeated_lines: documents.RepeatedLines | None = None
    repeated_paragraphs: documents.RepeatedParagraphs | None = None
    top_ngrams: documents.TopNgrams | None = None
    repeated_words: documents.RepeatedWords | None = None
    unwanted_text: documents.UnwantedText | None = None
    sentence_count: documents.SentenceCount | None = None
    min_tokens: int = 1
    near_duplicates: NearDuplicates | None = None

    def __post_init__(self) -> None:
        require_at_least(1, min_tokens=self.min_tokens)

    @property
    def line_rules(self) -> dict[str, lines.LineRule]:
        """The rules for lines that are applied, by name, in their order."""
        rules = vars(self).items()
        return {name: rule for name, rule in rules if isinstance(rule, lines.LineRule)}

    @property
    def document_rules(self) -> dict[str, documents.DocumentRule]:
        """The rules for documents that are applied, by name, in their order."""
        rules = vars(self).items()
        return {name: rule for name, rule in rules if isinstance(rule, documents.DocumentRule)}


def gopher() -> Cleaning:
    """Return the filters of quality and repetition of Gopher (Rae et al. 2021, appendix A.1.1)."""
    return Cleaning(
        word_count=documents.WordCount(),
        mean_word_length=documents.MeanWordLength(),
        symbols=documents.Symbols(),
        bullet_lines=documents.BulletLines(),
        ellipsis_lines=documents.EllipsisLines(),
        alphabetic_words=documents.AlphabeticWords(),
        stop_words=documents.StopWords(),
        repeated_lines=documents.RepeatedLines(),
        repeated_paragraphs=documents.RepeatedParagraphs(),
        top_ngrams=documents.TopNgrams(),
        repeated_words=documents.RepeatedWords(),
    )


def c4() -> Cleaning:
    """Return the filters of C4 (Raffel et al. 2020, section 2.2).

    C4's list of bad words, its detection of English, its removal of citation marks and of sentences
    that occur in several pages are not among them.
    """
    return Cleaning(
        terminal_punctuation=lines.TerminalPunctuation(),
        line_words=lines.LineWords(),
        unwanted_lines=lines.UnwantedLines(),
        unwanted_text=documents.UnwantedText(),
        sentence_count=documents.SentenceCount(),
    )


FILTERS: dict[str, Callable[[], Cleaning]] = {"none": Cleaning, "gopher": gopher, "c4": c4}
"""Sets of filters by name."""


def make_cleaning(
    filters: str = "none", near_duplicates: float | None = None, min_tokens: int = 1
) -> Cleaning:
    """Return the cleaning with a set of filters.

    Args:
        filters: the name of the set.
        near_duplicates: the threshold of `NearDuplicates`; None to leave out none.
        min_tokens: minimum number of tokens of a document.

    Raises:
        ConfigError: an unknown set, or a value out of range.
    """
    if filters not in FILTERS:
        fix = f"Choose one of {', '.join(FILTERS)}."
        raise ConfigError(f"unknown filters {filters!r}", where="filters", fix=fix)
    near = None
    if near_duplicates is not None:
        try:
            near = NearDuplicates(near_duplicates)
        except ConfigError as error:
            raise ConfigError(error.what, where="near_duplicates", fix=error.fix) from error
    return dataclasses.replace(FILTERS[filters](), near_duplicates=near, min_tokens=min_tokens)
