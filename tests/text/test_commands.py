"""`bothways tokenizer train | encode | report`, through the command line."""

import gzip
import io
import json
import re
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pyarrow
import pytest
from cyclopts import CycloptsError
from pyarrow import parquet

from bothways.cli.main import app
from bothways.core.errors import BothwaysError, ConfigError, DataError, ResourceError, interface
from bothways.hub.convert.vocabulary import form_of, with_words
from bothways.text.tokenizer import Tokenizer
from bothways.text.trainers import ByteBPE, Unigram, WordPiece, train_vocabulary
from bothways.text.vocabulary_report import SplitWord, vocabulary_report
from commands import run_line
from toy_text import BERT_NAMES, pseudo_text, write_vocabulary


@pytest.fixture
def text(tmp_path):
    place = tmp_path / "text.txt"
    place.write_text("\n".join(pseudo_text(3000, seed=3)), encoding="utf-8")
    return place


def run(*arguments):
    run_line("tokenizer", *arguments)


@pytest.mark.parametrize(("options", "kind"), [
    (["--size", 300, "--no-lowercase", "--strip-accents", "--no-cjk", "--alphabet", 20, "--min-frequency", 3],
     WordPiece(300, 3, lowercase=False, strip_accents=True, cjk=False, alphabet=20)),
    (["--kind", "bpe", "--size", 400, "--no-prefix-space"], ByteBPE(400, prefix_space=False)),
    (["--kind", "unigram", "--size", 150, "--longest", 5], Unigram(150, longest=5)),
])  # fmt: skip
def test_train_writes_what_train_returns(tmp_path, capsys, text, options, kind):
    run("train", text, "--out", tmp_path / "new" / "vocabulary", *options)
    made = Tokenizer.load(tmp_path / "new" / "vocabulary")
    lines = text.read_text("utf8").split("\n")
    assert made.fingerprint == train_vocabulary(lines, kind).fingerprint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "text.txt"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["vocabulary"]
    said = " ".join(capsys.readouterr().err.split())
    assert f"{made.size:,} tokens" in said
    assert f"trained on all of {sum(map(len, lines)):,} characters" in said


def test_train_says_that_it_removes_accents(tmp_path, capsys):
    (tmp_path / "de.txt").write_text("die größeren Häuser\n" * 300)
    (tmp_path / "en.txt").write_text("the larger houses\n" * 300 + "Beyoncé\n")
    options = ["--kind", "unigram", "--size", 60]
    with interface("command"):
        run("train", tmp_path / "de.txt", "--out", tmp_path / "a", *options)
    said = " ".join(capsys.readouterr().err.split())
    assert re.search("note: 11.8% of the letters .* such as '[öä]', .*--no-strip-accents", said)
    run("train", tmp_path / "de.txt", "--out", tmp_path / "b", *options, "--no-strip-accents")
    run("train", tmp_path / "de.txt", "--out", tmp_path / "c", *options, "--strip-accents")
    run("train", tmp_path / "en.txt", "--out", tmp_path / "d", *options)
    assert "note:" not in capsys.readouterr().err


