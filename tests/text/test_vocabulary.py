"""The report against plain counting."""

import re
from collections import Counter

import numpy as np
import pytest

from bothways.core.errors import DataError
from bothways.hub.convert.vocabulary import form_of, with_words
from bothways.text.tokenizer import Tokenizer
from bothways.text.trainers import ByteBPE, Unigram, WordPiece, train_tokenizer
from bothways.text.vocabulary_report import SplitWord, vocabulary_report
from toy_text import BERT_NAMES, load, pseudo_text, roberta_backend, write_vocabulary

TEXT = [
    *pseudo_text(600, seed=2),
    "",
    "Don't panic: e\u0301tude, naïve.\n\tnew-line ... 42% 🙂 你好吗 ωω",
]


def _words(text: str) -> list[str]:
    """Runs without space, mark or ideograph, and ideographs, that have a letter or digit in them."""
    found = re.findall(r"[\u4e00-\u9fff]|[^\s\u4e00-\u9fff!-/:-@\[-`{-~]+", text)
    return [word for word in found if re.search(r"[^\W_]", word)]


def _plain(tokenizer: Tokenizer, texts: list[str]) -> dict[str, object]:
    """The figures one by one, with the backend alone."""

    def encode(text: str) -> list[str]:
        return list(
            map(
                tokenizer.backend.id_to_token,
                tokenizer.backend.encode(text, add_special_tokens=False).ids,
            )
        )

    unknown = tokenizer.token(tokenizer.specials.unknown)
    used = Counter(token for text in texts for token in encode(text))
    words = [(word, encode(" " + word)) for text in texts for word in _words(text)]
    words = [
        (word, pieces[1:] if pieces[0] in "▁Ġ" and "一" <= word <= "鿿" else pieces)
        for word, pieces in words
    ]
    known = [(word, pieces) for word, pieces in words if unknown not in pieces]
    entries = (
        set(tokenizer.backend.get_vocab())
        - {tokenizer.token(id) for id in np.flatnonzero(tokenizer.special)}
        - {unknown}
    )
    return {
        "size": len(tokenizer.backend.get_vocab()),
        "characters": sum(map(len, texts)),
        "tokens": sum(used.values()),
        "words": len(words),
        "unknown": used[unknown] / sum(used.values()),
        "unknown_words": 1 - len(known) / len(words),
        "fertility": sum(len(pieces) for _, pieces in words) / len(words),
        "whole_words": sum(len(pieces) == 1 for _, pieces in known) / len(words),
        "covered": sum(len(word) for word, _ in known) / sum(len(word) for word, _ in words),
        "unused": len(entries - used.keys()) / len(entries),
    }


KINDS = [
    WordPiece(size=300),
    WordPiece(size=200, lowercase=False, alphabet=20),
    ByteBPE(size=400),
    Unigram(size=200),
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_figure_is_what_plain_counting_gives(kind):
    tokenizer = train_tokenizer(TEXT[:40], kind)
    found = vocabulary_report(tokenizer, iter(TEXT))
    for name, value in _plain(tokenizer, TEXT).items():
        assert getattr(found, name) == pytest.approx(value, abs=1e-12), name
    assert 0 < found.whole_words < 1 < found.fertility
    assert isinstance(kind, ByteBPE) or found.unknown > 0


@pytest.mark.parametrize("kind", [Unigram(size=40), ByteBPE(size=400)], ids=str)
def test_an_ideograph_has_the_tokens_of_running_text(kind):
    """No space stands before it."""
    texts = [text * 20 for text in ("你好吗我很好", "他来到网易大厦", "我来大厦你来吗")]
    found = vocabulary_report(train_tokenizer(texts, kind), texts)
    assert not {piece for word in found.split for piece in word.pieces} & {"▁", "Ġ"}
    assert isinstance(kind, ByteBPE) or found.fertility == found.whole_words == 1


def test_tokens_of_bytes_are_shown_as_their_characters():
    texts = ["中文分词器 中文语料库 the"] * 20
    found = vocabulary_report(train_tokenizer(texts, ByteBPE(size=400)), ["中文 the 𠀀"])
    assert found.longest[0] == "Ġ中文分词器"
    assert "Ġthe" in found.longest
    cut = next(word for word in found.split if word.word == "𠀀")
    assert "ð" in "".join(cut.pieces)


@pytest.mark.parametrize("kind", [Unigram(size=60), ByteBPE(size=300)], ids=str)
def test_a_chinese_word_that_is_added_is_found_within_a_sentence(kind):
    old = train_tokenizer(["他看武侠小说 读小说看武侠 the dog"] * 20, kind)
    new = with_words(old, ["贾宝玉"])
    tokens = [new.token(id) for id in new.encode("他看贾宝玉小说")]
    assert "贾宝玉" in tokens
    assert new.encode("他看小说").tolist() == old.encode("他看小说").tolist()
    form = form_of(new, "贾宝玉")
    assert form is not None
    assert not form.begins


def test_examples_are_the_most_frequent_first(tmp_path):
    tokenizer = Tokenizer.load(
        write_vocabulary(tmp_path, [*BERT_NAMES, "play", "##ing", "##ed", "the", "interplaying"])
    )
    texts = ["the playing played played the xyz the", "Playing xyz qq [MASK]"]
    found = vocabulary_report(tokenizer, texts, examples=2)
    assert found.split == (
        SplitWord("played", ("play", "##ed"), 2),
        SplitWord("Playing", ("play", "##ing"), 1),
    )
    assert found.strange == (SplitWord("xyz", ("[UNK]",), 2), SplitWord("MASK", ("[UNK]",), 1))
    assert found.longest == ("interplaying", "##ing")
    assert found.unused == 1 / 5
    assert vocabulary_report(tokenizer, texts, examples=0).split == ()


def test_a_vocabulary_of_special_tokens_alone(tmp_path):
    found = vocabulary_report(Tokenizer.load(write_vocabulary(tmp_path, BERT_NAMES)), ["all of it"])
    assert (found.unknown, found.unknown_words, found.covered, found.unused) == (1, 1, 0, 0)
    assert found.longest == ()


def test_nothing_is_unknown_to_bytes(tmp_path):
    found = vocabulary_report(load(roberta_backend(), tmp_path), TEXT)
    assert (found.unknown, found.unknown_words, found.covered, found.strange) == (0, 0, 1, ())


@pytest.mark.parametrize("texts", [[], [""], ["... !?", "🙂"]])
def test_no_word_in_the_text(tmp_path, texts):
    with pytest.raises(DataError, match="there is no word in the text"):
        vocabulary_report(Tokenizer.load(write_vocabulary(tmp_path)), texts)
