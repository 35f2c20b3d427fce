"""Ids, offsets and tables against transformers and against Google's algorithm; files both ways; every error."""

import json
import pickle
import resource

import numpy as np
import pytest
import transformers
from hypothesis import assume, given, settings, strategies as st
from tokenizers import Tokenizer as Backend, models, normalizers, pre_tokenizers

import toy_text
from bothways.core.errors import BothwaysError, DataError, ResourceError, TokenizerError
from bothways.text.template import assemble
from bothways.text.tokenizer import Tokenizer
from bothways.text.tokenizer_classes import CONFIG, Specials
from bothways.text.trainers import ByteBPE, Unigram, train_vocabulary

SETTINGS = [
    {},
    {"do_lower_case": False},
    {"do_lower_case": False, "strip_accents": True},
    {"do_lower_case": True, "strip_accents": False},
    {"tokenize_chinese_chars": False},
    {"do_lower_case": False, "tokenize_chinese_chars": False},
]
TOKENS = toy_text.bert_tokens()
ASCII_CASES = [
    "Hello, playing world!", "", " ", "don't [MASK] it", "naïve e\u0301 中文字 x", "\x00a\u200bb [UNK]",
]  # fmt: skip


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Ours and transformers', for each of the settings."""
    made = []
    for number, config in enumerate(SETTINGS):
        folder = toy_text.write_vocabulary(tmp_path_factory.mktemp("vocab") / str(number), **config)
        theirs = transformers.BertTokenizer(
            vocab={token: id for id, token in enumerate(TOKENS)}, **config
        )
        made.append((Tokenizer.load(folder), theirs))
    return made


@given(texts=st.lists(toy_text.hostile, min_size=1, max_size=4))
@settings(max_examples=50)
def test_ids_and_offsets_are_those_of_transformers(pairs, texts):
    for ours, theirs in pairs:
        toy_text.assert_same_tokens(ours, theirs, texts)
        expected, encoded = theirs(texts, add_special_tokens=False), ours.encode_with_offsets(texts)
        assert [row.ids.tolist() for row in encoded] == expected["input_ids"]
        words = [expected.word_ids(i) for i in range(len(texts))]
        assert [row.words.tolist() for row in encoded] == words
        flat, lengths = ours.encode_flat(texts)
        assert flat.tolist() == [id for ids in expected["input_ids"] for id in ids]
        assert lengths.tolist() == list(map(len, expected["input_ids"]))


# Where the two tables of Unicode agree: Latin, Greek, Cyrillic, Hebrew, Arabic, punctuation, kana, ideographs.
_RANGES = "0000-0377 0391-03A1 03B1-03C9 0410-044F 05D0-05EA 0621-0652 2000-2064 3001-301F 3041-3096 4E00-4E3F"
_SETTLED = "".join(
    chr(code)
    for low, high in (part.split("-") for part in _RANGES.split())
    for code in range(int(low, 16), int(high, 16) + 1)
)


@given(text=st.text(st.sampled_from(_SETTLED + " " * 200), max_size=40), lowercase=st.booleans())
@settings(max_examples=100)
def test_tokens_are_those_of_googles_algorithm(pairs, text, lowercase):
    assume(not any(name in text for name in toy_text.BERT_NAMES))
    ours = pairs[0 if lowercase else 1][0]
    expected = toy_text.google_tokens(text, set(TOKENS), lowercase=lowercase)
    assert [ours.token(id) for id in ours.encode([text])[0].tolist()] == expected


def test_known_differences_from_google(pairs):
    ours, vocab = pairs[0][0], set(TOKENS)

    def tokens(text):
        return [ours.token(id) for id in ours.encode([text])[0].tolist()]

    assert toy_text.google_tokens("a" * 101, vocab, lowercase=True) == ["a"] + ["##a"] * 100
    assert tokens("a" * 101) == ["[UNK]"]
    assert tokens("a" * 100) == toy_text.google_tokens("a" * 100, vocab, lowercase=True)
    assert toy_text.google_tokens("a\U0002b820b", vocab, lowercase=True) == ["a", "[UNK]", "b"]
    assert tokens("a\U0002b820b") == ["[UNK]"]
    assert toy_text.google_tokens("a\ue000b", vocab, lowercase=True) == ["[UNK]"]
    assert tokens("a\ue000b") == ["a", "##b"]
    assert toy_text.google_tokens("ΑΣ", vocab, lowercase=True) == ["α", "##ς"]
    assert tokens("ΑΣ") == ["α", "##σ"]
    assert toy_text.google_tokens("[MASK]", vocab, lowercase=True) == ["[", "mask", "]"]
    assert tokens("[MASK]") == ["[MASK]"]


