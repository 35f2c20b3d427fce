"""The tokenizer in C: ids, offsets and words are those of `tokenizers`, for all of Unicode; hostile calls write nothing."""

import ctypes
import itertools
import json
import random
import threading
import unicodedata
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings, strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors

from bothways.core.jobs import process_pool
from bothways.text import wordpiece
from bothways.text.tokenizer import Tokenizer
from bothways.text.wordpiece import PAGES, CompiledWordPiece, compile_wordpiece
from kernel_cases import examples
from toy_text import bert_tokens, code_points, hostile, write_vocabulary

compiled = pytest.mark.skipif(
    wordpiece.load().library is None, reason=f"the tokenizer is {wordpiece.load().problem}"
)


def backend(
    vocab: list[str] | None = None, prefix: str = "##", longest: int = 100, **normalizer: Any
) -> tokenizers.Tokenizer:
    vocab = list(dict.fromkeys(["[UNK]", *(bert_tokens() if vocab is None else vocab)]))
    model = models.WordPiece(
        {token: id for id, token in enumerate(vocab)},
        unk_token="[UNK]",
        max_input_chars_per_word=longest,
        continuing_subword_prefix=prefix,
    )
    made = tokenizers.Tokenizer(model)
    made.normalizer = normalizers.BertNormalizer(**normalizer)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(["[UNK]", "[MASK]"])
    return made


def compile_it(made: tokenizers.Tokenizer) -> CompiledWordPiece:
    result = compile_wordpiece(made, json.loads(made.to_str()))
    assert result is not None
    return result


def check(made: tokenizers.Tokenizer, fast: CompiledWordPiece, texts: list[str]) -> None:
    """Compare ids, spans and words with those of the backend."""
    expected = made.encode_batch(texts, add_special_tokens=False)
    lengths, (ids, spans, words) = fast.encode(texts, spans=True)
    assert lengths.tolist() == [len(each.ids) for each in expected]
    assert ids.tolist() == [id for each in expected for id in each.ids]
    assert spans.tolist() == [[*span] for each in expected for span in each.offsets]
    assert words.tolist() == [word for each in expected for word in each.word_ids]
    assert np.array_equal(fast.encode(texts).columns[0], ids)


@pytest.fixture(scope="module")
def pairs() -> list[tuple[tokenizers.Tokenizer, CompiledWordPiece]]:
    """All settings of the normaliser, and added tokens of all kinds that are found in the raw text."""
    names = ("clean_text", "handle_chinese_chars", "lowercase")
    made = [
        backend(**dict(zip(names, flags, strict=True)), strip_accents=accents)
        for flags in itertools.product([True, False], repeat=3)
        for accents in (True, False)
    ]
    made += [backend(lowercase=lowercase) for lowercase in (True, False)]  # which decides
    for kind in ({}, {"lstrip": True, "rstrip": True}, {"single_word": True}):
        made.append(backend())
        texts = ["[[", "[MASK]]", "<中>", "é", " a", "hello w", "\u0301"]
        made[-1].add_tokens([AddedToken(text, normalized=False, **kind) for text in texts])
    return [(each, compile_it(each)) for each in made]


@compiled
@given(texts=st.lists(hostile, min_size=1, max_size=4))
@example(texts=["[MASK]]x", "x[[MASK]]é", "[ [[<中> <é>hello world a", ""])
@example(texts=["a" * 100, "é" * 101, "a" * 99 + "\u0301", "ab" * 60 + " \x00\x00"])
@example(texts=["e\u0301", "a\u302eb\u0301", "\u0301", "가각\u00a0b\u2028c", "\ufeff##ing##"])
@settings(max_examples=examples(100))
def test_tokens_are_those_of_the_backend(pairs, texts):
    for made, fast in pairs:
        check(made, fast, texts)


@compiled
def test_marks_that_are_sorted_by_their_class_are_the_backends():
    combining = filter(unicodedata.combining, map(chr, range(0x110000)))
    marks = [character for character in combining if unicodedata.category(character) != "Mn"]
    made = backend(["a", *marks, *(f"##{mark}" for mark in marks)])
    texts = [f"a{first}{second}" for first in marks for second in marks]
    orders = {tuple(row.ids) for row in made.encode_batch(texts, add_special_tokens=False)}
    assert len(marks) < len(orders) < len(texts)  # some pairs are sorted, and nothing is unknown
    check(made, compile_it(made), texts)


