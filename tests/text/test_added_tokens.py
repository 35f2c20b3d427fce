"""Tokens that stand outside `tokenizer.json`: ids, offsets and saved folders against transformers, in every layout; errors."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_family_tokenizers as family
from tokenizers import AddedToken
from transformers import AutoTokenizer

import toy_text
from bothways.core.errors import TokenizerError
from bothways.hub.resolve import MODEL_FILES
from bothways.text.tokenizer import Tokenizer
from bothways.text.tokenizer_classes import CONFIG, GENERIC


def numbered(first: int, **flags: bool) -> dict[str, Any]:
    """An `added_tokens_decoder` with a special token and a word, the word first in the table but not in ids."""
    plain = dict.fromkeys(("lstrip", "rstrip", "single_word"), False)
    word = {"content": "Foo", "normalized": True, "special": False, **plain, **flags}
    return {
        str(first + 1): word,
        str(first): {"content": "[X1]", "normalized": False, "special": True, **plain},
    }


EXTRA: list[dict[str, dict[str, Any]]] = [
    {"added_tokens.json": {"Foo": 1, "[X1]": 0}},
    {"added_tokens.json": {"[X1]": 0, "Foo": 1}, CONFIG: {"extra_special_tokens": ["[X1]"]}},
    {"special_tokens_map.json": {"additional_special_tokens": ["[X1]", "Foo"]}},
    {CONFIG: {"additional_special_tokens": ["[X1]", "Foo"]}},
    {CONFIG: {"extra_special_tokens": ["[X1]", "Foo"]}},  # of version 5
    {CONFIG: {"extra_special_tokens": {"one_token": "[X1]", "two_token": "Foo"}}},
    {CONFIG: {"eos_token": "Foo", "bos_token": "[X1]", "extra_special_tokens": ["[MASK]", "[X2]"]}},
    {CONFIG: {"added_tokens_decoder": numbered(0)}},
    {CONFIG: {"added_tokens_decoder": numbered(0, lstrip=True, normalized=False)}},
    {CONFIG: {"added_tokens_decoder": numbered(0, rstrip=True)}},
    {CONFIG: {"added_tokens_decoder": numbered(0, single_word=True)}},
    {
        "added_tokens.json": {"[X1]": 7},
        CONFIG: {"added_tokens_decoder": numbered(0), "extra_special_tokens": ["[X2]"]},
    },
]
"""Files beside a vocabulary; ids count from its end."""


def write_beside(folder: Path, first: int, files: dict[str, dict[str, Any]]) -> None:
    """Files of `EXTRA` beside a vocabulary with so many tokens, over what those files hold."""
    for name, content in files.items():
        more = dict(content)
        if name == "added_tokens.json":
            more = {token: first + id for token, id in content.items()}
        if "added_tokens_decoder" in more:
            more["added_tokens_decoder"] = {
                str(first + int(id)): token for id, token in more["added_tokens_decoder"].items()
            }
        held = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps({**held, **more}))


def plain(folder: Path) -> None:
    toy_text.write_vocabulary(folder, tokenizer_class="BertTokenizer", do_lower_case=True)


def cased(folder: Path) -> None:
    toy_text.write_vocabulary(folder, tokenizer_class="BertTokenizer", do_lower_case=False)


def beside_json(folder: Path) -> None:
    family.word_piece().save_pretrained(folder)


def generic(folder: Path) -> None:
    beside_json(folder)
    write_beside(folder, 0, {CONFIG: {"tokenizer_class": GENERIC[0]}})


def of_bytes(folder: Path) -> None:
    family.write_bytes_layout(folder)
    config = {
        "tokenizer_class": "RobertaTokenizer",
        "mask_token": {"__type": "AddedToken", **family.MASK},
    }
    (folder / CONFIG).write_text(json.dumps(config))


LAYOUTS: dict[Callable[[Path], None], int] = {
    **dict.fromkeys((plain, cased, beside_json, generic), len(toy_text.bert_tokens())),
    of_bytes: len(toy_text.roberta_backend().get_vocab()),
}
"""The layouts of a folder, and the tokens of each."""
TOKENS = itertools.cycle(["[X1]", "Foo", "foo", " Foo ", "[X2]", "Foo[X1]", "<s>"])
TEXTS = [
    "a [X1] Foo b", "[X1]Foo [X1]", " foo  [x1] [X1]\n\tFoo.Foo xFoo", "hello [X1] [MASK]Foo[X2] é",
    "FOO <mask> <s>", *(text + next(TOKENS) + text for text in toy_text.odd_texts(60)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "files"),
    [
        (layout, files)
        for layout in LAYOUTS
        for files in (EXTRA[::3] if layout in (cased, generic) else EXTRA)
    ],
)
def test_tokens_and_ids_are_those_of_transformers_both_ways(layout, files, tmp_path):
    layout(tmp_path / "in")
    write_beside(tmp_path / "in", LAYOUTS[layout], files)
    model = "roberta" if layout is of_bytes else "bert"
    (tmp_path / "in" / "config.json").write_text(json.dumps({"model_type": model}))
    ours, theirs = Tokenizer.load(tmp_path / "in"), AutoTokenizer.from_pretrained(tmp_path / "in")
    toy_text.assert_same_tokens(ours, theirs, TEXTS)
    again = toy_text.save_and_open(ours, tmp_path / "out", TEXTS)
    assert ours.size == len(theirs) == len(again)
    assert ours.backend.get_vocab() == theirs.get_vocab()
    special = {token.content for token in theirs.added_tokens_decoder.values() if token.special}
    unknown = ours.token(ours.specials.unknown)
    assert {ours.token(id) for id in ours.special.nonzero()[0]} == special - {unknown}


def test_an_added_token_is_known_by_a_model_of_pieces(tmp_path):
    """[MASK] is stated there as well, with the white space before it, as version 4 wrote it, or without."""
    for strips in (True, False):
        folder = tmp_path / str(strips)
        folder.mkdir()
        (folder / "spiece.model").write_bytes(family.message(family.ALBERT))
        mask = {"content": "[MASK]", "lstrip": strips, "normalized": False, "special": True}
        table = {"4": mask, **numbered(len(family.ALBERT))}
        (folder / CONFIG).write_text(json.dumps({"added_tokens_decoder": table}))
        theirs = family.albert_of(family.rounded(family.ALBERT))
        theirs.add_tokens([AddedToken("[X1]", special=True), AddedToken("Foo")])
        theirs.add_tokens([AddedToken("[MASK]", lstrip=strips, special=True)])
        texts = ["the [X1] foo [MASK]he Foo", "hello[X1]"]
        toy_text.assert_same_tokens(Tokenizer.load(folder), theirs, texts)


def test_a_token_with_the_id_of_another_one_is_named_as_in_transformers(tmp_path):
    """After a repeated line the ids of added tokens begin too early."""
    tokens = [*toy_text.BERT_NAMES, "the", "the", "dog"]
    settings = {"tokenizer_class": "BertTokenizer", "extra_special_tokens": ["[X1]"]}
    folder = toy_text.write_vocabulary(tmp_path, tokens, **settings)
    reference = AutoTokenizer.from_pretrained(folder)
    assert reference.convert_tokens_to_ids(["[X1]", "dog"]) == [7, 7]
    loaded = {Tokenizer.load(folder).token(7) for _ in range(20)}
    assert loaded == {reference.convert_ids_to_tokens(7)}


def test_a_mask_that_is_added_makes_a_vocabulary_whole(tmp_path):
    folder = toy_text.write_vocabulary(
        tmp_path / "in", [*toy_text.BERT_NAMES[:4], "a", "b"], tokenizer_class="BertTokenizer"
    )
    (folder / "added_tokens.json").write_text('{"[MASK]": 6}')
    (folder / "config.json").write_text('{"model_type": "bert"}')
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.specials.mask == theirs.mask_token_id == 6
    toy_text.assert_same_tokens(ours, theirs, ["a [MASK] b"])


def test_the_flags_of_tokenizer_json_count_over_an_older_file(tmp_path):
    made = family.word_piece()
    made.add_tokens([AddedToken("Foo", single_word=True)])
    made.save_pretrained(tmp_path)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"Foo": len(toy_text.bert_tokens())}))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    toy_text.assert_same_tokens(Tokenizer.load(tmp_path), theirs, ["a Foo xFoo", "foo"])


@pytest.mark.parametrize("listed", [False, True])
def test_special_tokens_map_contradicts_the_settings_as_in_transformers(listed, tmp_path):
    """The map counts, unless the settings list tokens by id."""
    folder = toy_text.write_vocabulary(tmp_path)
    settings: dict[str, Any] = {"tokenizer_class": "BertTokenizer", "cls_token": "[CLS]"}
    if listed:
        settings["added_tokens_decoder"] = numbered(len(toy_text.bert_tokens()))
    (folder / CONFIG).write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text('{"cls_token": "hello"}')
    reference = AutoTokenizer.from_pretrained(folder)
    assert reference.cls_token == ("[CLS]" if listed else "hello")
    assert Tokenizer.load(folder).specials.cls == reference.cls_token_id


def test_the_hub_is_asked_for_them():
    assert {"added_tokens.json", "special_tokens_map.json", CONFIG} <= set(MODEL_FILES)


@pytest.mark.parametrize(("file", "content"), [
    ("added_tokens.json", {"foo": 9}),  # a gap before the id
    ("added_tokens.json", {"a": 6}),  # the token has another id
    ("added_tokens.json", {"foo": "6"}),
    (CONFIG, {"added_tokens_decoder": {"8": {"content": "foo"}}}),
    (CONFIG, {"added_tokens_decoder": ["foo"]}),
    (CONFIG, {"added_tokens_decoder": {"x": {"content": "foo"}}}),
    (CONFIG, {"added_tokens_decoder": {"6": {"content": "foo", "lstrip": "no"}}}),
    ("special_tokens_map.json", {"additional_special_tokens": [6]}),
    (CONFIG, {"extra_special_tokens": 6}),
])  # fmt: skip
def test_invalid_added_token_is_refused(tmp_path, file, content):
    folder = toy_text.write_vocabulary(tmp_path, [*toy_text.BERT_NAMES, "a"])
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.load(folder)
    assert str(folder) in str(caught.value.where)
    assert caught.value.fix
