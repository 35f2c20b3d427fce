"""Ids, offsets and tables against transformers and against Google's algorithm; files both ways; every error."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import transformers
from hypothesis import assume, given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer as Backend, models, normalizers, pre_tokenizers

from bothways.core.errors import BothwaysError, DataError, ResourceError, TokenizerError
from bothways.text.tokenizer import Tokenizer, _flaw
from bothways.text.tokenizer_classes import Specials
from bothways.text.trainers import ByteBPE, Unigram, train_vocabulary
from toy_text import (
    BERT_NAMES,
    bert_tokens,
    google_tokens,
    hostile,
    load,
    roberta_backend,
    write_vocabulary,
)

SETTINGS = [
    {},
    {"do_lower_case": False},
    {"do_lower_case": False, "strip_accents": True},
    {"do_lower_case": True, "strip_accents": False},
    {"tokenize_chinese_chars": False},
    {"do_lower_case": False, "tokenize_chinese_chars": False},
]
TOKENS = bert_tokens()
ASCII_CASES = [
    "Hello, playing world!",
    "",
    " ",
    "don't [MASK] it",
    "naïve e\u0301 中文字 x",
    "\x00a\u200bb [UNK]",
]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Ours and transformers', for each of the settings."""
    made = []
    for number, config in enumerate(SETTINGS):
        folder = write_vocabulary(tmp_path_factory.mktemp("vocab") / str(number), **config)
        theirs = transformers.BertTokenizer(
            vocab={token: id for id, token in enumerate(TOKENS)}, **config
        )
        made.append((Tokenizer.load(folder), theirs))
    return made


@given(texts=st.lists(hostile, min_size=1, max_size=4))
@settings(max_examples=100)
def test_ids_and_offsets_are_those_of_transformers(pairs, texts):
    for ours, theirs in pairs:
        expected = theirs(texts, add_special_tokens=False, return_offsets_mapping=True)
        assert [ids.tolist() for ids in ours.encode(texts)] == expected["input_ids"]
        encoded = ours.encode_with_offsets(texts)
        assert [row.ids.tolist() for row in encoded] == expected["input_ids"]
        assert [list(map(tuple, row.offsets.tolist())) for row in encoded] == expected[
            "offset_mapping"
        ]
        assert [row.words.tolist() for row in encoded] == [
            expected.word_ids(i) for i in range(len(texts))
        ]
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
    assume(not any(name in text for name in BERT_NAMES))
    ours = pairs[0 if lowercase else 1][0]
    expected = google_tokens(text, set(TOKENS), lowercase=lowercase)
    assert [ours.token(id) for id in ours.encode([text])[0].tolist()] == expected


def test_known_differences_from_google(pairs):
    ours, vocab = pairs[0][0], set(TOKENS)

    def tokens(text):
        return [ours.token(id) for id in ours.encode([text])[0].tolist()]

    assert google_tokens("a" * 101, vocab, lowercase=True) == ["a"] + ["##a"] * 100
    assert tokens("a" * 101) == ["[UNK]"]
    assert tokens("a" * 100) == google_tokens("a" * 100, vocab, lowercase=True)
    assert google_tokens("a\U0002b820b", vocab, lowercase=True) == ["a", "[UNK]", "b"]
    assert tokens("a\U0002b820b") == ["[UNK]"]
    assert google_tokens("a\ue000b", vocab, lowercase=True) == ["[UNK]"]
    assert tokens("a\ue000b") == ["a", "##b"]
    assert google_tokens("ΑΣ", vocab, lowercase=True) == ["α", "##ς"]
    assert tokens("ΑΣ") == ["α", "##σ"]
    assert google_tokens("[MASK]", vocab, lowercase=True) == ["[", "mask", "]"]
    assert tokens("[MASK]") == ["[MASK]"]


@pytest.mark.parametrize("config", SETTINGS)
def test_saved_bert_opens_in_transformers_with_the_same_ids(tmp_path, config):
    ours = Tokenizer.load(write_vocabulary(tmp_path / "in", **config))
    ours.save(tmp_path / "out", positions=77)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert type(theirs) is transformers.BertTokenizer
    assert theirs.model_max_length == 77
    assert (theirs.pad_token_id, theirs.mask_token_id) == (ours.specials.pad, ours.specials.mask)
    assert (theirs.cls_token_id, theirs.sep_token_id, theirs.unk_token_id) == (2, 3, 1)
    assert theirs(ASCII_CASES, add_special_tokens=False).input_ids == [
        ids.tolist() for ids in ours.encode(ASCII_CASES)
    ]
    pair = theirs("hello", "world")
    assert theirs.convert_ids_to_tokens(pair.input_ids) == [
        "[CLS]",
        "hello",
        "[SEP]",
        "world",
        "[SEP]",
    ]
    assert pair.token_type_ids == [0, 0, 0, 1, 1]
    again = Tokenizer.load(tmp_path / "out")
    assert again.fingerprint == ours.fingerprint
    (tmp_path / "out" / "tokenizer.json").unlink()
    assert (
        Tokenizer.load(tmp_path / "out").fingerprint == ours.fingerprint
    )  # from vocab.txt and the settings