def test_train_refuses_a_folder_in_use_and_leaves_it(tmp_path, text):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    with pytest.raises(ResourceError, match="exists and is not an empty folder"):
        run("train", text, "--out", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    with pytest.raises(ResourceError, match="exists and is not an empty folder"):
        run("train", text, "--out", text)


@pytest.mark.parametrize(
    ("options", "kind"),
    [(["--size", 20], BothwaysError), (["--column", "x", "--size", 0], ConfigError)],
)
def test_train_leaves_nothing_when_it_fails(tmp_path, text, options, kind):
    with pytest.raises(kind):
        run("train", text, "--out", tmp_path / "out", *options)
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_an_input_that_cannot_be_read_is_named_and_not_the_output(tmp_path, monkeypatch, text):
    def fail(*_):
        raise OSError(5, "Input/output error")

    source, vocabulary = tmp_path / "page.parquet", write_vocabulary(tmp_path / "vocabulary")
    table = pyarrow.table({"text": ["One."] * 99})
    parquet.write_table(table, source, compression="none", use_dictionary=False)
    source.write_bytes(source.read_bytes().replace(b"One.", b"\xff\xff\xff\xff"))
    with pytest.raises(DataError, match=r"page\.parquet: is not a complete Parquet file"):
        run("train", source, "--out", tmp_path / "out")
    for place in ("bothways.data.text_io._check_head", "pathlib.Path.is_file"):
        monkeypatch.setattr(place, fail)
        with pytest.raises(ResourceError, match=r"text\.txt: cannot be read: Input/output error"):
            run("encode", text, "--tokenizer", vocabulary, "--out", tmp_path / "out.jsonl")
    with pytest.raises(ResourceError, match=r"text\.txt: cannot be read: Input/output error"):
        run("train", text, "--out", tmp_path / "out")


def test_train_refuses_options_of_another_kind(tmp_path, text):
    with pytest.raises(ConfigError, match=r"^size: must be at least 1, not 0"):
        run("train", text, "--size", 0, "--out", tmp_path / "new")
    with pytest.raises(ConfigError, match="--prefix-space: is not an option") as caught:
        run("train", text, "--out", tmp_path / "out", "--prefix-space")
    options = "--alphabet, --cjk, --coverage, --lowercase, --min-frequency, --size, --strip-accents"
    assert options in str(caught.value)


LINES = ["hello World", "", "  naïve [MASK] 你好 \t.", "x\ufeffy"]


def _expected(folder) -> list[dict]:
    encodings = Tokenizer.load(folder).backend.encode_batch(LINES, add_special_tokens=False)
    return [
        {"ids": e.ids, "tokens": e.tokens, "offsets": list(map(list, e.offsets))} for e in encodings
    ]


def test_encode_files(tmp_path, capsys):
    folder = write_vocabulary(tmp_path / "vocabulary")
    (tmp_path / "a.txt").write_text("\n".join(LINES[:2]) + "\n", encoding="utf-8")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress("\r\n".join(LINES[2:]).encode()))
    words = ["encode", tmp_path / "a.txt", tmp_path / "b.txt.gz", "--tokenizer", folder]
    run(*words)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows == _expected(folder)
    run(*words, "--out", tmp_path / "out.jsonl")
    written = (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in written] == rows
    with pytest.raises(ConfigError, match=r"'ids\.csv' must end in \.jsonl"):
        run(*words, "--out", tmp_path / "ids.csv")


def _give(monkeypatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))


