"""The words of Japanese, as transformers' BertJapaneseTokenizer finds them: MeCab's.

Tohoku University's BERT divides text by MeCab (Kudo et al. 2004) with UniDic, after NFKC, then into
WordPiece or single characters. A divider in Python cannot be part of a `tokenizer.json`, so it is
kept with the backend, and the folder is saved in the layout of that class.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import (
    NormalizedString,
    PreTokenizedString,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from bothways.core.errors import TokenizerError, optional
from bothways.text.tokenizer_classes import CONFIG, flag

CLASS = "BertJapaneseTokenizer"
_FIX = (
    'Supported are "word_tokenizer_type": "mecab" with "subword_tokenizer_type": "wordpiece" or '
    '"character", and in "mecab_kwargs" the keys mecab_dic, mecab_option and normalize_text.'
)
_KEYS = {"mecab_dic", "mecab_option", "normalize_text"}


@dataclass(frozen=True)
class JapaneseWords:
    """How text is divided.

    Attributes:
        dictionary: the package of MeCab's dictionary: unidic_lite, unidic or ipadic; None for that
            of the system.
        option: further options of MeCab.
        normalise: apply NFKC first.
        lowercase: convert words to lower case.
        characters: divide words into characters instead of WordPiece.
    """

    dictionary: str | None = "unidic_lite"
    option: str = ""
    normalise: bool = True
    lowercase: bool = False
    characters: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of `tokenizer_config.json`."""
        return {
            "tokenizer_class": CLASS,
            "do_lower_case": self.lowercase,
            "word_tokenizer_type": "mecab",
            "subword_tokenizer_type": "character" if self.characters else "wordpiece",
            "mecab_kwargs": {
                "mecab_dic": self.dictionary,
                "mecab_option": self.option or None,
                "normalize_text": self.normalise,
            },
        }

    def attach(self, backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
        """Return a copy of a backend that divides words by MeCab.

        Raises:
            ResourceError: MeCab or its dictionary is not installed.
        """
        with optional("ja", "dividing Japanese words"):
            import fugashi

            option = self.option
            if self.dictionary is not None:
                folder = importlib.import_module(self.dictionary).DICDIR
                option = f'-d "{folder}" -r "{folder}/mecabrc" {option}'
        copy = tokenizers.Tokenizer.from_str(backend.to_str())
        divider = _Divider(fugashi.GenericTagger(option), self.lowercase, self.characters)
        copy.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(divider)
        return copy


class _Divider:
    """A pre-tokenizer: the parts of a text that MeCab says are words."""

    def __init__(self, tagger: Any, lowercase: bool, characters: bool) -> None:
        self._tagger, self._lowercase, self._characters = tagger, lowercase, characters

    def pre_tokenize(self, text: PreTokenizedString) -> None:
        text.split(self._split)

    def _split(self, _: int, normalized: NormalizedString) -> list[NormalizedString]:
        text, end, words = str(normalized), 0, list[NormalizedString]()
        for node in self._tagger(text):
            start = text.index(node.surface, end)
            end = start + len(node.surface)
            word = normalized[start:end]
            assert word is not None
            if self._lowercase:
                _lower(word)
            # MeCab takes few blanks for such; transformers' WordPiece splits at the others.
            for match in re.finditer(r"(?s)." if self._characters else r"\S+", str(word)):
                piece = word[match.start() : match.end()]
                assert piece is not None
                words.append(piece)
        return words


def _lower(word: NormalizedString) -> None:
    """Convert a word to lower case as Python does: Σ at its end becomes ς."""
    lowered = str(word).lower()
    word.lowercase()
    if len(lowered) == len(str(word)):
        letters = iter(lowered)
        word.map(lambda _: next(letters))


def japanese_backend(
    vocab: Mapping[str, int], words: JapaneseWords, unknown: str
) -> tokenizers.Tokenizer:
    """Return the backend without its division into words, which `JapaneseWords.attach` adds."""
    backend = tokenizers.Tokenizer(
        models.WordPiece(dict(vocab), unk_token=unknown, max_input_chars_per_word=100)
    )
    if words.normalise:
        backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece(prefix="##")
    return backend


def read_words(config: Mapping[str, Any], file: Path) -> JapaneseWords:
    """Read the settings of a folder with this class.

    Raises:
        TokenizerError: words are divided in a way that is not supported.
    """
    word = config.get("word_tokenizer_type") or "basic"
    subword = config.get("subword_tokenizer_type") or "wordpiece"
    options = config.get("mecab_kwargs") or {}
    divides = all(
        flag(config, file, key, True) for key in ("do_word_tokenize", "do_subword_tokenize")
    )
    supported = word == "mecab" and subword in ("wordpiece", "character") and divides
    if not supported or config.get("never_split"):
        message = f"{CLASS} divides text into words by {word!r}, and words by {subword!r}"
        raise TokenizerError(message, where=file.with_name(CONFIG), fix=_FIX)
    if not isinstance(options, dict) or not set(options) <= _KEYS:
        message = f"'mecab_kwargs' is {options!r:.80}"
        raise TokenizerError(message, where=file.with_name(CONFIG), fix=_FIX)
    words = JapaneseWords(
        dictionary=options.get("mecab_dic", "unidic_lite"),
        option=options.get("mecab_option") or "",
        normalise=options.get("normalize_text", True),
        lowercase=flag(config, file, "do_lower_case", False),
        characters=subword == "character",
    )
    supported_dictionary = words.dictionary in (None, "unidic_lite", "unidic", "ipadic")
    if (
        not supported_dictionary
        or not isinstance(words.option, str)
        or words.normalise not in (True, False)
    ):
        message = f"'mecab_kwargs' is {options!r:.80}"
        raise TokenizerError(message, where=file.with_name(CONFIG), fix=_FIX)
    if words.characters and not words.normalise:
        message = f"{CLASS} divides unnormalised words into characters"
        raise TokenizerError(message, where=file.with_name(CONFIG), fix=_FIX)
    return words
