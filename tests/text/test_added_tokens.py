"""Tokens that stand outside `tokenizer.json`: ids, offsets and saved folders against transformers, in every layout; errors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st
from test_family_tokenizers import ALBERT, MASK, albert_of, message, rounded, write_bytes_layout
from tokenizers import AddedToken
from transformers import AutoTokenizer, BertTokenizer

from bothways.core.errors import TokenizerError
from bothways.hub.resolve import MODEL_FILES
from bothways.text.tokenizer import Tokenizer
from bothways.text.word_cache import find_cutter
from kernel_cases import examples
from toy_text import BERT_NAMES, bert_tokens, hostile, roberta_backend, write_vocabulary

NEW = len(bert_tokens())
WORDS = len(roberta_backend().get_vocab())


def numbered(first: int, **flags: bool) -> dict[str, Any]:
    """An `added_tokens_decoder` with a special token and a word, the word first in the table but not in ids."""
    plain = dict.fromkeys(("lstrip", "rstrip", "single_word"), False)
    word = {"content": "Foo", "normalized": True, "special": False, **plain, **flags}
    return {
        str(first + 1): word,
        str(first): {"content": "[X1]", "normalized": False, "special": True, **plain},
    }


EXTRA: dict[str, dict[str, Any]] = {
    "older": {"added_tokens.json": {"Foo": 1, "[X1]": 0}},
    "older, special": {
        "added_tokens.json": {"[X1]": 0, "Foo": 1},
        "tokenizer_config.json": {"extra_special_tokens": ["[X1]"]},
    },
    "map": {"special_tokens_map.json": {"additional_special_tokens": ["[X1]", "Foo"]}},
    "list": {"tokenizer_config.json": {"additional_special_tokens": ["[X1]", "Foo"]}},
    "list of version 5": {"tokenizer_config.json": {"extra_special_tokens": ["[X1]", "Foo"]}},
    "table": {
        "tokenizer_config.json": {"extra_special_tokens": {"one_token": "[X1]", "two_token": "Foo"}}
    },
    "uses": {
        "tokenizer_config.json": {
            "eos_token": "Foo",
            "bos_token": "[X1]",
            "extra_special_tokens": ["[MASK]", "[X2]"],
        }
    },
    "numbered": {"tokenizer_config.json": {"added_tokens_decoder": numbered(0)}},
    "numbered, left": {
        "tokenizer_config.json": {
            "added_tokens_decoder": numbered(0, lstrip=True, normalized=False)
        }
    },
    "numbered, right": {
        "tokenizer_config.json": {"added_tokens_decoder": numbered(0, rstrip=True)}
    },
    "numbered, words": {
        "tokenizer_config.json": {"added_tokens_decoder": numbered(0, single_word=True)}
    },
    "numbered, and older": {
        "added_tokens.json": {"[X1]": 7},
        "tokenizer_config.json": {
            "added_tokens_decoder": numbered(0),
            "extra_special_tokens": ["[X2]"],
        },
    },
}
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


def plain(folder: Path) -> int:
    write_vocabulary(folder, tokenizer_class="BertTokenizer", do_lower_case=True)
    return NEW


def cased(folder: Path) -> int:
    write_vocabulary(folder, tokenizer_class="BertTokenizer", do_lower_case=False)
    return NEW


def beside_json(folder: Path) -> int:
    BertTokenizer(vocab={token: id for id, token in enumerate(bert_tokens())}).save_pretrained(
        folder
    )
    return NEW


def generic(folder: Path) -> int:
    beside_json(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**config, "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return NEW


def of_bytes(folder: Path) -> int:
    folder.mkdir()
    write_bytes_layout(folder)
    mask = {"__type": "AddedToken", **MASK}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "RobertaTokenizer", "mask_token": mask})
    )
    return WORDS


LAYOUTS: dict[str, Callable[[Path], int]] = {
    layout.__name__: layout for layout in (plain, cased, beside_json, generic, of_bytes)
}
TEXTS = [
    "a [X1] Foo b",
    "[X1]Foo [X1]",
    " foo  [x1] [X1]\n\tFoo.Foo xFoo",
    "hello [X1] [MASK]Foo[X2] é",
    "",
    "FOO <mask> <s>",
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[tuple[Tokenizer, Any, Any]]:
    """Ours, transformers' from the same folder, and transformers' from what ours writes."""
    made = []
    for layout in LAYOUTS.values():
        for number, files in enumerate(EXTRA.values()):
            home = tmp_path_factory.mktemp(f"{layout.__name__}{number}")
            write_beside(home / "in", layout(home / "in"), files)
            model = "roberta" if layout is of_bytes else "bert"
            (home / "in" / "config.json").write_text(json.dumps({"model_type": model}))
            ours = Tokenizer.load(home / "in")
            ours.save(home / "out")
            made.append(
                (
                    ours,
                    AutoTokenizer.from_pretrained(home / "in"),
                    AutoTokenizer.from_pretrained(home / "out"),
                )
            )
    return made


mixed = st.lists(
    st.one_of(hostile, st.sampled_from(["[X1]", "Foo", "foo", " Foo ", "[X2]", "Foo[X1]", "<s>"]))
).map("".join)


@given(texts=st.lists(mixed, min_size=1, max_size=3))
@example(texts=TEXTS)
@settings(max_examples=examples(20))
def test_ids_and_offsets_are_those_of_transformers_both_ways(folders, texts):
    for ours, theirs, again in folders:
        expected = theirs(texts, add_special_tokens=False, return_offsets_mapping=True)
        assert [ids.tolist() for ids in ours.encode(texts)] == expected["input_ids"]
        offsets = [
            list(map(tuple, row.offsets.tolist())) for row in ours.encode_with_offsets(texts)
        ]
        assert offsets == expected["offset_mapping"]
        assert again(texts, add_special_tokens=False)["input_ids"] == expected["input_ids"]


def test_each_token_has_its_id_and_is_special_as_in_transformers(folders):
    for ours, theirs, again in folders:
        assert ours.size == len(theirs) == len(again)
        assert ours.backend.get_vocab() == theirs.get_vocab()
        wanted = {token.content for token in theirs.added_tokens_decoder.values() if token.special}
        unknown = ours.token(ours.specials.unknown)
        assert {ours.token(id) for id in ours.special.nonzero()[0]} == wanted - {unknown}


def test_a_folder_that_is_written_is_the_same_tokenizer(folders, tmp_path):
    for number, (ours, *_) in enumerate(folders):
        ours.save(tmp_path / str(number))
        assert Tokenizer.load(tmp_path / str(number)).fingerprint == ours.fingerprint


def test_words_are_looked_up_only_where_no_added_token_is_split(folders):
    """Both ways stand in the comparison with transformers."""
    ways = {find_cutter(json.loads(ours.backend.to_str())) is None for ours, *_ in folders}
    assert ways == {True, False}


def test_an_added_token_is_known_by_a_model_of_pieces(tmp_path):
    """[MASK] is stated there as well, with the white space before it, as version 4 wrote it, or without."""
    for strips in (True, False):
        folder = tmp_path / str(strips)
        folder.mkdir()
        (folder / "spiece.model").write_bytes(message(ALBERT))
        mask = {"content": "[MASK]", "lstrip": strips, "normalized": False, "special": True}
        table = {"4": mask, **numbered(len(ALBERT))}
        (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": table}))
        theirs = albert_of(rounded(ALBERT))
        theirs.add_tokens([AddedToken("[X1]", special=True), AddedToken("Foo")])
        theirs.add_tokens([AddedToken("[MASK]", lstrip=strips, special=True)])
        texts = ["the [X1] foo [MASK]he Foo", "hello[X1]"]
        expected = theirs(texts, add_special_tokens=False, return_offsets_mapping=True)
        rows = Tokenizer.load(folder).encode_with_offsets(texts)
        assert [row.ids.tolist() for row in rows] == expected["input_ids"]
        assert [list(map(tuple, row.offsets.tolist())) for row in rows] == expected[
            "offset_mapping"
        ]


def test_a_mask_that_is_added_makes_a_vocabulary_whole(tmp_path):
    folder = write_vocabulary(
        tmp_path / "in", [*BERT_NAMES[:4], "a", "b"], tokenizer_class="BertTokenizer"
    )
    (folder / "added_tokens.json").write_text('{"[MASK]": 6}')
    (folder / "config.json").write_text('{"model_type": "bert"}')
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.specials.mask == theirs.mask_token_id == 6
    assert (
        ours.encode(["a [MASK] b"])[0].tolist()
        == theirs("a [MASK] b", add_special_tokens=False)["input_ids"]
    )


def test_the_flags_of_tokenizer_json_count_over_an_older_file(tmp_path):
    made = BertTokenizer(vocab={token: id for id, token in enumerate(bert_tokens())})
    made.add_tokens([AddedToken("Foo", single_word=True)])
    made.save_pretrained(tmp_path)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"Foo": NEW}))
    texts = ["a Foo xFoo", "foo"]
    theirs = AutoTokenizer.from_pretrained(tmp_path)(texts, add_special_tokens=False)["input_ids"]
    assert [ids.tolist() for ids in Tokenizer.load(tmp_path).encode(texts)] == theirs


@pytest.mark.parametrize("listed", [False, True])
def test_special_tokens_map_contradicts_the_settings_as_in_transformers(listed, tmp_path):
    """The map counts, unless the settings list tokens by id."""
    folder = write_vocabulary(tmp_path)
    settings: dict[str, Any] = {"tokenizer_class": "BertTokenizer", "cls_token": "[CLS]"}
    if listed:
        settings["added_tokens_decoder"] = numbered(NEW)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text('{"cls_token": "hello"}')
    reference = AutoTokenizer.from_pretrained(folder)
    assert reference.cls_token == ("[CLS]" if listed else "hello")
    model = Tokenizer.load(folder)
    assert model.specials.cls == reference.cls_token_id


def test_the_hub_is_asked_for_them():
    assert {"added_tokens.json", "special_tokens_map.json", "tokenizer_config.json"} <= set(
        MODEL_FILES
    )


@pytest.mark.parametrize(("file", "content"), [
    ("added_tokens.json", {"foo": 9}),  # a gap before the id
    ("added_tokens.json", {"a": 6}),  # the token has another id
    ("added_tokens.json", {"foo": "6"}),
    ("tokenizer_config.json", {"added_tokens_decoder": {"8": {"content": "foo"}}}),
    ("tokenizer_config.json", {"added_tokens_decoder": ["foo"]}),
    ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "foo"}}}),
    ("tokenizer_config.json", {"added_tokens_decoder": {"6": {"content": "foo", "lstrip": "no"}}}),
    ("special_tokens_map.json", {"additional_special_tokens": [6]}),
    ("tokenizer_config.json", {"extra_special_tokens": 6}),
])  # fmt: skip
def test_invalid_added_token_is_refused(tmp_path, file, content):
    folder = write_vocabulary(tmp_path, [*BERT_NAMES, "a"])
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.load(folder)
    assert str(folder) in str(caught.value.where)
    assert caught.value.fix