@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_saved_bert_is_built_from_vocabulary_and_settings(tmp_path, pairs, number):
    ours = pairs[number][0]
    theirs = toy_text.save_and_open(ours, tmp_path, ASCII_CASES)
    assert type(theirs) is transformers.BertTokenizer
    (tmp_path / "tokenizer.json").unlink()
    assert Tokenizer.load(tmp_path).fingerprint == ours.fingerprint


def test_special_tokens_by_the_names_of_the_configuration(tmp_path):
    tokens = ["<blank>", "?", "<begin>", "<end>", "<hole>", "a", "b"]
    uses = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    names = dict(zip(uses, tokens, strict=False)) | {"cls_token": {"content": "<begin>"}}
    ours = Tokenizer.load(toy_text.write_vocabulary(tmp_path / "in", tokens, **names))
    assert ours.specials == Specials(pad=0, unknown=1, cls=2, sep=3, mask=4)
    assert ours.encode(["a<hole>x b"])[0].tolist() == [5, 4, 1, 6]
    theirs = toy_text.save_and_open(ours, tmp_path / "out", ["a<hole>x b"])
    assert theirs("a<hole>x b").input_ids == [2, 5, 4, 1, 6, 3]
    assert theirs.mask_token_id == 4


def test_files_of_another_tokenizer_are_not_read_with_those_that_are_saved(tmp_path, pairs):
    tokenizer = pairs[0][0]
    (tmp_path / "special_tokens_map.json").write_text('{"cls_token": "a"}')
    (tmp_path / "added_tokens.json").write_text(json.dumps({"zebra": tokenizer.size}))
    tokenizer.save(tmp_path)
    assert Tokenizer.load(tmp_path).fingerprint == tokenizer.fingerprint


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    backend = Tokenizer.load(toy_text.write_vocabulary(tmp_path / "in")).backend
    backend.enable_truncation(2)
    backend.enable_padding(length=10**7)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ours = toy_text.load(backend, tmp_path / "file")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10**5  # kilobytes
    assert ours.backend.padding is None
    assert list(map(len, ours.encode(["a b c d", "a"]))) == [4, 1]


def test_tables_of_word_piece(pairs):
    ours = pairs[0][0]
    assert ours.size == len(TOKENS)
    assert ours.special.tolist() == [
        token in toy_text.BERT_NAMES and token != "[UNK]" for token in TOKENS
    ]
    assert ours.continues.tolist() == [token.startswith("##") for token in TOKENS]
    assert ours.lowercase
    assert not pairs[1][0].lowercase
    assert [ours.token(id) for id in range(ours.size)] == TOKENS
    assert [ours.id(token) for token in TOKENS] == list(range(ours.size))
    assert ours.id("nothing of the kind") is None


@given(text=toy_text.hostile)
def test_continuing_tokens_touch_the_token_before(pairs, text):
    """In WordPiece a token continues if and only if it is in the word of the token before."""
    for ours, _ in pairs[:2]:
        row = ours.encode_with_offsets([text])[0]
        assert (ours.continues[row.ids[1:]] == (row.words[1:] == row.words[:-1])).all()
        assert not len(row.ids) or not ours.continues[row.ids[0]]


def test_tables_of_byte_level_bpe(tmp_path):
    ours = toy_text.load(toy_text.roberta_backend(), tmp_path)
    spelled = {token: bool(ours.continues[id]) for token, id in ours.backend.get_vocab().items()}
    assert spelled["a"]
    assert spelled["hello"]
    assert not spelled["Ġw"]
    assert not spelled["Ċ"]
    assert not any(spelled[token] for token in ("<s>", "<pad>", "</s>", "<unk>", "<mask>"))
    assert np.flatnonzero(ours.special).tolist() == sorted({0, 1, 2, ours.size - 1})
    assert not ours.lowercase


