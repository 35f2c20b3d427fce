"""Measures of how a vocabulary fits a text: unknown rate, fertility, coverage, unused entries.

Words are the same for every tokenizer, so that two vocabularies can be compared on one text: BERT's
pre-tokenizer splits at white space, punctuation marks and ideographs, and a word has a letter or a
digit. Each distinct word is tokenized as in running text: after a space, but an ideograph without
one. Fertility is that of Rust et al. 2021. It does not show tokens of several ideographs, which the
characters per token do.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import normalizers, pre_tokenizers

from bothways.core.errors import ConfigError, DataError
from bothways.text.tokenizer import Tokenizer, bytes_in

_BLOCK = 256
_CLEAN = normalizers.BertNormalizer(
    clean_text=True, handle_chinese_chars=True, strip_accents=False, lowercase=False
)
_CUT = pre_tokenizers.BertPreTokenizer()
_SEPARATORS = r"!-/:-@\[-`{-~\u3400-\u4DBF\u4E00-\u9FFF\uF900-\uFAFF\U00020000-\U0002A6DF"
_PIECE = re.compile(rf"[^{_SEPARATORS} \n\t]+|[{_SEPARATORS}]")
"""What `_CUT` never joins: ASCII punctuation marks, ideographs, and runs of other characters."""
_SPACES = ("▁", "Ġ")
"""How vocabularies write a space: SentencePiece's and those over bytes."""


@dataclass(frozen=True)
class SplitWord:
    """A word with its tokens and the number of its occurrences."""

    word: str
    pieces: tuple[str, ...]
    count: int


@dataclass(frozen=True)
class VocabularyReport:
    """The fit of a vocabulary to a text. Shares are between 0 and 1.

    Attributes:
        characters, tokens, words: of the text.
        unknown: share of its tokens that are unknown.
        unknown_words: share of its words that have an unknown token.
        fertility: tokens per word.
        whole_words: share of its words that are one known token.
        covered: share of the characters of words that are in words without an unknown token.
        unused: share of the vocabulary, without special tokens, that the text never uses.
        longest: the longest tokens of the vocabulary, the longest first, as in its file; tokens of
            bytes as the characters that they spell.
        split: the most frequent words that are more than one token.
        strange: the most frequent words that have an unknown token.
    """

    size: int
    characters: int
    tokens: int
    words: int
    unknown: float
    unknown_words: float
    fertility: float
    whole_words: float
    covered: float
    unused: float
    longest: tuple[str, ...]
    split: tuple[SplitWord, ...]
    strange: tuple[SplitWord, ...]


def vocabulary_report(
    tokenizer: Tokenizer, texts: Iterable[str], *, examples: int = 10
) -> VocabularyReport:
    """Measure the fit in one pass; memory grows with the number of distinct words.

    Raises:
        ConfigError: one text instead of several.
        DataError: the texts hold no word.
    """
    if isinstance(texts, str):  # whose items would be read as texts of one character
        raise ConfigError("must be several texts, not one", where="texts", fix="Give a list.")
    characters, use, pieces = 0, np.zeros(tokenizer.size, dtype=np.int64), Counter[str]()
    stream = iter(texts)
    while block := list(itertools.islice(stream, _BLOCK)):
        block_ids, _ = tokenizer.encode_flat(block)
        use += np.bincount(block_ids, minlength=tokenizer.size)
        for text in block:
            characters += len(text)
            pieces.update(_PIECE.findall(text))
    words = Counter[str]()
    # Each distinct piece is normalised once, however often it occurs, and then dropped.
    while pieces:
        piece, count = pieces.popitem()
        for word, _ in _CUT.pre_tokenize_str(_CLEAN.normalize_str(piece)):
            if any(map(str.isalnum, word)):
                words[word] += count
    if not words:
        message = "there is no word in the text"
        raise DataError(message, fix="Give a text that the vocabulary is meant for.")
    ranked = sorted(words, key=lambda word: (-words[word], word))
    # As in running text. A tokenizer that puts a space before every text has a token for the one
    # before an ideograph, which BERT's normaliser puts between spaces: ▁ 的 → 的.
    marks = [id for mark in _SPACES if (id := tokenizer.id(mark)) is not None]
    spelled = tokenizer.encode([" " + word for word in ranked])
    for at, (word, ids) in enumerate(zip(ranked, spelled, strict=True)):
        if len(word) == 1 < len(ids) and ids[0] in marks and _CLEAN.normalize_str(word) != word:
            spelled[at] = ids[1:]
    counts = np.array([words[word] for word in ranked])
    # Characters of a word, times its occurrences
    letters = counts * np.array(list(map(len, ranked)))
    lengths = np.array(list(map(len, spelled)))
    strange = np.array([tokenizer.specials.unknown in ids for ids in spelled])
    ordinary = tokenizer.named & ~tokenizer.special
    ordinary[tokenizer.specials.unknown] = False
    tokens = [_readable_token(tokenizer, id) for id in np.flatnonzero(ordinary).tolist()]
    tokens.sort(key=lambda item: (-item[0], item[1]))

    def show(mask: NDArray[np.bool_]) -> tuple[SplitWord, ...]:
        """Return the most frequent of these words, with their tokens."""
        result = list[SplitWord]()
        for i in np.flatnonzero(mask)[:examples].tolist():
            pieces = tuple(_readable_token(tokenizer, id)[1] for id in spelled[i])
            result.append(SplitWord(ranked[i], pieces, int(counts[i])))
        return tuple(result)

    return VocabularyReport(
        size=tokenizer.size,
        characters=characters,
        tokens=int(use.sum()),
        words=int(counts.sum()),
        unknown=_share(use, np.arange(tokenizer.size) == tokenizer.specials.unknown),
        unknown_words=_share(counts, strange),
        fertility=int(counts @ lengths) / int(counts.sum()),
        whole_words=_share(counts, (lengths == 1) & ~strange),
        covered=_share(letters, ~strange),
        unused=_share(ordinary, use == 0),
        longest=tuple(token for _, token in tokens[:examples]),
        split=show((lengths > 1) & ~strange),
        strange=show(strange),
    )


def _readable_token(tokenizer: Tokenizer, id: int) -> tuple[int, str]:
    """Return the number of whole characters of a token, and the token in readable form.

    Tokens of bytes are shown as the characters that they spell, ä¸Ń → 中, unless one is cut.
    """
    token = tokenizer.token(int(id))
    if tokenizer.kind != "BPE" or (raw := bytes_in(token)) is None:
        return len(token), token
    text = raw.decode("utf-8", "ignore").replace(" ", "Ġ")
    is_whole = text.replace("Ġ", " ").encode() == raw and text.isprintable()
    return len(text), text if is_whole else token


def _share(weights: NDArray[Any], mask: NDArray[np.bool_]) -> float:
    """Return the share of the total weight that is chosen; 0 if the total is 0."""
    return int(weights[mask].sum()) / max(1, int(weights.sum()))
