"""The labelled task of the quickstart: nothing but the order of words tells the label, and nothing leaks."""

import itertools
import re
from collections import Counter

import numpy as np
import pytest

from bothways.data.documents import Document
from bothways.lab.quickstart import AS_WRITTEN, SWAPPED, word_order

SUBJECTS = (
    "The old parser", "A small server", "Every Python 3 module", "This (rather long) function",
    "Our json reader",
)  # fmt: skip
VERBS = ("quietly reads", "never writes", "often returns", "then closes", "always checks")
OBJECTS = (
    "the first line", "some other value", "an empty list", "all open files", "each given path"
)  # fmt: skip
ENDS = (
    "before it stops.", "when a user asks for it.", "if no error is raised.",
    "as soon as HTTP is ready.", "in the end.",
)  # fmt: skip
SENTENCES = [" ".join(words) for words in itertools.product(SUBJECTS, VERBS, OBJECTS, ENDS)]


def documents(sentences: list[str]) -> list[Document]:
    return [
        Document("\n".join(sentences[at : at + 5]), f"module {at}")
        for at in range(0, len(sentences), 5)
    ]


@pytest.fixture(scope="module")
def examples():
    return word_order(documents(SENTENCES[100:]), documents(SENTENCES[:100]))


def counted(text: str) -> Counter[str]:
    return Counter(text.split())


def test_sentences_are_used_once_unchanged_or_swapped(examples):
    by_words = {
        frozenset(counted(sentence).items()): sentence.split() for sentence in SENTENCES[100:]
    }
    assert len(by_words) == len(SENTENCES) - 100
    used = []
    for example in examples:
        written = by_words[frozenset(counted(example.text).items())]
        used.append(" ".join(written))
        words = example.text.split()
        moved = [place for place, word in enumerate(words) if word != written[place]]
        assert (example.label, len(moved)) in {(AS_WRITTEN, 0), (SWAPPED, 2)}
        if moved:
            assert 0 < moved[0] == moved[1] - 1 < len(words) - 2, "neither the first nor the last"
            assert [words[place] for place in moved] == [written[moved[1]], written[moved[0]]]
            assert all(re.fullmatch("[a-z]+", words[place]) for place in moved)
    assert sorted(used) == sorted(SENTENCES[100:])


def test_labels_are_balanced(examples):
    swapped = sum(example.label == SWAPPED for example in examples)
    assert abs(swapped - len(examples) / 2) < 4 * np.sqrt(len(examples)) / 2


def test_bag_of_words_predicts_nothing(examples):
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    texts, labels = [example.text for example in examples], [example.label for example in examples]
    half = len(examples) // 2

    def score(words: int) -> float:
        """Of a model that counts sequences of as many words."""
        counts, solver = (
            CountVectorizer(ngram_range=(words, words)),
            LogisticRegression(max_iter=500),
        )
        model = make_pipeline(counts, solver).fit(texts[:half], labels[:half])
        return model.score(texts[half:], labels[half:])

    assert abs(score(1) - 0.5) < 4 * 0.5 / np.sqrt(len(examples) - half)
    # The same method on pairs of neighbours finds the label in a text as regular as this: the test can fail.
    assert score(2) > 0.9


def test_excluded_sentences_are_not_used():
    known = [Document(SENTENCES[0].upper().replace(".", "!"), "known")]
    texts = {example.text for example in word_order(documents(SENTENCES[:10]), known)}
    assert len(texts) == 9
    assert all(counted(text) != counted(SENTENCES[0]) for text in texts)


def test_unsuitable_sentences_are_skipped():
    texts = [
        "It stops here.",
        "One TWO 3 four, FIVE six 7 eight.",
        "no no no no no no no.",
        " ".join(["word", "other"] * 20) + ".",
    ]
    assert word_order([Document("\n".join(texts), "module")], []) == []
