"""Vocabularies: the same from run to run, what they promise, what they refuse."""

import json
import math
import os
import subprocess
import sys
import tracemalloc
from collections import Counter

import numpy as np
import pytest

from bothways.core.errors import ConfigError, DataError, TokenizerError
from bothways.text import trainers
from bothways.text.tokenizer import Tokenizer
from bothways.text.trainers import (
    ByteBPE,
    Unigram,
    WordPiece,
    _steady,
    characters_of,
    learn,
    sample,
    sample_languages,
    train_vocabulary,
)
from toy_text import BERT_NAMES, pseudo_text, save_and_open

TEXT = pseudo_text(4000, seed=1)
KINDS = [
    WordPiece(size=400),
    # Cuts through characters that are equally frequent.
    WordPiece(size=300, lowercase=False, strip_accents=True, alphabet=20),
    ByteBPE(size=500),
    ByteBPE(size=400, prefix_space=False),
    Unigram(size=300),
    Unigram(size=318),  # more is asked of the trainer
]

_PROGRAM = """
import sys
from bothways.text.trainers import ByteBPE, Unigram, WordPiece, train_vocabulary
texts, kinds, out = sys.argv[1:]
for number, kind in enumerate(eval(kinds)):
    train_vocabulary(open(texts, encoding="utf8").read().split("\\n"), kind).save(f"{out}/{number}")
"""


@pytest.fixture(scope="module")
def trained() -> list[Tokenizer]:
    return [train_vocabulary(TEXT, kind) for kind in KINDS]


def test_two_processes_write_the_same_bytes(tmp_path, trained):
    """This one and another one, with other seeds of hash tables and a single thread."""
    for number, tokenizer in enumerate(trained):
        tokenizer.save(tmp_path / "here" / str(number))
    settings = {"PYTHONHASHSEED": "1", "RAYON_NUM_THREADS": "1"}
    settings["PYTHONPATH"] = os.pathsep.join(sys.path)
    (tmp_path / "text").write_text("\n".join(TEXT), encoding="utf8")
    words = [str(tmp_path / "text"), repr(KINDS), str(tmp_path / "there")]
    subprocess.run([sys.executable, "-c", _PROGRAM, *words], env=os.environ | settings, check=True)
    here, there = (
        {file.relative_to(home): file.read_bytes() for file in home.rglob("*") if file.is_file()}
        for home in (tmp_path / "here", tmp_path / "there")
    )
    assert len(here) == 3 * 2 + 2 * 4
    assert here == there


def test_scores_do_not_keep_the_order_of_a_hash_table():
    """Characters that no word needs have the least score and a step more each; another character may come close to one."""
    words = {"ab": -3.00004, "cd": -9.5, "x": -9.5 + 3.0000001e-4, "y": -2.0}
    ladder = [-9.5, -9.5 + 1e-4, -9.5 + 1e-4 + 1e-4, -9.5 + 1e-4 + 1e-4 + 1e-4]
    expected = {**words, "ab": -3.0, "x": -9.4997, **dict.fromkeys("klmn", -9.5)}
    for order in ("klmn", "nmlk", "lnkm"):
        assert _steady({**words, **dict(zip(order, ladder, strict=True))}) == expected
    assert _steady({key: score + 4e-11 for key, score in words.items()}) == _steady(words)


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_special_tokens_come_first_and_the_folder_opens_in_transformers(tmp_path, trained, number):
    kind, tokenizer = KINDS[number], trained[number]
    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"] if isinstance(kind, ByteBPE) else BERT_NAMES
    assert [tokenizer.token(id) for id in range(5)] == names
    cls, pad, sep = (0, 1, 2) if isinstance(kind, ByteBPE) else (2, 0, 3)
    assert tokenizer.size <= kind.size
    assert isinstance(kind, Unigram) or tokenizer.size == kind.size
    lines = [*TEXT[:40], "Ünseen [MASK] wörds 你 🙂", "  two  spaces\nand a line"]
    theirs, first = save_and_open(tokenizer, tmp_path, lines), tokenizer.encode(lines[0]).tolist()
    assert theirs(lines[0]).input_ids == [cls, *first, sep]
    assert theirs(lines[0], lines[1]).input_ids == tokenizer.backend.encode(lines[0], lines[1]).ids
    declared = "BertTokenizer" if isinstance(kind, WordPiece) else "TokenizersBackend"
    assert type(theirs).__name__ == declared
    assert theirs.pad_token_id == tokenizer.specials.pad == pad
    assert theirs.mask_token_id == 4


