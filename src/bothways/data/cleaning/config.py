"""The cleaning of a corpus as a value, and its first part for a shard: rules and signatures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bothways.core.config.values import require_at_least
from bothways.core.errors import ConfigError
from bothways.data.cleaning import rules
from bothways.data.cleaning.near_duplicates import NearDuplicates, SignedTexts, sign_texts


@dataclass(frozen=True)
class Cleaning:
    """The steps of a cleaning, in the order of the fields; None is a step that is not taken.

    Rules for lines come first, and rules for documents read what is left. A document is dropped by
    the first rule that rejects it. Documents with fewer than `min_tokens` tokens are dropped after
    that, then documents with the same sentences as an earlier one; near-duplicates are searched
    for among the rest.
    """

    terminal_punctuation: rules.TerminalPunctuation | None = None
    line_words: rules.LineWords | None = None
    unwanted_lines: rules.UnwantedLines | None = None
    word_count: rules.WordCount | None = None
    mean_word_length: rules.MeanWordLength | None = None
    symbols: rules.Symbols | None = None
    bullet_lines: rules.BulletLines | None = None
    ellipsis_lines: rules.EllipsisLines | None = None
    alphabetic_words: rules.AlphabeticWords | None = None
    stop_words: rules.StopWords | None = None
    repeated_lines: rules.RepeatedLines | None = None
    repeated_paragraphs: rules.RepeatedParagraphs | None = None
    top_ngrams: rules.TopNgrams | None = None
    repeated_words: rules.RepeatedWords | None = None
    unwanted_text: rules.UnwantedText | None = None
    sentence_count: rules.SentenceCount | None = None
    min_tokens: int = 1
    near_duplicates: NearDuplicates | None = None

    def __post_init__(self) -> None:
        require_at_least(1, min_tokens=self.min_tokens)

    @property
    def line_rules(self) -> dict[str, rules.LineRule]:
        """The rules for lines that are applied, by name, in their order."""
        return {n: rule for n, rule in vars(self).items() if isinstance(rule, rules.LineRule)}

    @property
    def document_rules(self) -> dict[str, rules.DocumentRule]:
        """The rules for documents that are applied, by name, in their order."""
        return {n: rule for n, rule in vars(self).items() if isinstance(rule, rules.DocumentRule)}


FILTERS = {
    "none": Cleaning(),
    # The filters of quality and repetition of Gopher (Rae et al. 2021, appendix A.1.1).
    "gopher": Cleaning(
        word_count=rules.WordCount(),
        mean_word_length=rules.MeanWordLength(),
        symbols=rules.Symbols(),
        bullet_lines=rules.BulletLines(),
        ellipsis_lines=rules.EllipsisLines(),
        alphabetic_words=rules.AlphabeticWords(),
        stop_words=rules.StopWords(),
        repeated_lines=rules.RepeatedLines(),
        repeated_paragraphs=rules.RepeatedParagraphs(),
        top_ngrams=rules.TopNgrams(),
        repeated_words=rules.RepeatedWords(),
    ),
    # The filters of C4 (Raffel et al. 2020, section 2.2), without its list of bad words, its
    # detection of English, its removal of citation marks and of sentences that occur in several
    # pages.
    "c4": Cleaning(
        terminal_punctuation=rules.TerminalPunctuation(),
        line_words=rules.LineWords(),
        unwanted_lines=rules.UnwantedLines(),
        unwanted_text=rules.UnwantedText(),
        sentence_count=rules.SentenceCount(),
    ),
}
"""Sets of filters by name."""


def make_cleaning(
    filters: str = "none", near_duplicates: float | None = None, min_tokens: int = 1
) -> Cleaning:
    """Return the cleaning with a set of filters.

    Args:
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
            raise ConfigError(error.what, where="near_duplicates", fix=error.advice) from error
    return dataclasses.replace(FILTERS[filters], near_duplicates=near, min_tokens=min_tokens)


BATCH_CHARACTERS = 2**19
"""Texts are measured together up to this number of characters."""


@dataclass(frozen=True)
class CleanedTexts:
    """The texts of D documents after the rules.

    Attributes:
        texts: without the lines that rules removed.
        fates: `(D)` 0, or 1 + the index of the rule for documents that rejects it.
        removed: `(L, 2)` lines and bytes in UTF-8 that each rule for lines removed.
        signed: the texts that stay, and empty ones instead of the others; None if near-duplicates
            are not searched for.
    """

    texts: list[str]
    fates: NDArray[np.uint8]
    removed: NDArray[np.int64]
    signed: SignedTexts | None


def clean_texts(
    texts: Sequence[str],
    languages: Sequence[str],
    cleaning: Cleaning,
    split: Callable[[str, str], list[str]],
) -> CleanedTexts:
    """Apply the rules to texts, and compute the shingles and signatures of those that stay.

    Args:
        texts: without halves of surrogate pairs.
        languages: the ISO 639 code of each text.
        split: returns the sentences of a text in a language.
    """
    line_rules, cut = list(cleaning.line_rules.values()), list[str]()
    removed = np.zeros((len(line_rules), 2), dtype=np.int64)
    for text in texts:
        cleaned, lines = rules.remove_lines(text, line_rules)
        cut.append(cleaned)
        for number, line in lines:
            removed[number] += (1, len(line.encode()))
    fates = np.zeros(len(texts), dtype=np.uint8)
    batches, start, size = list[slice](), 0, 0
    for number, text in enumerate(cut, 1):
        size += len(text)
        if size >= BATCH_CHARACTERS or number == len(cut):
            batches.append(slice(start, number))
            start, size = number, 0
    for batch in batches:
        text_batch = rules.TextBatch(cut[batch], languages[batch], split)
        # The first rule that rejects a text decides its fate; later rules skip it.
        for number, rule in enumerate(cleaning.document_rules.values(), 1):
            fates[batch][rule.rejects(text_batch) & text_batch.undecided] = number
            text_batch.undecided = fates[batch] == 0
    signed = None
    if cleaning.near_duplicates:
        staying = ["" if fate else text for text, fate in zip(cut, fates, strict=True)]
        # An empty table first: `concatenate` needs one, also without texts.
        tables = [sign_texts([], cleaning.near_duplicates)]
        tables += [sign_texts(staying[batch], cleaning.near_duplicates) for batch in batches]
        signed = SignedTexts(
            np.concatenate([table.shingles for table in tables]),
            np.cumsum(np.concatenate([[0], *(table.counts for table in tables)])),
            np.concatenate([table.signatures for table in tables]),
        )
    return CleanedTexts(cut, fates, removed, signed)
