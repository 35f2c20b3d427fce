"""Rules against the words of their papers, written a second time in plain Python."""

import dataclasses
import random
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from bothways.core.config.reader import read, to_dict
from bothways.core.errors import ConfigError
from bothways.data.cleaning import rules, words as words_module
from bothways.data.cleaning.config import FILTERS, Cleaning, clean_texts, make_cleaning
from bothways.data.cleaning.words import find_words
from bothways.data.sentences import split_sentences


def rejected(rule: rules.DocumentRule, *texts: str, language: str = "en") -> list[bool]:
    batch = rules.TextBatch(texts, [language] * len(texts), split_sentences)
    found: list[bool] = rule.rejects(batch).tolist()
    single = (rules.TextBatch([text], [language], split_sentences) for text in texts)
    assert found == [bool(rule.rejects(batch)[0]) for batch in single], "judged as it is alone"
    return found


def some_texts(count: int, seed: int) -> list[str]:
    """Return texts of few words, so that n-grams are repeated, and some in Chinese."""
    draw = random.Random(seed)
    texts = []
    for number in range(count):
        size = draw.randint(0, 80)
        vocabulary = draw.randint(2, 40)
        chosen = [f"w{draw.randrange(vocabulary)}" + "x" * draw.randint(0, 3) for _ in range(size)]
        if draw.random() < 0.5 and size > 12:
            chosen += chosen[: draw.randint(5, 12)]
        if number % 4 == 3:
            texts.append("".join(chr(0x4E00 + int(word[1:].rstrip("x"))) for word in chosen))
        else:
            texts.append(" ".join(chosen))
    return texts


def plain_words(text: str) -> list[str]:
    return list(text) if "w" not in text else text.split()


def covered(words: list[str], begins: set[int], size: int) -> Fraction:
    """Return the share of the characters that n-grams at these words have, each counted once."""
    inside = {place for begin in begins for place in range(begin, begin + size)}
    return Fraction(sum(len(words[n]) for n in inside), max(1, sum(map(len, words))))


def plain_top(text: str, most: tuple[float, ...]) -> bool:
    words = plain_words(text)
    for size, limit in enumerate(most, 2):
        grams = [tuple(words[n : n + size]) for n in range(len(words) - size + 1)]
        counts = Counter(grams)
        if counts and max(counts.values()) > 1:
            top = max(counts, key=lambda gram: (counts[gram], -grams.index(gram)))
            begins = {n for n, gram in enumerate(grams) if gram == top}
            if float(covered(words, begins, size)) > limit:
                return True
    return False


def plain_repeated(text: str, shortest: int, most: tuple[float, ...]) -> bool:
    words = plain_words(text)
    for size, limit in enumerate(most, shortest):
        grams = [tuple(words[n : n + size]) for n in range(len(words) - size + 1)]
        begins = {n for n, gram in enumerate(grams) if gram in grams[:n]}
        if float(covered(words, begins, size)) > limit:
            return True
    return False


def test_repetition_of_ngrams_is_that_of_a_plain_count():
    texts = some_texts(300, 1)
    expected = [plain_top(text, rules.TopNgrams().most) for text in texts]
    assert rejected(rules.TopNgrams(), *texts) == expected
    assert 30 < sum(expected) < 270
    rule = rules.RepeatedWords()
    expected = [plain_repeated(text, rule.shortest, rule.most) for text in texts]
    assert rejected(rule, *texts) == expected
    assert 30 < sum(expected) < 270


def test_the_presets_have_the_numbers_of_the_papers():
    """Gopher: Rae et al. 2021, appendix A.1.1 and table A1. C4: Raffel et al. 2020, section 2.2."""
    quality, web = FILTERS["gopher"], FILTERS["c4"]
    assert quality.word_count == rules.WordCount(50, 100_000)
    assert quality.mean_word_length == rules.MeanWordLength(3.0, 10.0)
    assert quality.symbols == rules.Symbols(0.1)
    assert (quality.bullet_lines.most, quality.ellipsis_lines.most) == (0.9, 0.3)
    assert quality.alphabetic_words == rules.AlphabeticWords(0.8)
    assert quality.stop_words.least == 2
    assert " ".join(sorted(quality.stop_words.words)) == "and be have of that the to with"
    assert quality.repeated_lines == rules.RepeatedLines(0.3, 0.2)
    assert quality.repeated_paragraphs == rules.RepeatedParagraphs(0.3, 0.2)
    assert quality.top_ngrams == rules.TopNgrams((0.2, 0.18, 0.16))
    assert quality.repeated_words == rules.RepeatedWords(5, (0.15, 0.14, 0.13, 0.12, 0.11, 0.1))
    assert len(quality.document_rules) == 11
    assert (web.line_words, web.sentence_count) == (rules.LineWords(5), rules.SentenceCount(3))
    assert len(web.line_rules) == 3
    assert FILTERS["none"] == Cleaning()