def test_word_piece_joins_the_most_frequent_pairs():
    """By hand: z ##a occurs six times, then za ##b four times; za ##c and ##a ##b are left with two and one."""
    kind = WordPiece(size=100, min_frequency=3)
    tokenizer = train_vocabulary(["zab zab zab zab zac qab zac"], kind)
    expected = [*"abcqz", *(f"##{letter}" for letter in "abcqz"), "za", "zab"]
    assert [tokenizer.token(id) for id in range(5, tokenizer.size)] == expected


def test_no_word_over_the_alphabet_is_unknown():
    tokenizer = train_vocabulary(TEXT, WordPiece(size=300))
    tokens = (tokenizer.token(id) for id in range(5, tokenizer.size))
    letters = [token for token in tokens if len(token) == 1 and token.isalpha()]
    assert {"ω", "ж", "你", "k"} <= set(letters)
    words = ["".join(word) for word in zip(letters, reversed(letters), letters[3:], strict=False)]
    assert not any(tokenizer.specials.unknown in ids for ids in tokenizer.encode(words))
    assert tokenizer.id("##你") is None  # an ideograph is a word of its own
    assert tokenizer.id("##.") is None
    assert train_vocabulary(TEXT, WordPiece(size=300, cjk=False)).id("##你") is not None


def test_the_alphabet_keeps_the_most_frequent_characters():
    counts = Counter(c for line in TEXT for c in line.lower().replace("é", "e") if not c.isspace())
    kept = sorted(counts, key=lambda c: (-counts[c], c))[:12]
    tokenizer = train_vocabulary(TEXT, WordPiece(size=200, alphabet=12))
    assert {token for token in tokenizer.backend.get_vocab() if len(token) == 1} == set(kept)


def test_options_of_word_piece_reach_the_file(trained):
    kind = WordPiece(size=300, lowercase=False, strip_accents=True, cjk=False)
    spec = json.loads(train_vocabulary(TEXT, kind).backend.to_str())
    flags = {"handle_chinese_chars": False, "strip_accents": True, "lowercase": False}
    assert spec["normalizer"] == {"type": "BertNormalizer", "clean_text": True, **flags}
    assert [tokenizer.lowercase for tokenizer in trained[:2]] == [True, False]


def test_bytes_know_everything():
    tokenizer = train_vocabulary(TEXT, ByteBPE(size=300))
    text = "Völlig 新しい \U0001f9ff text\twith\r\nall\x00that"
    ids = tokenizer.encode([text])[0]
    assert tokenizer.decode(ids) == " " + text
    assert tokenizer.specials.unknown not in ids
    assert not tokenizer.continues[ids[0]]
    unspaced = train_vocabulary(TEXT, ByteBPE(size=300, prefix_space=False))
    assert tokenizer.continues[unspaced.encode("ka")[0]]


def test_unigram_pieces_are_probable_short_and_plain():
    tokenizer = train_vocabulary(TEXT, Unigram(size=300, longest=5))
    spec = json.loads(tokenizer.backend.to_str())["model"]
    pieces, scores = zip(*spec["vocab"][5:], strict=True)
    assert max(map(len, pieces)) <= 5
    assert list(scores) == sorted(scores, reverse=True)
    assert all(score == round(score, 4) < 0 for score in scores)
    assert not any(piece != piece.lower() or "é" in piece for piece in pieces)
    assert spec["unk_id"] == 1
    assert tokenizer.encode(["🙂"])[0][-1] == tokenizer.specials.unknown
    accented, cased = (
        train_vocabulary(TEXT, kind).backend.get_vocab()
        for kind in (Unigram(size=300, strip_accents=False), Unigram(size=300, lowercase=False))
    )
    assert any("é" in token for token in accented)
    assert any(token != token.lower() for token in cased if "[" not in token)


def test_unigram_keeps_its_size_until_the_trainer_finds_no_more():
    assert train_vocabulary(TEXT, Unigram(size=318)).size == 318
    # 350 tokens with tokenizers 0.22, 368 with 0.23.
    assert 318 < train_vocabulary(TEXT, Unigram(size=400)).size < 400