def test_words_alone_continue_nothing(tmp_path):
    vocab = {token: id for id, token in enumerate([*toy_text.BERT_NAMES, "a"])}
    backend = Backend(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    ours = toy_text.load(backend, tmp_path)
    assert not ours.continues.any()
    assert ours.encode(["a b a"])[0].tolist() == [5, 1, 5]


def test_pickle_keeps_everything(pairs):
    ours = pairs[2][0]
    again = pickle.loads(pickle.dumps(ours))
    assert (again.fingerprint, again.specials) == (ours.fingerprint, ours.specials)
    assert [ids.tolist() for ids in again.encode(ASCII_CASES)] == [
        ids.tolist() for ids in ours.encode(ASCII_CASES)
    ]


def test_fingerprint_sees_what_decides_the_ids_and_not_the_layout_of_the_file(tmp_path):
    ours = Tokenizer.load(toy_text.write_vocabulary(tmp_path / "a"))
    spec = json.dumps(json.loads(ours.backend.to_str()), indent=7)
    (tmp_path / "tokenizer.json").write_text(spec, encoding="utf-8")
    assert Tokenizer.load(tmp_path / "tokenizer.json").fingerprint == ours.fingerprint
    cased = Tokenizer.load(toy_text.write_vocabulary(tmp_path / "b", do_lower_case=False))
    assert cased.fingerprint != ours.fingerprint


def test_decode(pairs):
    ours = pairs[0][0]
    assert ours.decode(ours.encode(["[CLS] playing, hello!"])[0]) == "[CLS] playing, hello!"
    assert ours.decode([]) == ""


def test_a_model_without_segments_reads_all_in_the_first(pairs):
    ours = pairs[0][0]
    flat = ours.for_segments(1)
    assert ours.for_segments(2) is ours
    sequence = assemble(*flat.encode(["hello", "world"]), flat.template)
    assert sequence.ids.tolist() == ours.backend.encode("hello", "world").ids
    assert not sequence.segments.any()


def test_a_batch_is_cut_as_by_transformers(pairs):
    ours, theirs = pairs[0]
    texts = ["hello world a b c", ("a b c d e", "hello"), ("hello", "a b c d e")]
    rows = [
        theirs(*([text] if isinstance(text, str) else text), truncation=True, max_length=6)
        for text in texts
    ]
    batch = ours.batch(texts, length=6)
    assert batch.layout.lengths == [6] * 3
    assert batch.ids.tolist() == [id for row in rows for id in row["input_ids"]]
    assert batch.segments.tolist() == [id for row in rows for id in row["token_type_ids"]]


def test_arrays_can_be_written(pairs):
    ours = pairs[0][0]
    ours.encode(["hello"])[0][0] = 0
    ours.encode_flat(["hello"])[0][0] = 0
    assert ours.encode(["hello"])[0].tolist() == [ours.id("hello")]


def test_settings_that_are_null_are_as_if_left_out(tmp_path):
    plain = Tokenizer.load(toy_text.write_vocabulary(tmp_path / "plain"))
    keys = ("do_lower_case", "strip_accents", "tokenize_chinese_chars", "unk_token", "mask_token")
    null = Tokenizer.load(toy_text.write_vocabulary(tmp_path / "null", **dict.fromkeys(keys)))
    assert null.fingerprint == plain.fingerprint


VOCABULARY = "\n".join([*toy_text.BERT_NAMES, "a"])
OTHER_UNKNOWN = {"type": "WordPiece", "unk_token": "<oov>", "continuing_subword_prefix": "##"} | {
    "max_input_chars_per_word": 100, "vocab": {token: id for id, token in enumerate(TOKENS)}
}  # fmt: skip
REPEATED = OTHER_UNKNOWN | {
    "unk_token": "[UNK]",
    "vocab": {**OTHER_UNKNOWN["vocab"], "b": 7, "a": 7},
}
NO_UNKNOWN = {
    "type": "Unigram",
    "unk_id": None,
    "vocab": [[name, 0.0] for name in toy_text.BERT_NAMES],
}


@pytest.mark.parametrize(("files", "says"), [
    ({}, "holds no tokenizer: none of tokenizer.json, vocab.txt"),
    ({"vocab.txt": b"\x1f\x8b\x08\x00\xff\xfe"}, "is not UTF-8 text"),
    ({"vocab.txt": ""}, "has 1 tokens, fewer than the 5 special tokens"),
    ({"vocab.txt": "\n".join([*toy_text.BERT_NAMES[:4], "a"])}, r"lacks special tokens: \[MASK\] or <mask>"),
    ({"tokenizer.json": '{"a": 1}'}, "is not a tokenizer that tokenizers"),
    ({"tokenizer.json": {"model": OTHER_UNKNOWN}}, "unknown token '<oov>' is not in its vocabulary"),
    ({"tokenizer.json": {"model": REPEATED}}, "the id 7 to several tokens: a, b"),
    ({"tokenizer.json": {"model": NO_UNKNOWN}}, "`unk_id` is missing"),
    ({"vocab.txt": VOCABULARY, CONFIG: '{\n"do_lower_case": tru}'}, f"{CONFIG}: is not JSON: .* at line 2"),
    ({"vocab.txt": VOCABULARY, CONFIG: "[1]"}, "holds a JSON list, not an object"),
    ({"vocab.txt": VOCABULARY, CONFIG: {"unk_token": "<unk>"}}, "vocab.txt: .* lacks special tokens: <unk>\n"),
    ({"vocab.txt": VOCABULARY, CONFIG: {"mask_token": {"content": "<mask>"}}}, "vocab.txt: .* lacks special tokens: <mask>\n"),
    ({"vocab.txt": VOCABULARY, CONFIG: {"do_lower_case": "true"}}, f"{CONFIG}: 'do_lower_case' is 'true'"),
    ({"vocab.txt": VOCABULARY, CONFIG: {"tokenize_chinese_chars": 1}}, f"{CONFIG}: 'tokenize_chinese_chars' is 1"),
])  # fmt: skip
def test_broken_files_are_refused_by_name(tmp_path, files, says):
    for name, content in files.items():
        text = json.dumps(content) if isinstance(content, dict) else content
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(TokenizerError, match=says) as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert caught.value.fix


def test_folders_that_cannot_be_read_or_written(tmp_path, pairs):
    with pytest.raises(TokenizerError, match="nothing: no such file or folder"):
        Tokenizer.load(tmp_path / "nothing")
    (tmp_path / "run" / "model").mkdir(parents=True)
    with pytest.raises(TokenizerError, match=r"Did you mean .*run.model\?"):
        Tokenizer.load(tmp_path / "run")
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(ResourceError, match="cannot be read"):
        Tokenizer.load(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match="cannot be written"):
        pairs[0][0].save(tmp_path / "file")


@pytest.mark.parametrize("family", ["bert", "bytes"])
def test_half_a_surrogate_pair_is_no_text(tmp_path, pairs, family):
    backend = toy_text.roberta_backend()
    backend.normalizer = normalizers.NFC()  # texts are not divided into pieces first
    ours = pairs[0][0] if family == "bert" else toy_text.load(backend, tmp_path)
    for encode in (ours.encode, ours.encode_flat, ours.encode_with_offsets):
        with pytest.raises(DataError, match=r"text 1 holds U\+D800 at character 2"):
            encode(["fine", "no\ud800 ", "fine"])


def test_what_is_no_text_is_told(pairs):
    with pytest.raises(DataError, match="text 1 is of type float, not str"):
        pairs[0][0].encode(["text", 1.5])
    with pytest.raises(DataError, match=r"text 0 is of type list, not str\n.*as a tuple"):
        pairs[0][0].batch([["text", "another"]])
    for read in (pairs[0][0].batch, pairs[0][0].encode, pairs[0][0].encode_with_offsets):
        with pytest.raises(DataError, match=r"^texts: is of type NoneType, not a list"):
            read(None)
    for ids in (None, "text", [None]):
        with pytest.raises(DataError, match="is of type"):
            pairs[0][0].decode(ids)


@pytest.mark.parametrize("id", [-1, 10**6])
def test_an_id_that_no_token_has(pairs, id):
    message = f"no token has id {id}; ids run from 0 to {len(TOKENS) - 1}"
    with pytest.raises(TokenizerError, match=message):
        pairs[0][0].token(id)
    with pytest.raises(BothwaysError, match=f"no token has id {id}"):
        pairs[0][0].decode([2, id])


def test_one_text_gives_one_array(pairs):
    ours = pairs[0][0]
    assert ours.encode("hello world").tolist() == ours.encode(["hello world"])[0].tolist()
    assert [row.tolist() for row in ours.encode(("a", "b"))] == [
        row.tolist() for row in ours.encode(["a", "b"])
    ]


def _words(tokenizer, text):
    """The text cut into the words of whole-word masking."""
    continues, ends = tokenizer.word_pieces
    ids = tokenizer.encode(text)
    words = []
    for place, id in enumerate(ids.tolist()):
        if place and continues[id] and not ends[ids[place - 1]]:
            words[-1].append(id)
        else:
            words.append([id])
    return [tokenizer.decode(word).strip() for word in words]


@pytest.mark.parametrize("kind", [ByteBPE(size=400), Unigram(size=120)])
def test_words_end_at_punctuation_and_in_scripts_without_spaces(kind):
    text = ["the dog, the house. (a cat) 数学课很有趣。"] * 20
    words = _words(train_vocabulary(text, kind), text[0])
    for word in ("the", "dog", "house", "cat", ",", "."):
        assert word in words
    assert max(map(len, words)) <= 16
    assert len(words[words.index(next(w for w in words if "数" in w)) :]) >= 2
    assert "".join(words) == text[0].replace(" ", "").replace("。", words[-1][-1])
    if isinstance(kind, ByteBPE):  # of each ideograph the bytes alone are tokens
        tokenizer = train_vocabulary(["the cat"], ByteBPE(size=265))
        assert [*filter(None, _words(tokenizer, "the 国家"))] == ["the", "国", "家"]