@compiled
@pytest.mark.parametrize(("normalizer", "step"), [
    ({}, 61),
    pytest.param({}, 1, marks=pytest.mark.slow),
    pytest.param({"lowercase": False}, 1, marks=pytest.mark.slow),
    pytest.param({"clean_text": False, "strip_accents": False}, 1, marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_every_code_point_alone_and_in_words(normalizer, step):
    made = backend(**normalizer)
    fast = compile_it(made)
    # The planes in between have no characters: some of them are enough.
    empty = (range(0x34000, 0xE0000), range(0xE1000, 0x110000))
    codes = code_points(step) + [code for codes in empty for code in codes[:: 163 * step]]
    for start in range(0, len(codes), 0x4000):
        characters = [*map(chr, codes[start : start + 0x4000])]
        # One after the other, and between letters and marks.
        texts = ["".join(characters), " ".join(f"a{c}b\u0323{c}" for c in characters)]
        expected = made.encode_batch(texts, add_special_tokens=False)
        _, (ids, spans, _) = fast.encode(texts, spans=True)
        assert np.array_equal(ids, np.concatenate([each.ids for each in expected]))
        offsets = np.concatenate([np.array(each.offsets).reshape(-1, 2) for each in expected])
        assert np.array_equal(spans, offsets)


LETTERS = st.text("ab1é\u0301가中😀", min_size=1, max_size=20)


@compiled
@given(
    vocab=st.lists(LETTERS | LETTERS.map("##{}".format) | LETTERS.map("@{}".format), max_size=30),
    prefix=st.sampled_from(["##", "@", "a", "é", ""]),
    longest=st.sampled_from([1, 3, 17, 100, 256]),
    texts=st.lists(st.text("ab1é\u0301가中😀#@ "), min_size=1, max_size=20),
    lowercase=st.booleans(),
)
@settings(max_examples=examples(200))
def test_any_vocabulary_and_prefix(vocab, prefix, longest, texts, lowercase):
    made = backend(vocab, prefix, longest, lowercase=lowercase)
    check(made, compile_it(made), texts)


ATTEMPTS = examples(6)


@compiled
def test_several_threads_and_blocks(monkeypatch):
    """Of a call, and of Python; while pages are first met."""
    made, draw = backend(), random.Random(0)
    words = [*bert_tokens(), *(chr(draw.randrange(0x20, 0x3000)) for _ in range(300))]
    texts = [" ".join(draw.choices(words, k=draw.randrange(30))) for _ in range(200)]
    expected = [each.ids for each in made.encode_batch(texts, add_special_tokens=False)]
    monkeypatch.setattr(wordpiece, "_THREAD", 500)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert wordpiece._threads(10_000) == 4
    for attempt in range(ATTEMPTS):  # two threads must meet the same page at the right moment
        fast, results = compile_it(made), list[Any]()
        calls = [
            threading.Thread(target=lambda: results.append(fast.encode(texts, spans=True)))  # noqa: B023 – joined here
            for _ in range(8)
        ]
        for call in calls:
            call.start()
        for call in calls:
            call.join()
        assert len(results) == len(calls)
        if attempt == ATTEMPTS - 1:
            monkeypatch.setattr(wordpiece, "_BLOCK", 1_000)
            results.append(fast.encode(texts))
        for lengths, (ids, *_) in results:
            assert [row.tolist() for row in np.split(ids, np.cumsum(lengths)[:-1])] == expected
    monkeypatch.setenv(process_pool.NUMBER, "0")
    assert wordpiece._threads(10_000) == 1


@pytest.mark.parametrize("change", [
    {"normalizer": None},
    {"normalizer": {"type": "Sequence", "normalizers": []}},
    {"pre_tokenizer": {"type": "Whitespace"}},
    {"model": {"type": "BPE"}},
    {"model": {"unk_token": "[X]"}},
    {"model": {"max_input_chars_per_word": 257}},
    {"post_processor": {"type": "RobertaProcessing"}},
    {"added_tokens": [{"content": "new york", "normalized": True}]},
    {"added_tokens": [{"content": "", "normalized": False}]},
    {"added_tokens": [{"content": f"<{i}>", "normalized": False} for i in range(256)]},
], ids=str)  # fmt: skip
def test_what_is_not_proved_is_not_compiled(change):
    made = backend()
    spec = json.loads(made.to_str())
    for key, value in change.items():
        spec[key] = {**spec[key], **value} if key == "model" else value
    assert compile_wordpiece(made, spec) is None


@compiled
def test_without_the_library_ids_and_offsets_are_the_same(tmp_path, monkeypatch):
    folder, texts = write_vocabulary(tmp_path), ["Hello, naïve [MASK] world! 你好 e\u0301", ""]
    fast = Tokenizer.load(folder)
    monkeypatch.setattr(wordpiece, "load", lambda: wordpiece.abi.Loaded(None, "missing"))
    slow = Tokenizer.load(folder)
    assert [fast._compiled is None, slow._compiled is None] == [False, True]
    for one, other in zip(fast.encode(texts), slow.encode(texts), strict=True):
        assert np.array_equal(one, other)
    for one, other in zip(*(t.encode_with_offsets(texts) for t in (fast, slow)), strict=True):
        assert np.array_equal(one.offsets, other.offsets)
        assert np.array_equal(one.words, other.words)


class Call:
    """A valid call, and outputs to be left alone."""

    def __init__(self, text: bytes = b"hello world", lengths: tuple[int, ...] = (5, 6)) -> None:
        self.fast, self.text, self.threads = compile_it(backend()), text, 1
        self.starts = np.zeros(len(lengths) + 1, np.int64)
        self.lengths = np.array(lengths, np.int64)
        self.ids = np.full(100, 7, np.int32)
        self.missing = np.zeros(PAGES, np.uint8)
        arrays = (x.ctypes.data for x in (self.starts, self.lengths, self.ids))
        sizes = (text, len(text), len(lengths))
        self.batch = wordpiece.WordPieceBatch(*sizes, *arrays, None, None, self.missing.ctypes.data)

    def __call__(self) -> None:
        self.fast._call("encode", self.fast._handle, ctypes.byref(self.batch), self.threads)


@compiled
@pytest.mark.parametrize(("field", "value"), [
    ("text", None), ("bytes", -1), ("bytes", 2**31), ("bytes", 10), ("texts", -1), ("texts", 1),
    ("texts", 2**40), ("starts", None), ("lengths", None), ("ids", None), ("words", 64),
    ("missing", None), ("threads", 0), ("threads", -1), ("threads", 2**20),
])  # fmt: skip
def test_call_that_does_not_fit_is_refused(field, value):
    call = Call()
    setattr(call if field == "threads" else call.batch, field, value)
    with pytest.raises(ValueError, match="an argument is invalid"):
        call()
    assert (call.ids == 7).all()


@compiled
@pytest.mark.parametrize("lengths", [(5, 5), (5, 7), (-1, 12), (2**62, 2**62), (12, 0)], ids=str)
def test_lengths_that_are_not_those_of_the_text_are_refused(lengths):
    for text in (b"hello world", "héllo wörld".encode()):
        call = Call(text, lengths)
        with pytest.raises(ValueError, match="invalid"):
            call()
        assert (call.ids == 7).all()


@compiled
@pytest.mark.parametrize("text", [
    b"\xff", b"\xc3", b"a\xe4\xb8", b"\xf0\x9f\x98", b"\xf8\x88\x80\x80\x80", b"\xc3a",
    b"\xf7\xbf\xbf\xbf", b"\xe4a\xad",
], ids=repr)  # fmt: skip
def test_bytes_that_are_not_utf8_are_refused(text):
    characters = sum(byte & 0xC0 != 0x80 for byte in text)
    with pytest.raises(ValueError, match="invalid"):
        Call(text, (characters,))()


@compiled
@pytest.mark.parametrize(("number", "changes", "output"), [
    (-1, {}, b""), (PAGES, {}, b""),
    (1, {0: 2, 1: 1}, b"ab"),  # ends that fall
    (1, {0: 1}, b"\xfe"), (1, {0: 2}, b"\xe4\xb8"), (1, {0: 4}, b"\xf7\xbf\xbf\xbf"),
    (1, {0: 3}, b"abc"),  # more characters than the code point has bytes
], ids=str)  # fmt: skip
def test_pages_that_are_not_whole_are_refused(number, changes, output):
    ends = np.full(256, len(output), np.uint16)
    for at, end in changes.items():
        ends[at] = end
    fast = compile_it(backend())
    with pytest.raises(ValueError, match="invalid"):
        fast._call("page", fast._handle, number, ends.ctypes.data, output)


@compiled
@pytest.mark.parametrize(("table", "field", "value"), [
    ("tokens", "count", -1), ("tokens", "count", 2**40), ("tokens", "bytes", 3),
    ("tokens", "bytes", 2**40), ("tokens", "text", None), ("added", "lengths", None),
    ("added", "ids", None), ("added", "count", 3), ("", "prefix", None), ("", "prefix_length", -1),
    ("", "unknown", -1), ("", "max_characters", 0), ("", "max_characters", 257),
])  # fmt: skip
def test_vocabulary_that_does_not_fit_is_refused(table, field, value):
    (tokens, _keep), (added, _kept) = (
        wordpiece._strings([(b"[UNK]", 0), (b"ab", 1)]) for _ in range(2)
    )
    vocabulary = wordpiece.WordPieceVocabulary(tokens, added, b"##", 2, 0, 0, 100)
    setattr(getattr(vocabulary, table) if table else vocabulary, field, value)
    handle = ctypes.c_void_p()
    with pytest.raises(ValueError, match="invalid"):
        compile_it(backend())._call("new", ctypes.byref(vocabulary), ctypes.byref(handle))
    assert handle.value is None


def test_offsets_that_a_post_processor_trims_are_the_backends(tmp_path):
    """RoBERTa's takes Ġ at the beginning of a token for a space."""
    made = backend(["Ġ", "Ġa"], lowercase=False)
    made.post_processor = processors.RobertaProcessing(("[UNK]", 0), ("[UNK]", 0))
    tokenizer = Tokenizer(made, Tokenizer.load(write_vocabulary(tmp_path)).specials)
    (row,) = tokenizer.encode_with_offsets(["Ġa b"])
    expected = made.encode("Ġa b", add_special_tokens=False).offsets
    assert [*map(tuple, row.offsets.tolist())] == expected
