"""Sentences: English and Chinese, nothing lost, nothing but single spaces inside."""

import time
import unicodedata

import pytest
from hypothesis import given, strategies as st

from bothways.core.errors import ConfigError
from bothways.data import sentences
from bothways.data.sentences import check_language, detect_language, split_sentences


@pytest.mark.parametrize(("language", "text", "expected"), [
    ("en", "Dr. Smith met Mr. J. R. Jones at 3 p.m. in the U.S. They talked.", 2),
    ("en", "Prices rose by 3.5 per cent, e.g. in Fig. 3. Really?! Yes... No.", 4),
    ("en", 'He said: "Go. Now." Then he left.', 2),
    ("zh", "他说：“你好。我走了。”然后他走了！真的吗？是的。", 4),
    ("zh", "数学是研究数量的学科。它有3.5个分支。好！", 3),
    ("de", "Das ist z.B. Berlin. Und nun?", 2),
    ("en", "", 0),
    ("en", " \n\t\u3000\r\n", 0),
])  # fmt: skip
def test_counts(language, text, expected):
    assert len(split_sentences(text, language)) == expected


def test_paragraphs_first_and_single_spaces():
    text = "A heading\nThe  first\tone. The\u3000second.\r\n\r\n  last \u2028 one\x0cno"
    expected = "A heading|The first one.|The second.|last|one|no"
    assert split_sentences(text) == expected.split("|")


@given(st.text(), st.sampled_from(["en", "zh"]))
def test_no_character_is_lost_and_no_space_added(text, language):
    found = split_sentences(text, language)
    assert "".join("".join(found).split()) == "".join(text.split())
    assert all(sentence and sentence == " ".join(sentence.split()) for sentence in found)


PARTS = st.sampled_from(["The cat sat.", "Why not?", "No!", "a" * 70, "你好。", "x. y"])


@given(st.lists(PARTS, min_size=20))
def test_nothing_is_lost_where_a_long_paragraph_is_cut(parts):
    text = " ".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sentences, "PIECE", 64)
        assert "".join("".join(split_sentences(text)).split()) == "".join(text.split())


@given(st.lists(st.text("ab你", min_size=1, max_size=19), min_size=1))
def test_a_sentence_that_is_too_long_is_cut_between_words(words):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sentences, "PIECE", 20)
        found = split_sentences(" ".join(words))
    assert " ".join(found).split() == words
    assert all(len(piece) <= 20 for piece in found)


def test_where_words_have_no_spaces_a_sentence_is_cut_at_the_piece():
    assert split_sentences("ก" * 20_000, "th") == ["ก" * 8192, "ก" * 8192, "ก" * 3616]
    assert split_sentences("ab " + "字" * 10_000, "zh") == ["ab", "字" * 8191, "字" * 1809]


def test_a_long_paragraph_has_the_sentences_of_a_short_one():
    parts = [f"Sentence number {i} ends here." for i in range(2000)]
    assert split_sentences(" ".join(parts)) == parts


def test_time_does_not_grow_with_the_square():
    def seconds(repeats: int) -> float:
        start = time.process_time()
        split_sentences("你。" * repeats)
        return time.process_time() - start

    small, large = min(seconds(4096) for _ in range(3)), seconds(4096 * 8)
    assert large < 8 * 3 * small  # it takes 64 times as long without the cut


def test_the_language_is_told_from_the_first_thousand_characters():
    texts = ["", "我们用 BERT 做实验。", "a" * 5000 + "数" * 5000]
    assert [*map(detect_language, texts)] == ["en", "zh", "en"]


@given(st.text(st.sampled_from("ab 数豈𠀀あ。\n") | st.characters(exclude_categories=["Cs"])))
def test_the_rule_is_the_one_in_the_docstring(text):
    sample = [c for c in text[:1000] if not c.isspace()]
    names = [unicodedata.name(c, "") for c in sample]
    chinese = [name for name in names if name.startswith("CJK ") and "IDEOGRAPH" in name]
    if all(names):  # of unassigned code points the name does not tell
        is_chinese = bool(chinese) and len(chinese) >= len(sample) / 5
        assert detect_language(text) == ("zh" if is_chinese else "en")


@pytest.mark.parametrize("language", ["english", "", "EN", "e", "zh-CN", "xx", "jp"])
def test_what_is_no_language(language):
    with pytest.raises(ConfigError, match="is not a language"):
        check_language(language)
    for code in ("auto", "en", "yue"):
        check_language(code)
