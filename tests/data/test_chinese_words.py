"""Words of Chinese: where they begin, in the corpus and in masks; mistakes."""

import dataclasses
import itertools
import json
import sys

import numpy as np
import pytest

from bothways.core.errors import BothwaysError, ConfigError, DataError, ResourceError
from bothways.core.source import Cursor, rng
from bothways.data import shards
from bothways.data.cleaning.config import Cleaning
from bothways.data.corpus import Corpus
from bothways.data.corpus_source import CorpusSource
from bothways.data.masking import Masking, NGrams, Spans, Vocabulary, WholeWords, mask_tokens
from bothways.data.segments import FullSentences, NextSentence
from bothways.data.sentences import Words, encode_words, unpack_words, words_name
from bothways.objectives.masked_lm import MaskedLM
from bothways.text.tokenizer import Tokenizer
from bothways.text.trainers import SPECIALS, ByteBPE, Unigram, train_vocabulary
from commands import run_line
from toy_corpora import write_texts

DIVIDED = [
    "他 来到 了 网易 杭研 大厦 。 研究 生命 的 起源 。",
    "我们 在 北京 大学 学习 ， 我 爱 New York 的 iPhone15 。 天气 很 好 ！",
    "人工 智能 模型 处理 自然 语言 。 语言 模型 很 大 。",
    "他 学习 自然 语言 。 我们 研究 模型 。 天气 很 好 。",
]
"""As a program for words writes them."""
PLAIN = [line.replace(" ", "").replace("NewYork", "New York") for line in DIVIDED]


@pytest.fixture(scope="module")
def chinese(tmp_path_factory) -> Tokenizer:
    characters = sorted({c for line in DIVIDED for c in line if not c.isascii()})
    pieces = ["new", "york", "iphone", "##15", *characters]
    file = tmp_path_factory.mktemp("chinese") / "vocab.txt"
    file.write_text("\n".join([*SPECIALS, *pieces]) + "\n")
    return Tokenizer.load(file)


def by_two(sentence: str) -> list[str]:
    return [sentence[at : at + 2] for at in range(0, len(sentence), 2)]


def wrong(sentence: str) -> list[str]:
    return [sentence[:-1]]


def words_of(tokenizer: Tokenizer, sentence: str, words: Words) -> list[str]:
    (text,), ids, lengths, begins = encode_words(tokenizer, [sentence], words)
    assert np.array_equal(ids, tokenizer.encode_flat([text])[0])
    assert lengths.tolist() == [len(ids)]
    found: list[str] = []
    for token, begin in zip(map(tokenizer.token, ids), begins, strict=True):
        found[-1:] = [found[-1] + token] if found and not begin else [*found[-1:], token]
    return found


@pytest.mark.parametrize(("sentence", "words", "expected"), [
    ("他来到网易大厦", "jieba", "他 来到 网易 大厦"),
    ("他 来到 网易 大厦", "spaces", "他 来到 网易 大厦"),
    ("他来到网易大厦", by_two, "他来 到网 易大 厦"),
    ("我爱New York的iPhone15。", "jieba", "我 爱 new york 的 iphone##15 。"),
    ("我 爱 New York 的 iPhone15 。", "spaces", "我 爱 new york 的 iphone##15 。"),
    ("", "spaces", ""),
])  # fmt: skip
def test_words_begin_where_they_are_found(chinese, sentence, words, expected):
    assert words_of(chinese, sentence, words) == expected.split()


@pytest.mark.parametrize("kind", [ByteBPE(400), Unigram(90)])
def test_tokens_of_other_tokenizers_belong_to_the_word_of_their_first_character(kind):
    """A character of several bytes is one word, and spaces next to Chinese leave no trace in the ids."""
    tokenizer = train_vocabulary(PLAIN * 20, kind)
    for plain, divided in zip(PLAIN, DIVIDED, strict=True):
        texts, ids, lengths, begins = encode_words(tokenizer, [divided], "spaces")
        assert texts == [plain]
        assert np.array_equal(ids, tokenizer.encode(plain))
        (encoded,) = tokenizer.encode_with_offsets([plain])
        starts, at = set(), 0
        for word in divided.split():
            at = plain.index(word, at)
            starts.add(at)
            at += len(word)
        first = [plain[a:b][:1].isspace() + a for a, b in encoded.offsets.tolist()]
        owner = [max(s for s in starts if s <= place) for place in first]
        assert begins.tolist() == [True, *(a != b for a, b in itertools.pairwise(owner))]
        assert lengths.sum() == len(begins)