def test_unigram_leaves_rare_characters_out(monkeypatch):
    """As SentencePiece with `character_coverage`; the first 1,000 stay in any case."""
    texts = [*TEXT, "Ka ﬄ ж ka", "ж"]  # the normaliser makes "ffl" of the ligature
    for coverage, kept in {0.99: False, 1.0: True}.items():
        monkeypatch.setattr(trainers, "ALPHABET", 10)
        tokenizer = train_vocabulary(texts, Unigram(size=300, coverage=coverage))
        assert any("ж" in token for token in tokenizer.backend.get_vocab()) is kept
        assert (tokenizer.specials.unknown in tokenizer.encode(["ж"])[0]) is not kept
    monkeypatch.undo()
    assert "ж" in train_vocabulary(texts, Unigram(size=300)).backend.get_vocab()


def test_unigram_does_not_hold_its_text_a_second_time():
    texts = sample([f"{TEXT[i % 40]} {TEXT[i % 41]}"[:100] for i in range(2_000)], 10**7)
    tracemalloc.start()
    learn(texts, Unigram(size=100))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5 * texts.characters


LETTERS = {c for line in TEXT for c in line.lower().replace("é", "e")} - {" "}
INNER = {c for c in LETTERS if c.isalnum() and c not in "你好世界"}


@pytest.mark.parametrize(("kind", "alphabet", "least"), [
    (WordPiece, f"{len(LETTERS)} characters, {len(INNER)} of them also within words",
     5 + len(LETTERS) + len(INNER)),
    (ByteBPE, "256 bytes", 261),
    # The mark of a space is one of them.
    (Unigram, f"{len(LETTERS) + 1} characters", 6 + len(LETTERS)),
])  # fmt: skip
def test_a_size_that_cannot_hold_the_alphabet(kind, alphabet, least):
    message = f"a vocabulary of 30 cannot hold 5 special tokens and {alphabet}"
    with pytest.raises(TokenizerError, match=message) as caught:
        train_vocabulary(TEXT, kind(size=30))
    assert f"Set size={least} or more" in str(caught.value)
    with pytest.raises(TokenizerError):
        train_vocabulary(TEXT, kind(size=least - 1))
    assert train_vocabulary(TEXT, kind(size=least)).size == least


@pytest.mark.parametrize("kind", [WordPiece(), ByteBPE(), Unigram()], ids=str)
def test_no_text(kind):
    for texts in ([], ["", ""]):
        with pytest.raises(TokenizerError, match="there is no text"):
            train_vocabulary(texts, kind)
    with pytest.raises(DataError, match=r"a text holds U\+DC80 at character \d, half of a surrog"):
        train_vocabulary(["fine", "not \udc80"], kind)