LOREM = "one two three four five six seven eight nine ten"


@pytest.mark.parametrize(("rule", "kept", "left"), [
    (rules.WordCount(3, 5), ["a b c", "a b c d e", "数学数"], ["a b", "a b c d e f", "数学", ""]),
    (rules.MeanWordLength(3, 5), ["abc abc", "数学 数学", "abcde"], ["ab ab", "abcdef", "a abc ab"]),
    (rules.Symbols(0.1), [f"{LOREM} #", f"{LOREM} …"], [f"{LOREM} ##", f"{LOREM} …...", "#"]),
    (rules.BulletLines(0.5), ["- a\nb", "a\n* b\nc", "-a"], ["• a\n  - b\nc", "* a"]),
    (rules.EllipsisLines(0.3), ["a…\nb\nc\nd", "a"], ["a…\nb\nc", "a ..."]),
    (rules.AlphabeticWords(0.8), ["a b c d 5", "数学 数学 5"], ["a b c 5 6", "5"]),
    (rules.RepeatedLines(0.3, 0.9), ["a\na\nb\nc", "a\nb"], ["a\na\nb", "a\n a \na"]),
    (rules.RepeatedLines(0.9, 0.2), ["aaa\naaa\n" + "b" * 20], ["aaa\naaa\nbbbb"]),
    (rules.RepeatedParagraphs(0.3, 0.9), ["a\na\na", "a\n\na\n\nb\n\nc"], ["a\n\na", "a\n \na\n\nb"]),
    (rules.UnwantedText(), ["lorem", "a b"], ["Lorem Ipsum dolor", "if (x) {", "}"]),
    (rules.SentenceCount(3), ["He ran. She sat. We ate."], ["He ran. She sat.", ""]),
    (rules.StopWords(2), ["To be.", "the theory OF it"], ["The the the.", "theory often", ""]),
])  # fmt: skip
def test_a_rule_at_its_threshold(rule, kept, left):
    assert rejected(rule, *kept, *left) == [False] * len(kept) + [True] * len(left)


def test_the_language_of_a_document_decides():
    assert rejected(rules.SentenceCount(3), "数学。数学。数学。", language="zh") == [False]
    assert rejected(rules.StopWords(), "Das ist gut.", language="de") == [False]
    german = rules.StopWords(1, ("der", "die", "das"), "de")
    assert rejected(german, "Das ist gut.", "Gut so.", language="de") == [False, True]


def test_stop_words_of_scripts_with_marks_and_without_spaces():
    hindi = rules.StopWords(2, ("है", "में", "न"), "hi")
    texts = ["यह घर में है।", "घर मेंढक है", "नाना है", "अपन है"]  # in, in "frog", in "नाना", at an end
    assert rejected(hindi, *texts, language="hi") == [False, True, True, True]
    chinese = rules.StopWords(2, ("的", "是", "因为"), "zh")
    texts = ["这是猫的房子。", "因为是", "the猫的", "是是是"]
    assert rejected(chinese, *texts, language="zh") == [False, False, True, True]
    mixed = rules.StopWords(1, ("be", "been", "l'on"))
    assert rejected(mixed, "猫be猫", "it has been", "L'ON dit", "bee _be_") == [False] * 4
    assert rejected(mixed, "bee", "maybe", "beens") == [True] * 3
    with pytest.raises(ConfigError, match="words: holds an empty word"):
        rules.StopWords(1, ("a", ""))


def test_lines_are_removed_by_the_first_rule_that_does_not_keep_them():
    line_rules = [rules.TerminalPunctuation(), rules.LineWords(3), rules.UnwantedLines()]
    text = (
        "Home\nOne two three.\n\n  We use cookies.  \nRead on...\nToo short.\nHe said so: “no”\n"
        "使用数学。\n他说。\nEnable JavaScript to go on.\nand so on…\nwhy not now?"
    )
    kept, removed = rules.remove_lines(text, line_rules)
    assert kept == "One two three.\n\nHe said so: “no”\n使用数学。\nwhy not now?"
    assert [(rule, line.strip()) for rule, line in removed] == [
        *((0, "Home"), (2, "We use cookies."), (0, "Read on..."), (1, "Too short.")),
        *((1, "他说。"), (2, "Enable JavaScript to go on."), (0, "and so on…")),
    ]
    assert sorted(kept + "".join(line for _, line in removed)) == sorted(text)
    assert rules.remove_lines(text, []) == (text, [])