def test_a_hyphen_is_the_standard_input(tmp_path, capsys, monkeypatch):
    folder = write_vocabulary(tmp_path / "vocabulary")
    (tmp_path / "a.txt").write_text(LINES[0], encoding="utf-8")
    # A byte-order mark is no text.
    _give(monkeypatch, "\ufeff".encode() + "\n".join(LINES[1:]).encode())
    run("encode", tmp_path / "a.txt", "--tokenizer", folder, "-")
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == _expected(folder)
    for line in (["train", "-", "--out", tmp_path / "out"], ["report", "-", "--tokenizer", folder]):
        with pytest.raises(DataError, match=r"^reading documents from standard input"):
            run(*line)
    with pytest.raises(DataError, match=r"^reading documents from standard input"):
        run_line("corpus", "build", "-", "--tokenizer", folder, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_option_that_there_is_not_is_no_file():
    for line in ("tokenizer encode --tokenizer t", "corpus build --tokenizer t --out o"):
        with pytest.raises(CycloptsError, match="Unknown option: --sise"):
            app([*line.split(), "--sise", "3"], exit_on_error=False, print_error=False)


def test_encode_refuses_what_is_no_text(tmp_path, monkeypatch):
    folder = write_vocabulary(tmp_path)
    _give(monkeypatch, b"fine\nno\xff\n")
    with pytest.raises(DataError, match="standard input:2: byte 0xff at column 3 is not UTF-8"):
        run("encode", "--tokenizer", folder, "--out", tmp_path / "out.jsonl")
    assert not list(tmp_path.glob("*out.jsonl*"))
    with pytest.raises(DataError, match="nowhere: no such file"):
        run("encode", "nowhere", "--tokenizer", folder)
    with pytest.raises(DataError, match=f"^{tmp_path}: is a folder\n  Name a file in it"):
        run("encode", tmp_path, "--tokenizer", folder)


def test_report_shows_every_figure(tmp_path, capsys, text):
    folder = write_vocabulary(tmp_path / "vocabulary", [*BERT_NAMES, "the", "play", "##ed"])
    (tmp_path / "words.txt").write_text("the played\nthe xyz the", encoding="utf-8")
    run("report", tmp_path / "words.txt", "--tokenizer", folder)
    shown = " ".join(capsys.readouterr().out.split())
    for figures in (
        "8 tokens, 0.0% of them unused here", "21 characters, 5 words, 6 tokens",
        "16.667% of tokens, 20.000% of words", "1.200 tokens per word",
        "60.0% of words are one token", "83.333% of characters",
        "played → play ##ed (1×)", "xyz → [UNK] (1×)",
    ):  # fmt: skip
        assert figures in shown


ODD = "Don't panic: e\u0301tude, naïve.\n\tnew-line ... 42% 🙂 你好吗 ωω"
TEXT = [*pseudo_text(600, seed=2), "", ODD]


def _words(text: str) -> list[str]:
    """Runs without space, mark or ideograph, and ideographs, that have a letter or digit in them."""
    found = re.findall(r"[\u4e00-\u9fff]|[^\s\u4e00-\u9fff!-/:-@\[-`{-~]+", text)
    return [word for word in found if re.search(r"[^\W_]", word)]


def _plain(tokenizer: Tokenizer, texts: list[str]) -> dict[str, object]:
    """The figures one by one, with the backend alone."""

    def encode(text: str) -> list[str]:
        ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
        return [*map(tokenizer.backend.id_to_token, ids)]

    unknown = tokenizer.token(tokenizer.specials.unknown)
    used = Counter(token for text in texts for token in encode(text))
    words = [(word, encode(" " + word)) for text in texts for word in _words(text)]
    words = [
        (word, pieces[1:] if pieces[0] in "▁Ġ" and "一" <= word <= "鿿" else pieces)
        for word, pieces in words
    ]
    known = [(word, pieces) for word, pieces in words if unknown not in pieces]
    special = {tokenizer.token(id) for id in np.flatnonzero(tokenizer.special)}
    entries = set(tokenizer.backend.get_vocab()) - special - {unknown}
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


CASED = WordPiece(size=200, lowercase=False, alphabet=20)


@pytest.mark.parametrize(
    "kind", [WordPiece(size=300), CASED, ByteBPE(size=400), Unigram(size=200)], ids=str
)
def test_every_figure_is_what_plain_counting_gives(kind):
    tokenizer = train_vocabulary(TEXT[:40], kind)
    with pytest.raises(ConfigError, match="texts: must be several texts, not one"):
        vocabulary_report(tokenizer, TEXT[0])
    found = vocabulary_report(tokenizer, iter(TEXT))
    for name, value in _plain(tokenizer, TEXT).items():
        assert getattr(found, name) == pytest.approx(value, abs=1e-12), name
    assert 0 < found.whole_words < 1 < found.fertility
    assert isinstance(kind, ByteBPE) or found.unknown > 0


@pytest.mark.parametrize("kind", [Unigram(size=40), ByteBPE(size=400)], ids=str)
def test_an_ideograph_has_the_tokens_of_running_text(kind):
    """No space stands before it."""
    texts = [text * 20 for text in ("你好吗我很好", "他来到网易大厦", "我来大厦你来吗")]
    found = vocabulary_report(train_vocabulary(texts, kind), texts)
    assert not {piece for word in found.split for piece in word.pieces} & {"▁", "Ġ"}
    assert isinstance(kind, ByteBPE) or found.fertility == found.whole_words == 1


def test_tokens_of_bytes_are_shown_as_their_characters():
    texts = ["中文分词器 中文语料库 the"] * 20
    found = vocabulary_report(train_vocabulary(texts, ByteBPE(size=400)), ["中文 the 𠀀"])
    assert found.longest[0] == "Ġ中文分词器"
    assert "Ġthe" in found.longest
    cut = next(word for word in found.split if word.word == "𠀀")
    assert "ð" in "".join(cut.pieces)


@pytest.mark.parametrize("kind", [Unigram(size=60), ByteBPE(size=300)], ids=str)
def test_a_chinese_word_that_is_added_is_found_within_a_sentence(kind):
    old = train_vocabulary(["他看武侠小说 读小说看武侠 the dog"] * 20, kind)
    new = with_words(old, ["贾宝玉"])
    tokens = [new.token(id) for id in new.encode("他看贾宝玉小说")]
    assert "贾宝玉" in tokens
    assert new.encode("他看小说").tolist() == old.encode("他看小说").tolist()
    assert not form_of(new, "贾宝玉").begins


def test_examples_are_the_most_frequent_first(tmp_path):
    tokens = [*BERT_NAMES, "play", "##ing", "##ed", "the", "interplaying"]
    tokenizer = Tokenizer.load(write_vocabulary(tmp_path, tokens))
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


def test_no_word_in_the_text(tmp_path):
    tokenizer = Tokenizer.load(write_vocabulary(tmp_path))
    for texts in ([], [""], ["... !?", "🙂"]):
        with pytest.raises(DataError, match="there is no word in the text"):
            vocabulary_report(tokenizer, texts)