def test_what_transformers_saved_opens_here(tmp_path):
    theirs = transformers.BertTokenizer(
        vocab={token: id for id, token in enumerate(TOKENS)}, do_lower_case=False
    )
    theirs.save_pretrained(tmp_path)
    ours = Tokenizer.load(tmp_path)
    assert theirs(ASCII_CASES, add_special_tokens=False).input_ids == [
        ids.tolist() for ids in ours.encode(ASCII_CASES)
    ]
    assert not ours.lowercase


def test_a_tokenizer_that_bert_is_not_is_declared_generic(tmp_path):
    ours = Tokenizer.load(write_vocabulary(tmp_path / "in"))
    ours.backend.add_tokens(["zzz"])
    Tokenizer(ours.backend, ours.specials).save(tmp_path / "out", segments=False)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert set(theirs("a zzz b")) == {"input_ids", "attention_mask"}
    again = Tokenizer.load(tmp_path / "out")
    assert again.size == len(TOKENS) + 1
    assert (
        theirs("a zzz b", add_special_tokens=False).input_ids
        == again.encode(["a zzz b"])[0].tolist()
    )


@pytest.mark.parametrize("prefix_space", [False, True])
def test_byte_level_bpe_goes_both_ways(tmp_path, prefix_space):
    ours = load(roberta_backend(prefix_space=prefix_space), tmp_path / "in")
    assert ours.specials == Specials(pad=1, unknown=3, cls=0, sep=2, mask=ours.size - 1)
    ours.save(tmp_path / "out")
    assert not (tmp_path / "out" / "vocab.txt").exists()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    texts = [*ASCII_CASES, "hello <mask> world", " hello's  \n w"]
    assert theirs(texts, add_special_tokens=False).input_ids == [
        ids.tolist() for ids in ours.encode(texts)
    ]
    assert theirs("hello", "w").input_ids == [
        0,
        *theirs("hello", add_special_tokens=False).input_ids,
        2,
        2,
        *ours.encode(["w"])[0],
        2,
    ]
    assert ours.decode(ours.encode(["hello wörld 中 <mask>"])[0]).strip() == "hello wörld 中<mask>"