def test_a_corpus_with_words_has_the_same_tokens_and_one_bit_for_each(
    chinese, tmp_path, monkeypatch
):
    """Also over several shards, duplicates and short documents left out."""
    monkeypatch.setattr(shards, "SHARD_CHARACTERS", 40)
    order = np.random.default_rng(1).integers(0, 4, 30)
    texts = [PLAIN[kind] + PLAIN[n % 4][:n] for n, kind in enumerate(order)] + ["他。", PLAIN[0]]
    options = {"cleaning": Cleaning(min_tokens=4)}
    without = write_texts(tmp_path / "without", chinese, texts, **options)
    corpus = write_texts(tmp_path / "with", chinese, texts, words="jieba", **options)
    assert corpus.manifest.counts == without.manifest.counts
    assert corpus.manifest.left_out("min_tokens") == 1
    assert corpus.manifest.left_out("duplicates") > 0
    for name in ("tokens.bin", "sentences.bin", "documents.bin"):
        assert (tmp_path / "with" / name).read_bytes() == (tmp_path / "without" / name).read_bytes()
    assert not (tmp_path / "without" / "words.bin").exists()
    manifest = json.loads((tmp_path / "without" / "manifest.json").read_text())
    assert "words" not in manifest["settings"]
    assert without.words is None
    tokens = corpus.manifest.counts.tokens
    assert corpus.words is not None
    assert len(corpus.words) == -(-tokens // 8)
    bits = unpack_words(corpus.words, 0, tokens)
    expected = []
    for document in range(len(corpus)):
        for ids in corpus.sentences_of(document):
            sentence = "".join(map(chinese.token, ids)).replace("##", "")
            sentence = sentence.replace("newyork", "new york")
            expected.append(encode_words(chinese, [sentence], "jieba")[3])
    assert np.array_equal(bits, np.concatenate(expected))
    assert np.array_equal(unpack_words(corpus.words, 5, 27), bits[5:27])
    corpus.verify()


@pytest.fixture(scope="module")
def corpus(chinese, tmp_path_factory) -> Corpus:
    texts = [" ".join(np.random.default_rng(n).permutation(DIVIDED)) for n in range(20)]
    return write_texts(tmp_path_factory.mktemp("corpus") / "c", chinese, texts, words="spaces")


@pytest.mark.parametrize("unit", [WholeWords(), NGrams(3), Spans()])
@pytest.mark.parametrize("segments", [FullSentences(24), NextSentence(30)])
def test_masks_hide_whole_words(corpus, segments, unit):
    template = corpus.tokenizer.template
    source = CorpusSource(corpus, template, segments, np.arange(len(corpus)), 5)
    plain = dataclasses.replace(corpus, words=None)
    others = CorpusSource(plain, template, segments, np.arange(len(corpus)), 5)
    vocabulary = Vocabulary.of(corpus.tokenizer)
    longer = 0
    for number, (plan, _) in zip(range(40), source.read(Cursor()), strict=False):
        sequence, without = source.build(plan), others.build(plan)
        assert np.array_equal(sequence.ids, without.ids)
        assert without.word_starts is None
        starts = sequence.word_starts
        masked = mask_tokens(sequence, Masking(0.3, unit), vocabulary, rng(number, "test"))
        hidden = np.zeros(len(sequence), bool)
        hidden[masked.targets["masked"].index] = True
        assert hidden.any()
        inside = ~starts[1:] & ~vocabulary.special[sequence.ids[1:]]
        inside &= ~vocabulary.special[sequence.ids[:-1]]
        longer += int((hidden[1:] & inside).sum())
        cut = int((hidden[1:] != hidden[:-1])[inside].sum())
        assert cut <= (1 if isinstance(unit, Spans) else 0)
    assert longer > 40


def test_the_mistake_of_whole_words_without_words_is_named(corpus, chinese, tmp_path):
    objective = MaskedLM(masking=Masking(unit=WholeWords()))
    assert not [each for each in objective.check(corpus) if each.check == "masking"]
    without = write_texts(tmp_path / "without", chinese, PLAIN)
    (finding,) = (each for each in objective.check(without) if each.check == "masking")
    assert finding.severity == "warning"
    assert "does not show where Chinese words begin" in finding.what
    assert 'words="jieba" or words="spaces"' in str(finding)


@pytest.mark.parametrize(("words", "error", "message"), [
    ("ltp", ConfigError, "words: must be jieba, spaces or a function, not 'ltp'"),
    (lambda text: [text], ConfigError, "must be a function that other processes can import"),
    (wrong, DataError, r"do not spell the sentence '他来到"),
])  # fmt: skip
def test_bad_words_are_refused(chinese, tmp_path, words, error, message):
    with pytest.raises(error, match=message):
        write_texts(tmp_path / "c", chinese, PLAIN, words=words)


def test_a_missing_package_is_named(chinese, monkeypatch):
    monkeypatch.setitem(sys.modules, "rjieba", None)
    with pytest.raises(ResourceError, match=r"(?s)Chinese into words.*bothways\[zh\]"):
        words_name("jieba")


def test_words_are_part_of_what_a_corpus_is(corpus, chinese, tmp_path):
    assert corpus.manifest.settings.words == "spaces"
    assert words_name(by_two) == f"{by_two.__module__}.by_two"
    write_texts(tmp_path / "c", chinese, DIVIDED, words="spaces")
    with pytest.raises(DataError, match="built with words 'spaces', not None"):
        write_texts(tmp_path / "c", chinese, DIVIDED)
    file = tmp_path / "c" / "words.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(BothwaysError, match=r"words\.bin"):
        Corpus.open(tmp_path / "c")


def test_a_corpus_with_words_from_the_command_line(chinese, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("\n\n".join(PLAIN), encoding="utf8")
    chinese.save(tmp_path / "tokenizer")
    words = ["corpus", "build", tmp_path / "text.txt", "--tokenizer", tmp_path / "tokenizer"]
    options = ["--out", tmp_path / "c", "--words", "jieba", "--workers", "1"]
    run_line(*words, *options)
    assert "rjieba" in capsys.readouterr().out
    assert Corpus.open(tmp_path / "c").words is not None
