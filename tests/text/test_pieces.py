"""Looking words up gives the ids of the backend, for all of Unicode; where that is not proved, it is not done."""

import json
import threading
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from tokenizers import AddedToken, normalizers

from bothways.text import word_cache as pieces
from bothways.text.tokenizer import Tokenizer
from bothways.text.word_cache import PieceTable, find_cutter
from toy_text import code_points, hostile, load, roberta_backend, write_vocabulary


def _table(tokenizer: Tokenizer) -> PieceTable:
    return PieceTable(tokenizer.backend, find_cutter(json.loads(tokenizer.backend.to_str())))


def _ids(table: PieceTable, texts: list[str]) -> list[list[int]]:
    return [np.frombuffer(row, np.int32).tolist() for row in table.rows(texts)]


@pytest.fixture(scope="module")
def fast(tmp_path_factory):
    """Tokenizers that may look up: BERT with all its settings, BERT with more added tokens, byte-level BPE."""
    home = tmp_path_factory.mktemp("fast")
    made = []
    choices = [(True, None, True), (False, None, True), (True, False, False), (False, True, True)]
    keys = ("do_lower_case", "strip_accents", "tokenize_chinese_chars")
    for number, values in enumerate(choices):
        config = dict(zip(keys, values, strict=True))
        made.append(Tokenizer.load(write_vocabulary(home / str(number), **config)))
    backend = Tokenizer.load(write_vocabulary(home / "more")).backend
    flags = {"normalized": False, "lstrip": True, "rstrip": True}
    backend.add_tokens([AddedToken(text, **flags) for text in ("[[", "[MASK]]", "<中>", "<é>")])
    plain = Tokenizer.load(write_vocabulary(home / "plain")).backend
    plain.normalizer = normalizers.BertNormalizer(clean_text=False)
    made += [load(backend, home / "added"), load(plain, home / "unclean")]
    for prefix in (False, True):
        made.append(load(roberta_backend(prefix_space=prefix), home / f"bytes{prefix}"))
    return made


@given(texts=st.lists(hostile, min_size=1, max_size=4))
# Spaces that belong to the white space before them.
@example(texts=["a\n  b\xa0  c\u3000  d", "\n  b", "\xa0  c  "])
@example(texts=["[MASK]]x", "x[[MASK]]", "[ [[<中> <é>"])  # added tokens that begin like others
@settings(max_examples=100)
def test_looked_up_ids_are_the_backends(fast, texts):
    for tokenizer in fast:
        encodings = tokenizer.backend.encode_batch(texts, add_special_tokens=False)
        assert _ids(_table(tokenizer), texts) == [encoding.ids for encoding in encodings]


@pytest.mark.parametrize("step", [61, pytest.param(1, marks=pytest.mark.slow)])
def test_every_letter_and_digit_in_a_word(fast, step):
    """What the short way takes for one word is one word, for every character that Python calls a letter or a digit."""
    table, characters = _table(fast[0]), filter(str.isalnum, map(chr, code_points(step)))
    # As the words of one text: a call for each would take most of the time.
    text = " ".join(f"a{character}b" for character in characters)
    encoding = fast[0].backend.encode(text, add_special_tokens=False)
    assert _ids(table, [text]) == [encoding.ids]


def _spec(kind: str, **changes: object) -> dict:
    """The parts of a `tokenizer.json` that decide whether it can be cut."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = {"content": "[MASK]", **flags}
    parts = {
        "normalizer": {"type": "BertNormalizer", "handle_chinese_chars": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "model": {"type": "WordPiece"},
    }
    if kind == "bytes":
        cut = {"type": "ByteLevel", "use_regex": True}
        parts = {
            "normalizer": None,
            "pre_tokenizer": cut,
            "model": {"type": "BPE", "dropout": None},
        }
    for key, value in changes.items():
        (added if key in added else parts)[key] = value
    return {"added_tokens": [added], **parts}


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("bert", {}, True),
        ("bert", {"lstrip": True, "rstrip": True}, True),
        ("bert", {"content": "new york"}, None),
        ("bert", {"content": "mask"}, None),
        ("bert", {"content": "«mask»"}, None),
        ("bert", {"normalized": True}, None),
        ("bert", {"single_word": True}, None),
        ("bert", {"normalizer": None}, None),
        ("bert", {"normalizer": {"type": "Sequence", "normalizers": []}}, None),
        ("bert", {"pre_tokenizer": None}, None),
        ("bert", {"pre_tokenizer": {"type": "Metaspace"}}, None),
        ("bert", {"model": {"type": "Unigram"}}, None),
        ("bytes", {}, False),
        ("bytes", {"content": "mask", "lstrip": True, "normalized": True}, False),
        ("bytes", {"single_word": True}, False),
        ("bytes", {"rstrip": True}, None),
        ("bytes", {"content": "a\tb"}, None),
        ("bytes", {"normalizer": {"type": "NFC"}}, None),
        ("bytes", {"pre_tokenizer": {"type": "ByteLevel", "use_regex": False}}, None),
        ("bytes", {"model": {"type": "BPE", "dropout": 0.1}}, None),
        ("bytes", {"model": {"type": "WordPiece"}}, None),
    ],
)
def test_where_a_tokenizer_is_cut(kind, changes, expected):
    cutter = find_cutter(_spec(kind, **changes))
    assert (cutter.bert if cutter else None) is expected


def test_what_is_not_cut_still_gives_the_backends_ids(tmp_path):
    backend = Tokenizer.load(write_vocabulary(tmp_path / "in")).backend
    backend.add_tokens([AddedToken("new york", normalized=True)])
    tokenizer = load(backend, tmp_path / "added")
    texts = ["I love New York", "", "newyork"]
    expected = tokenizer.backend.encode_batch(texts, add_special_tokens=False)
    assert [ids.tolist() for ids in tokenizer.encode(texts)] == [row.ids for row in expected]
    assert tokenizer.size - 1 in tokenizer.encode(texts)[0]


def test_the_table_stays_within_its_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "MEMORY", 10_000)
    table = _table(Tokenizer.load(write_vocabulary(tmp_path)))
    texts = [f"hello{number} world" for number in range(200)]
    sizes, rows = [], []
    for text in texts:
        rows += table.rows([text])
        sizes.append(sum(200 + 8 * len(piece) for piece in table))
    assert max(sizes) <= 10_000 + 300
    assert any(after < before for before, after in pairwise(sizes))
    assert rows == table.rows(texts)


def test_threads_share_a_table(tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "MEMORY", 4_000)
    table = _table(Tokenizer.load(write_vocabulary(tmp_path)))
    texts = [f"play{number % 37} un{number % 91}able" for number in range(400)]
    expected, results = _table(Tokenizer.load(tmp_path)).rows(texts), []
    threads = [threading.Thread(target=lambda: results.append(table.rows(texts))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4