def test_words_are_divided_at_spaces_and_around_each_character_of_a_script_without():
    text = "A cat's mat, 数学好。 -- カナ don't 3.5 … ไทย"
    table = find_words([text, "", "b"])
    shown = [f"{text}\n\nb"[a:b] for a, b in zip(table.begins, table.ends, strict=True)]
    assert " ".join(shown) == "A cat's mat, 数 学 好 -- カ ナ don't 3.5 … ไ ท ย b"
    assert table.counts.tolist() == [15, 0, 1]
    letters = find_words([text], letters=True)
    shown = [text[a:b] for a, b in zip(letters.begins, letters.ends, strict=True)]
    assert " ".join(shown) == "A cat s mat 数 学 好 カ ナ don t 3 5 ไ ท ย"
    assert find_words(["\U00020000\U0003fffd a"], letters=True).counts.tolist() == [3]


def test_equal_words_have_equal_hashes_wherever_they_are(monkeypatch):
    monkeypatch.setattr(words_module, "PIECE", 16)
    draw = random.Random(2)
    names = ["".join(draw.choices("ab数é", k=draw.randint(1, 40))) for _ in range(200)]
    texts = [" ".join(draw.choices(names, k=30)) for _ in range(20)]
    table, joined = find_words(texts), "\n".join(texts)
    seen = dict[str, int]()
    for begin, end, value in zip(table.begins, table.ends, table.hashes.tolist(), strict=True):
        assert seen.setdefault(joined[begin:end], value) == value
    assert len(set(seen.values())) == len(seen)


def test_a_cleaning_counts_everything_once():
    rest = "It is here. It is long enough."
    texts = [f"Menu {n}\nThis is line number {n}.\n{rest}" for n in range(9)]
    texts.append("Menu\nOnly one line is left here.")
    texts += [f"{n} lorem ipsum is what it is." for n in range(9)]
    cleaned = clean_texts(texts, ["en"] * len(texts), FILTERS["c4"], split_sentences)
    names = list(FILTERS["c4"].document_rules)
    steps = ["" if fate == 0 else names[fate - 1] for fate in cleaned.fates]
    assert steps == [""] * 9 + ["sentence_count"] + ["unwanted_text"] * 9
    assert cleaned.removed.tolist() == [[10, 68], [0, 0], [0, 0]]
    assert cleaned.texts[0] == "This is line number 0.\nIt is here. It is long enough."
    read = sum(len(text.encode()) for text in texts)
    assert sum(len(text.encode()) for text in cleaned.texts) + cleaned.removed[:, 1].sum() == read
    assert cleaned.signed is None


def test_the_texts_that_stay_are_signed_alike_in_any_batches(monkeypatch):
    texts = [*some_texts(40, 4), "lorem ipsum"]
    cleaning = dataclasses.replace(make_cleaning("none", 0.8), unwanted_text=rules.UnwantedText())
    results = []
    for size in (1, 300, 2**19):
        monkeypatch.setattr("bothways.data.cleaning.config.BATCH_CHARACTERS", size)
        cleaned = clean_texts(texts, ["en"] * len(texts), cleaning, split_sentences)
        results.append(cleaned.signed)
        assert cleaned.signed.counts[-1] == 0
    for other in results[1:]:
        assert np.array_equal(other.signatures, results[0].signatures)
        assert np.array_equal(other.shingles, results[0].shingles)
        assert np.array_equal(other.offsets, results[0].offsets)


def test_a_cleaning_is_a_configuration():
    gopher = FILTERS["gopher"]
    for cleaning in (gopher, FILTERS["c4"], make_cleaning("gopher", 0.7, 5)):
        assert read(Cleaning, to_dict(cleaning)) == cleaning
    changed = read(Cleaning, {"word_count": {"least": 20}, "stop_words": None}, base=gopher)
    assert changed == dataclasses.replace(gopher, word_count=rules.WordCount(20), stop_words=None)
    with pytest.raises(ConfigError, match=r"word_count\.least"):
        read(Cleaning, {"word_count": {"least": -1}}, base=gopher)


@pytest.mark.parametrize(("make", "where"), [
    (lambda: rules.WordCount(5, 4), "most"),
    (lambda: rules.MeanWordLength(5, 4), "most"),
    (lambda: rules.Symbols(2.0), "most"),
    (lambda: rules.StopWords(3, ("a", "b")), "least"),
    (lambda: rules.RepeatedWords(1), "shortest"),
    (lambda: Cleaning(min_tokens=0), "min_tokens"),
    (lambda: make_cleaning("fineweb"), "filters"),
    (lambda: make_cleaning(near_duplicates=2.0), "near_duplicates"),
])  # fmt: skip
def test_wrong_settings_name_their_place(make, where):
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.where == where