def test_special_tokens_by_the_names_of_the_configuration(tmp_path):
    tokens = ["<blank>", "?", "<begin>", "<end>", "<hole>", "a", "b"]
    names = {
        "pad_token": "<blank>",
        "unk_token": "?",
        "cls_token": {"content": "<begin>"},
        "sep_token": "<end>",
        "mask_token": "<hole>",
    }
    ours = Tokenizer.load(write_vocabulary(tmp_path / "in", tokens, **names))
    assert ours.specials == Specials(pad=0, unknown=1, cls=2, sep=3, mask=4)
    assert ours.encode(["a<hole>x b"])[0].tolist() == [5, 4, 1, 6]
    ours.save(tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs("a<hole>x b").input_ids == [2, 5, 4, 1, 6, 3]
    assert theirs.mask_token_id == 4


def test_files_of_another_tokenizer_are_not_read_with_those_that_are_saved(tmp_path, pairs):
    tokenizer = pairs[0][0]
    (tmp_path / "special_tokens_map.json").write_text('{"cls_token": "a"}')
    (tmp_path / "added_tokens.json").write_text(json.dumps({"zebra": tokenizer.size}))
    tokenizer.save(tmp_path)
    assert Tokenizer.load(tmp_path).fingerprint == tokenizer.fingerprint


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    backend = Tokenizer.load(write_vocabulary(tmp_path / "in")).backend
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    ours = load(backend, tmp_path / "file")
    assert list(map(len, ours.encode(["a b c d", "a"]))) == [4, 1]
    assert list(map(len, [row.ids for row in ours.encode_with_offsets(["a b c d", "a"])])) == [4, 1]


def test_tables_of_word_piece(pairs):
    ours = pairs[0][0]
    assert ours.size == len(TOKENS)
    assert ours.special.tolist() == [token in BERT_NAMES and token != "[UNK]" for token in TOKENS]
    assert ours.continues.tolist() == [token.startswith("##") for token in TOKENS]
    assert ours.lowercase
    assert not pairs[1][0].lowercase
    assert [ours.token(id) for id in range(ours.size)] == TOKENS
    assert [ours.id(token) for token in TOKENS] == list(range(ours.size))
    assert ours.id("nothing of the kind") is None


@given(text=hostile)
@settings(max_examples=100)
def test_continuing_tokens_touch_the_token_before(pairs, text):
    """In WordPiece a token continues if and only if it is in the word of the token before."""
    for ours, _ in pairs[:2]:
        row = ours.encode_with_offsets([text])[0]
        assert (ours.continues[row.ids[1:]] == (row.words[1:] == row.words[:-1])).all()
        assert not len(row.ids) or not ours.continues[row.ids[0]]


def test_tables_of_byte_level_bpe(tmp_path):
    ours = load(roberta_backend(), tmp_path)
    spelled = {token: bool(ours.continues[id]) for token, id in ours.backend.get_vocab().items()}
    assert spelled["a"]
    assert spelled["hello"]
    assert not spelled["Ġw"]
    assert not spelled["Ċ"]
    assert not any(spelled[token] for token in ("<s>", "<pad>", "</s>", "<unk>", "<mask>"))
    assert np.flatnonzero(ours.special).tolist() == sorted({0, 1, 2, ours.size - 1})
    assert not ours.lowercase


def test_words_alone_continue_nothing(tmp_path):
    backend = Backend(
        models.WordLevel(
            {token: id for id, token in enumerate([*BERT_NAMES, "a"])}, unk_token="[UNK]"
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    ours = load(backend, tmp_path)
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
    ours = Tokenizer.load(write_vocabulary(tmp_path / "a"))
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(json.loads(ours.backend.to_str()), indent=7), encoding="utf-8"
    )
    assert Tokenizer.load(tmp_path / "tokenizer.json").fingerprint == ours.fingerprint
    assert (
        Tokenizer.load(write_vocabulary(tmp_path / "b", do_lower_case=False)).fingerprint
        != ours.fingerprint
    )


def test_decode(pairs):
    ours = pairs[0][0]
    assert ours.decode(ours.encode(["[CLS] playing, hello!"])[0]) == "[CLS] playing, hello!"
    assert ours.decode([]) == ""


def test_arrays_can_be_written(pairs):
    ours = pairs[0][0]
    ours.encode(["hello"])[0][0] = 0
    ours.encode_flat(["hello"])[0][0] = 0
    assert ours.encode(["hello"])[0].tolist() == [ours.id("hello")]


def test_settings_that_are_null_are_as_if_left_out(tmp_path):
    plain = Tokenizer.load(write_vocabulary(tmp_path / "plain"))
    null = dict.fromkeys(
        ("do_lower_case", "strip_accents", "tokenize_chinese_chars", "unk_token", "mask_token")
    )
    assert (
        Tokenizer.load(write_vocabulary(tmp_path / "null", **null)).fingerprint == plain.fingerprint
    )


def _broken(tmp_path: Path, name: str) -> Path:
    """A file or folder that is wrong in the way of this name."""
    tokens = [*BERT_NAMES, "a"]
    match name:
        case "nothing":
            return tmp_path / "nothing"
        case "empty folder":
            return tmp_path
        case "binary":
            (tmp_path / "vocab.txt").write_bytes(b"\x1f\x8b\x08\x00\xff\xfe")
        case "empty":
            (tmp_path / "vocab.txt").write_text("")
        case "no mask":
            write_vocabulary(tmp_path, [*BERT_NAMES[:4], "a", "b"])
        case "folder for a file":
            (tmp_path / "tokenizer.json").mkdir()
        case "no tokenizer":
            (tmp_path / "tokenizer.json").write_text('{"a": 1}')
        case "no unknown":
            write_vocabulary(tmp_path / "in", tokens)
            spec = json.loads(Tokenizer.load(tmp_path / "in").backend.to_str())
            spec["model"]["unk_token"] = "<oov>"
            (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
        case "no unknown piece":
            model = {"type": "Unigram", "unk_id": None, "vocab": [[name, 0.0] for name in tokens]}
            (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model}))
        case "config no JSON":
            write_vocabulary(tmp_path, tokens)
            (tmp_path / "tokenizer_config.json").write_text('{\n"do_lower_case": tru}')
        case "config no object":
            write_vocabulary(tmp_path, tokens)
            (tmp_path / "tokenizer_config.json").write_text("[1]")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("nothing", TokenizerError, "no such file or folder"),
        ("empty folder", TokenizerError, "holds no tokenizer: none of tokenizer.json, vocab.txt"),
        ("binary", TokenizerError, "is not UTF-8 text"),
        ("empty", TokenizerError, "has 1 tokens, fewer than the 5 special tokens"),
        ("no mask", TokenizerError, r"lacks special tokens: \[MASK\] or <mask>"),
        ("folder for a file", ResourceError, "cannot be read"),
        ("no tokenizer", TokenizerError, "is not a tokenizer that tokenizers"),
        ("no unknown", TokenizerError, "unknown token '<oov>' is not in its vocabulary"),
        ("no unknown piece", TokenizerError, "`unk_id` is missing"),
        ("config no JSON", TokenizerError, r"tokenizer_config.json: is not JSON: .* at line 2"),
        ("config no object", TokenizerError, "holds a JSON list, not an object"),
    ],
)
def test_broken_files_are_refused_by_name(tmp_path, name, kind, says):
    path = _broken(tmp_path, name)
    with pytest.raises(kind, match=says) as caught:
        Tokenizer.load(path)
    assert str(path) in str(caught.value)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"unk_token": "<unk>"}, "vocab.txt: .* 5 tokens lacks special tokens: <unk>\n"),
        ({"mask_token": {"content": "<mask>"}}, "vocab.txt: .* lacks special tokens: <mask>\n"),
        ({"do_lower_case": "true"}, "tokenizer_config.json: 'do_lower_case' is 'true'"),
        ({"tokenize_chinese_chars": 1}, "tokenizer_config.json: 'tokenize_chinese_chars' is 1"),
    ],
)
def test_settings_that_do_not_go_with_the_vocabulary(tmp_path, config, says):
    with pytest.raises(TokenizerError, match=says) as caught:
        Tokenizer.load(write_vocabulary(tmp_path, BERT_NAMES, **config, bos_token="<s>"))
    assert caught.value.fix


