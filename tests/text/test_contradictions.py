"""Settings that contradict `tokenizer.json`: those of BERT and of bytes as transformers has them, those of pieces refused."""

import itertools
import json
import resource
from collections.abc import Callable
from typing import Any

import pytest
from test_family_tokenizers import albert, big_bird, deberta, deberta_v2, roberta, word_piece, xlm
from test_tokenizer_classes import edited, saved
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from bothways.core.errors import TokenizerError
from bothways.text.tokenizer import Tokenizer, byte_of
from toy_text import assert_same_tokens, odd_texts, save_and_open, write_vocabulary

WORDS = [
    dict(zip(("do_lower_case", "strip_accents", "tokenize_chinese_chars"), values, strict=True))
    for values in itertools.product((True, False), (True, False, None), (True, False))
]
BYTES = [
    {"add_prefix_space": prefix, "trim_offsets": trim}
    for prefix, trim in itertools.product((True, False), (True, False))
]
GENERIC = {"tokenizer_class": "PreTrainedTokenizerFast"}
Case = tuple[str, Callable[..., Any], dict[str, Any], dict[str, Any]]
CASES: list[Case] = [
    *(("bert", word_piece, {}, stated) for stated in WORDS),
    *(("bert", word_piece, {"do_lower_case": False, "strip_accents": True}, stated) for stated in WORDS[::3]),
    ("bert", word_piece, {}, {"do_lower_case": False, "tokenizer_class": "left out"}),
    ("electra", word_piece, {}, {"do_lower_case": False, "tokenizer_class": "ElectraTokenizerFast"}),
    ("bert", word_piece, {}, {"do_lower_case": False, **GENERIC}),
    *(("roberta", roberta, {}, stated) for stated in BYTES),
    *(("roberta", roberta, {"add_prefix_space": True, "trim_offsets": False}, stated) for stated in BYTES[::3]),
    ("roberta", roberta, {}, {"add_prefix_space": True, **GENERIC}),
    ("deberta", deberta, {}, {"add_prefix_space": True}),
]  # fmt: skip


TEXTS = ["Hello é wórld a中b [MASK]", "hello <mask> w", " w", *odd_texts(100)]


@pytest.mark.parametrize(("model", "build", "held", "stated"), CASES)
def test_ids_and_offsets_are_those_of_transformers(model, build, held, stated, tmp_path):
    folder = saved(tmp_path / "in", build(**held), model, **stated)
    ours = Tokenizer.load(folder)
    assert_same_tokens(ours, AutoTokenizer.from_pretrained(folder), TEXTS)
    save_and_open(ours, tmp_path / "out", TEXTS)


def test_added_tokens_are_looked_for_as_the_setting_normalises_them(tmp_path):
    tokenizer = word_piece()
    tokenizer.add_tokens(["Foo", "É"])
    folder = saved(tmp_path / "in", tokenizer, "bert", do_lower_case=False, strip_accents=False)
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    assert_same_tokens(ours, theirs, ["Foo foo", "É É e E", "fooFoo"])
    assert ours.encode("Foo").tolist() == [ours.id("Foo")]


def test_added_tokens_that_are_one_text_are_refused(tmp_path):
    """Which of them transformers finds is another one in each process."""
    tokenizer = word_piece()
    tokenizer.add_tokens(["Foo", "foo"])
    with pytest.raises(TokenizerError, match=r"'Foo' and 'foo', which its normaliser makes one"):
        Tokenizer.load(saved(tmp_path / "uncased", tokenizer, "bert"))
    cased = saved(tmp_path / "cased", tokenizer, "bert", do_lower_case=False, strip_accents=False)
    assert Tokenizer.load(cased).encode("Foo foo").tolist() == tokenizer.convert_tokens_to_ids(
        ["Foo", "foo"]
    )


def test_an_unknown_token_that_the_file_does_not_use_is_refused(tmp_path):
    folder = saved(tmp_path, word_piece(), "bert", unk_token="[MASK]")
    with pytest.raises(TokenizerError, match=r"unknown token '\[UNK\]'; BertTokenizer"):
        Tokenizer.load(folder)


PIECES: list[tuple[str, Callable[..., Any], str]] = [
    ("albert", albert, "do_lower_case"),
    ("albert", albert, "keep_accents"),
    ("albert", albert, "add_prefix_space"),
    ("big_bird", big_bird, "add_prefix_space"),
    ("xlm-roberta", xlm, "add_prefix_space"),
    ("deberta-v2", deberta_v2, "do_lower_case"),
    ("deberta-v2", deberta_v2, "split_by_punct"),
    ("deberta-v2", deberta_v2, "add_prefix_space"),
]