@pytest.mark.parametrize(("make", "where", "message"), [
    (lambda: WordPiece(size=0), "WordPiece.size", "must be at least 1, not 0"),
    (lambda: WordPiece(alphabet=0), "WordPiece.alphabet", "must be at least 1, not 0"),
    (lambda: WordPiece(coverage=2.0), "WordPiece.coverage", "must be from 0 to 1, not 2"),
    (lambda: Unigram(longest=0), "Unigram.longest", "must be at least 1, not 0"),
    (lambda: Unigram(coverage=2), "Unigram.coverage", "must be from 0 to 1, not 2"),
    # The trainer reserves its memory at once, and ended Python.
    (lambda: Unigram(10**12), "Unigram.size", "must be at most 10,000,000, not 10{12}"),
    (lambda: train_vocabulary(TEXT[0], WordPiece()), "texts", "must be several texts, not one"),
    (lambda: sample(TEXT, ceiling=0), "ceiling", "must be at least one character, is 0"),
    (lambda: characters_of(math.inf), "ceiling", "must be a number of millions .*, not inf"),
])  # fmt: skip
def test_a_setting_out_of_range_is_refused(make, where, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make()
    assert caught.value.where == where


def test_all_is_kept_that_fits():
    whole = sample(TEXT, ceiling=10**6)
    assert list(whole.read()) == TEXT
    assert whole.characters == whole.total == sum(map(len, TEXT))


def test_an_even_sample_of_what_does_not_fit():
    lines = [f"{number:06d}" + "x" * 94 for number in range(60_000)]  # six million characters
    part = sample(iter(lines), ceiling=1_200_000)
    assert part.total == 6_000_000
    assert 1_190_000 < part.characters <= 1_200_000
    assert part.characters == sum(map(len, part.read()))
    places = [int(text[:6]) for text in part.read()]
    assert places == sorted(places)
    tenths = Counter(place // 6_000 for place in places)
    # 1,200 each, from blocks of 40 lines.
    assert all(700 < tenths[tenth] < 1_700 for tenth in range(10))
    assert sample(lines, ceiling=1_200_000) == part
    assert sample(lines, ceiling=1_200_000, seed=1).blocks != part.blocks


def test_long_texts_are_cut_and_none_is_lost():
    text = "".join(f"{number} " for number in range(5_000))
    assert "".join(sample([text, "end"], ceiling=10**6).read()) == text + "end"
    assert sample([text], ceiling=5_000).characters <= 5_000


def test_training_reads_only_the_sample():
    texts = ["rare"] * 10 + ["common words here"] * 3000
    assert train_vocabulary(texts, WordPiece(size=60), ceiling=4096).size < 60


def test_the_alphabet_covers_a_script_of_many_characters():
    frequent = [chr(0x4E00 + i) for i in range(1500)]
    text = ["".join(frequent)] * 20 + ["".join(chr(0x6000 + i) for i in range(10))]
    tokenizer = train_vocabulary(text, WordPiece(size=2000))
    assert (tokenizer.encode(["".join(frequent)])[0] != tokenizer.specials.unknown).all()
    assert tokenizer.id(chr(0x6000)) is None, "beyond the coverage"
    assert train_vocabulary(text, WordPiece(size=1300)).size <= 1300
    assert train_vocabulary(text, WordPiece(size=2000, coverage=1.0)).size == 1515


@pytest.mark.parametrize(("kind", "kept"), [(WordPiece(2205), 1100), (Unigram(1105), 1099)])
def test_the_alphabet_has_as_many_characters_as_there_is_room_for(kind, kept):
    """Of a script whose characters go on a word; the mark of a space is a token of Unigram, too."""
    characters = {chr(0xA000 + i) for i in range(1165)}
    tokenizer = train_vocabulary(["".join(sorted(characters))] * 9, kind)
    assert tokenizer.size == kind.size
    assert len(characters & tokenizer.backend.get_vocab().keys()) == kept


def test_smoothing_keeps_more_words_of_a_small_language_whole():
    """Two artificial languages, 1000 : 1 in size, of words over different letters."""
    draws = np.random.default_rng(0)

    def words(letters: str) -> list[str]:
        """Return fifty words."""
        return ["".join(draws.choice(list(letters), 6)) for _ in range(50)]

    large, small = words("abcdefgh"), words("nopqrstu")
    chosen = {"large": draws.choice(large, 20_000), "small": draws.choice(small, 20)}
    texts = {name: [" ".join(some) for some in np.split(ids, 20)] for name, ids in chosen.items()}
    whole = {}
    for alpha in (1.0, 0.3):
        mixed = sample_languages(texts, alpha, 10**6)
        tokenizer = learn(mixed, WordPiece(size=420, min_frequency=3))
        whole[alpha] = sum(len(tokenizer.encode(word)) == 1 for word in {*chosen["small"]})
    assert whole[0.3] > whole[1.0]


@pytest.mark.parametrize("ceiling", [10**6, 80_000])
def test_shares_of_languages_are_those_of_the_formula(ceiling):
    texts = {"a": ["a" * 10] * 30_000, "b": ["b" * 10] * 300}
    mixed = sample_languages(texts, 0.5, ceiling)
    assert mixed.total == 303_000
    assert abs(mixed.characters / min(303_000, ceiling) - 1) < 0.05
    count = sum(text.count("b") for text in mixed.read())
    assert abs(count / mixed.characters - 1 / 11) < 0.02
    with pytest.raises(DataError, match="b: has no text"):
        sample_languages({"a": ["x"], "b": []}, 0.5, ceiling)


@pytest.mark.parametrize("space", [True, False])
def test_the_space_before_a_text_is_in_both_files(space, tmp_path):
    """transformers 4 takes that of `tokenizer_config.json`, where no setting means none."""
    train_vocabulary(["ape bee cat"] * 9, ByteBPE(300, prefix_space=space)).save(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text("utf8"))
    assert settings.get("add_prefix_space", False) == space
    assert Tokenizer.load(tmp_path).backend.encode("ape").tokens[1].startswith("Ġ") == space
