"""Words of running text: slices of it, cut as BERT's basic tokenisation cuts."""

import functools
import itertools
import sys
import time
import unicodedata
from typing import get_args

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from bothways.tasks.tagging.running_text import Splitter, split_words
from spread import in_turn

LETTERS = "a B9 .,-$+_'’“ \t\n\u00a0\u3000中文カ한é\u0301\u0308שלוםسلام\u064bहि\u094d👍\u200d🏽️\u0000\u200b"
MIXED = st.text(st.sampled_from(LETTERS) | st.characters(exclude_categories=["Cs"]))


def _words_of_bert(text: str) -> list[str]:
    normalizer = BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=False, lowercase=False
    )
    return [word for word, _ in BertPreTokenizer().pre_tokenize_str(normalizer.normalize_str(text))]


def _words(text: str) -> list[str]:
    return [text[begin:end] for begin, end in split_words(text, "punctuation")]


DROPPED = {"Cc", "Cf", "Cn", "Co", "Cs"}
"""Categories that BERT's tokenizer drops, surrogates, and characters that no version of Unicode has named yet."""


IDEOGRAPHS = {chr(code) for code in range(0x2B820, 0x2B920)}
"""The block of ideographs that `tokenizers` does not know."""


@functools.cache
def _classed_differently() -> set[str]:
    """Characters that BERT's tokenizer classes in another way; of letters without case, the ends of each 16 are compared."""
    characters = map(chr, range(sys.maxunicode + 1))
    kinds = ((c, unicodedata.category(c)) for c in characters)
    named = [
        c for c, kind in kinds if kind not in DROPPED and (kind != "Lo" or ord(c) % 16 in (0, 15))
    ]
    blocks = [named[start : start + 100] for start in range(0, len(named), 100)]
    texts = [" ".join(f"a{c}a" for c in block) for block in blocks]
    pairs = zip(blocks, texts, strict=True)
    unequal = [block for block, text in pairs if _words(text) != _words_of_bert(text)]
    doubtful = itertools.chain.from_iterable(unequal)
    return IDEOGRAPHS.union(c for c in doubtful if _words(f"a{c}a") != _words_of_bert(f"a{c}a"))


def test_every_character_is_classed_as_berts_tokenizer_does_but_for_newer_unicode():
    """`tokenizers` knows the marks of Unicode 8, one block of ideographs fewer than BERT, and drops U+FFFD."""
    changed_category = {"\u166d", "\U000111c9"}
    others = _classed_differently() - IDEOGRAPHS - changed_category - {"\ufffd"}
    assert {unicodedata.category(c)[0] for c in others} <= {"P"}
    assert all(len(_words_of_bert(f"a{c}a")) == 1 for c in others)
    assert len(others) < 200


@settings(deadline=None)
@given(MIXED)
def test_words_are_those_of_berts_tokenizer(text):
    """Without what it drops, and without the characters that an older Unicode classes differently."""
    kept = "".join(c for c in text if unicodedata.category(c) not in DROPPED or c in " \t\n")
    kept = "".join(c for c in kept if c not in _classed_differently())
    assert _words(kept) == _words_of_bert(kept)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The U.N. met Mr. O'Neil.", ["The", "U.N.", "met", "Mr.", "O'Neil", "."]),
        ("Germany's AT&T, e.g., won 1-0!", ["Germany", "'s", "AT&T", ",", "e.g.", ",", "won", "1-0", "!"]),
        ("a well-known J. Smith (1,000.5)", ["a", "well-known", "J.", "Smith", "(", "1,000.5", ")"]),
        ("see https://a.org/b?c=d. Or x@y.org", ["see", "https://a.org/b?c=d", ".", "Or", "x@y.org"]),
        ("end.Next", ["end", ".", "Next"]),
        ("we’ll “go”", ["we", "’ll", "“", "go", "”"]),
        ("中文 has U.S. \u0000", ["中", "文", "has", "U.S.", "\u0000"]),
        ("हिन्दी e\u0301t", ["हिन्दी", "e\u0301t"]),
        ("In Paris😍🤩, I❤️NY👍🏽", ["In", "Paris", "😍", "🤩", ",", "I", "❤️", "NY", "👍🏽"]),
        ("👨‍👩‍👧Ann क्‍ष €100", ["👨‍👩‍👧", "Ann", "क्‍ष", "€", "100"]),
    ],
)  # fmt: skip
def test_names_and_abbreviations_are_whole(text, words):
    assert [text[begin:end] for begin, end in split_words(text)] == words
    expected = text.split()
    assert [text[begin:end] for begin, end in split_words(text, "whitespace")] == expected
    assert [text[a:b] for a, b in split_words(text, "characters")] == [*"".join(expected)]


@settings(max_examples=100)
@given(MIXED, st.sampled_from(get_args(Splitter)))
def test_every_splitter_keeps_all_but_white_space(text, splitter):
    spans = split_words(text, splitter)
    assert "".join(text[begin:end] for begin, end in spans) == "".join(text.split())
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert not any(text[begin:end].split() != [text[begin:end]] for begin, end in spans)


UNITS = (".", "+", "_", "-", "中", "a@", "a.", "+@", "www.", "@a.", "x@y.z")


@pytest.mark.parametrize(
    ("unit", "splitter"),
    in_turn([(unit,) for unit in UNITS], get_args(Splitter)),
)
def test_splitting_takes_linear_time(unit, splitter):
    text = (unit * 40_000)[:40_000]
    before = time.process_time()
    split_words(text, splitter)
    assert time.process_time() - before < 2  # quadratic: more than eight seconds