DEFAULTS = {("albert", "do_lower_case"): True}


@pytest.mark.parametrize(("model", "build", "key"), PIECES)
@pytest.mark.parametrize("held", [True, False])
def test_settings_of_pieces_must_not_contradict(tmp_path, model, build, key, held):
    """With the setting of `tokenizer.json`, perhaps by default, and for the generic class, the folder opens."""
    made, default = build(**{key: held}), DEFAULTS.get((model, key), key == "add_prefix_space")
    Tokenizer.load(saved(tmp_path / "same", made, model, **{key: held}))
    for number, missing in enumerate((None, "left out")):
        folder = saved(tmp_path / str(number), made, model, **{key: missing})
        if held == default:
            Tokenizer.load(folder)
        else:
            with pytest.raises(TokenizerError, match=f"'{key}' is not set, which means "):
                Tokenizer.load(folder)
    Tokenizer.load(saved(tmp_path / "generic", made, model, **{key: not held}, **GENERIC))
    said, has = json.dumps(not held), json.dumps(held)
    message = f"'{key}' is {said}, but {has} in tokenizer.json\n"
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.load(saved(tmp_path / "other", made, model, **{key: not held}))
    assert f"{tmp_path / 'other' / 'tokenizer_config.json'}: " in str(caught.value)
    assert f"Set it to {has}" in str(caught.value)


def test_a_setting_that_a_class_does_not_read_contradicts_nothing(tmp_path):
    folder = saved(tmp_path, xlm(), "xlm-roberta", do_lower_case=True)
    assert_same_tokens(Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder), ["Hello"])


@pytest.mark.parametrize(
    ("model", "build", "key"),
    [("bert", word_piece, "do_lower_case"), ("roberta", roberta, "add_prefix_space")],
)
def test_a_missing_setting_whose_default_contradicts_the_file_is_refused(
    tmp_path, model, build, key
):
    """transformers follows the default in silence."""
    made = build(**{key: key == "add_prefix_space"})
    with pytest.raises(TokenizerError, match=f"'{key}' is not set, which means") as caught:
        Tokenizer.load(saved(tmp_path, made, model, **{key: "left out"}))
    assert caught.value.where == tmp_path / "tokenizer_config.json"


DOUBLE = {"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}
TEMPLATE = {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}
A, B = ({"Sequence": {"id": id, "type_id": type}} for type, id in enumerate("AB"))


def beyond(id: int) -> dict[str, Any]:
    """Return a template with an id that no token has."""
    tokens = {"[X]": {"id": "[X]", "ids": [id], "tokens": ["[X]"]}}
    single = [{"SpecialToken": {"id": "[X]", "type_id": 0}}, A]
    return {**TEMPLATE, "single": single, "pair": [A, B], "special_tokens": tokens}


@pytest.mark.parametrize(("parts", "message"), [
    ({"model": {"vocab": {}}}, "unknown token"),
    (
        {"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 34}},
        "its normaliser makes up to 17,179,869,184 characters of one",
    ),
    ({"post_processor": TEMPLATE}, "its post-processor"),
    ({"post_processor": beyond(10**6)}, "adds the id 1000000, which no token has"),
    ({"post_processor": beyond(4 * 10**9)}, "its post-processor"),
    # The tokenizer's own text has a place for every id up to the largest, 16 GB for these.
    ({"model": {"vocab": {"[UNK]": 1, "far": 4 * 10**9}}}, "has ids up to 4,000,000,000"),
])  # fmt: skip
def test_a_hostile_tokenizer_is_refused_without_much_memory(tmp_path, parts, message):
    folder = edited(tmp_path, word_piece(), "bert", **parts)
    (folder / "tokenizer_config.json").write_text(json.dumps(GENERIC))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.load(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10**6  # kilobytes


@pytest.mark.parametrize("content", [
    b"[" * 10**5,
    b'{"model_max_length": ' + b"9" * 5000 + b"}",
    b'{"mask_token": "\\ud800"}',
    b'{"added_tokens_decoder": {"3": {"content": "\\udc00"}}}',
    b'{"added_tokens_decoder": {"%s": {"content": "a"}}}' % (b"3" * 5000),
    b'{"extra_special_tokens": ["\\ud800x"]}',
])  # fmt: skip
def test_hostile_settings_are_refused(tmp_path, content):
    Tokenizer.load(write_vocabulary(tmp_path / "a")).save(tmp_path / "b")
    (tmp_path / "b" / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        Tokenizer.load(tmp_path / "b")


def test_bytes_stand_for_themselves_or_come_in_order():
    assert set(byte_of()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert bytes(byte_of()[c] for c in "æķ°Ġ") == "数 ".encode()