def test_a_folder_that_cannot_be_written(tmp_path, pairs):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot be written"):
        pairs[0][0].save(tmp_path / "file")


@pytest.mark.parametrize("family", ["bert", "bytes"])
def test_half_a_surrogate_pair_is_no_text(tmp_path, pairs, family):
    backend = roberta_backend()
    backend.normalizer = normalizers.NFC()  # texts are not divided into pieces first
    ours = pairs[0][0] if family == "bert" else load(backend, tmp_path)
    for encode in (ours.encode, ours.encode_flat, ours.encode_with_offsets):
        with pytest.raises(DataError, match=r"text 1 holds U\+D800 at character 2"):
            encode(["fine", "no\ud800 ", "fine"])


def test_what_is_no_text_is_told():
    assert _flaw(1.5) == "is of type float, not str"
    assert _flaw("text") is None


@pytest.mark.parametrize("id", [-1, 10**6])
def test_an_id_that_no_token_has(pairs, id):
    with pytest.raises(
        TokenizerError, match=rf"no token has id {id}; ids run from 0 to {len(TOKENS) - 1}"
    ):
        pairs[0][0].token(id)
    with pytest.raises(BothwaysError, match=f"no token has id {id}"):
        pairs[0][0].decode([2, id])


def test_an_added_token_beyond_the_vocabulary_counts(tmp_path):
    backend = Tokenizer.load(write_vocabulary(tmp_path / "in")).backend
    backend.add_special_tokens([AddedToken("<e1>", normalized=False, special=True)])
    ours = load(backend, tmp_path / "file")
    assert ours.size == len(TOKENS) + 1
    assert ours.special[-1]
    assert ours.encode(["a <e1>b"])[0].tolist() == [ours.id("a"), ours.size - 1, ours.id("b")]


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
    tokenizer = train_vocabulary(text, kind)
    words = _words(tokenizer, text[0])
    for word in ("the", "dog", "house", "cat", ",", "."):
        assert word in words
    assert max(map(len, words)) <= 16
    chinese = words[words.index(next(w for w in words if "数" in w)) :]
    assert len(chinese) >= 2
    assert "".join(words) == text[0].replace(" ", "").replace("。", words[-1][-1])
