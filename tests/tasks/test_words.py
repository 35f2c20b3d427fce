"""Words of running text: slices of it, cut as BERT's basic tokenisation cuts."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bothways.tasks.words import split_words

MIXED = st.text(
    st.one_of(
        st.sampled_from("a B9 .,-$+_'’“ \t\n\u00a0\u3000中文カ한é\u0301\u0308שלוםسلام\u064bहि\u094d👍\u200d🏽️\u0000\u200b"),
        st.characters(exclude_categories=["Cs"]),
    )
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Anna's in Oslo, now.", ["Anna", "'", "s", "in", "Oslo", ",", "now", "."]),
        ("cafe\u0301 nai\u0308ve", ["cafe\u0301", "nai\u0308ve"]),
        ("我在Oslo。", ["我", "在", "Oslo", "。"]),
        ("東京タワー", ["東", "京", "タワー"]),
        ("שלום, עולם", ["שלום", ",", "עולם"]),
        ("ok👍🏽 5$+3", ["ok👍🏽", "5", "$", "+", "3"]),
        (" \t\u3000", []),
        ("", []),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert [text[begin:end] for begin, end in split_words(text)] == words


@settings(deadline=None)
@given(MIXED)
def test_words_are_slices_in_order_and_nothing_but_white_space_is_between(text: str) -> None:
    spans, at = split_words(text), 0
    for begin, end in spans:
        assert begin < end
        assert not text[at:begin].strip()
        assert text[begin:end] == text[begin:end].strip() != ""
        at = end
    assert not text[at:].strip()
    for begin, end in spans:
        marks = [c for c in text[begin:end] if unicodedata.category(c).startswith("P")]
        assert not marks or end - begin == 1


@settings(deadline=None)
@given(MIXED)
def test_words_are_those_of_berts_tokenizer(text: str) -> None:
    """Without what it drops: control characters, and the characters that Python and it class differently."""
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer

    kept = "".join(c for c in text if unicodedata.category(c) not in {"Cc", "Cf", "Cn", "Co"} or c in " \t\n")
    clean = BertNormalizer(clean_text=True, handle_chinese_chars=True, strip_accents=False, lowercase=False).normalize_str(kept)
    theirs = [word for word, _ in BertPreTokenizer().pre_tokenize_str(clean)]
    assert [kept[begin:end] for begin, end in split_words(kept)] == theirs
