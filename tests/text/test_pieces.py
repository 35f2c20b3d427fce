"""Looking words up gives the ids of the backend; where that is not proved, it is not done."""

import threading
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from tokenizers import AddedToken

from bothways.text import tokenizer as tokenizer_module
from bothways.text.tokenizer import PieceTable, is_cuttable
from toy_text import hostile, roberta_backend


@pytest.fixture(scope="module")
def tokenizers():
    """Byte-level BPE with and without a space before the first word, and with more added tokens."""
    backends = [roberta_backend(prefix_space=prefix) for prefix in (False, True, False)]
    for text in ("[[", "<mask>>", "<中>", "<é>", "mask"):
        backends[2].add_tokens([AddedToken(text, normalized=False, lstrip=True)])
    return backends


@given(texts=st.lists(hostile, min_size=1, max_size=4))
# Spaces that belong to the white space before them.
@example(texts=["a\n  b\xa0  c\u3000  d", "\n  b", "\xa0  c  "])
@example(texts=["<mask>>x", "x[[<mask>>", "[ [[<中> <é>", "un  mask"])  # that begin like others
@settings(max_examples=100)
def test_looked_up_ids_are_the_backends(tokenizers, texts):
    for backend in tokenizers:
        encodings = backend.encode_batch(texts, add_special_tokens=False)
        rows = [np.frombuffer(row, np.int32).tolist() for row in PieceTable(backend).rows(texts)]
        assert rows == [encoding.ids for encoding in encodings]


@pytest.mark.parametrize(("changes", "expected"), [
    ({}, True),
    ({"content": "mask", "lstrip": True, "normalized": True}, True),
    ({"single_word": True}, True),
    ({"rstrip": True}, False),
    ({"content": "a\tb"}, False),
    ({"normalizer": {"type": "NFC"}}, False),
    ({"pre_tokenizer": {"type": "ByteLevel", "use_regex": False}}, False),
    ({"pre_tokenizer": {"type": "BertPreTokenizer"}}, False),
    ({"model": {"type": "BPE", "dropout": 0.1}}, False),
    ({"model": {"type": "WordPiece"}}, False),
])  # fmt: skip
def test_where_a_tokenizer_is_cut(changes, expected):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = {"content": "[MASK]", **flags}
    spec = {
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "use_regex": True},
        "model": {"type": "BPE", "dropout": None},
    }
    for key, value in changes.items():
        (added if key in added else spec)[key] = value
    assert is_cuttable({"added_tokens": [added], **spec}) is expected


def test_the_table_stays_within_its_memory(monkeypatch):
    monkeypatch.setattr(tokenizer_module, "MEMORY", 10_000)
    table = PieceTable(roberta_backend())
    texts = [f"hello{number} world" for number in range(200)]
    sizes, rows = [], []
    for text in texts:
        rows += table.rows([text])
        sizes.append(sum(200 + 8 * len(piece) for piece in table))
    assert max(sizes) <= 10_000 + 300
    assert any(after < before for before, after in pairwise(sizes))
    assert rows == table.rows(texts)


def test_threads_share_a_table(monkeypatch):
    monkeypatch.setattr(tokenizer_module, "MEMORY", 4_000)
    table = PieceTable(roberta_backend())
    texts = [f"play{number % 37} un{number % 91}able" for number in range(400)]
    expected, results = PieceTable(roberta_backend()).rows(texts), []
    threads = [threading.Thread(target=lambda: results.append(table.rows(texts))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4
