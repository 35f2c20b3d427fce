"""DeBERTa's tokenizers against transformers' classes, folders both ways; older layouts as the authors' code reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from test_family_tokenizers import MAP, PIECES, message, rounded
from tokenizers import models
from transformers import AutoTokenizer, DebertaTokenizer, DebertaV2Tokenizer

from bothways.text.template import assemble
from bothways.text.tokenizer import Tokenizer
from toy_text import hostile, roberta_backend

NAMES = {"<s>": "[CLS]", "<pad>": "[PAD]", "</s>": "[SEP]", "<unk>": "[UNK]", "<mask>": "[MASK]"}
SPECIALS = [("[PAD]", 0.0), ("[CLS]", 0.0), ("[SEP]", 0.0), ("[UNK]", 0.0)]
UNIGRAM = [*SPECIALS, *PIECES, ("[MASK]", 0.0)]


def byte_parts() -> tuple[dict[str, int], list[tuple[str, str]]]:
    spec = json.loads(roberta_backend().to_str())["model"]
    vocab = {NAMES.get(token, token): id for token, id in spec["vocab"].items()}
    return vocab, [(first, second) for first, second in spec["merges"]]


def of_bytes(**named: Any) -> DebertaTokenizer:
    vocab, merges = byte_parts()
    return DebertaTokenizer(vocab=vocab, merges=merges, **named)


def of_pieces(**named: Any) -> DebertaV2Tokenizer:
    return DebertaV2Tokenizer(vocab=UNIGRAM, **named)


CASES: dict[str, Callable[[], Any]] = {
    "bytes": of_bytes,
    "bytes with a space": lambda: of_bytes(add_prefix_space=True),
    "pieces": of_pieces,
    "pieces in lower case, marks apart": lambda: of_pieces(do_lower_case=True, split_by_punct=True),
    "pieces as they stand": lambda: of_pieces(add_prefix_space=False),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, Tokenizer, Any]]:
    """For each case transformers' tokenizer from its own folder, ours from there, and transformers' from what we write."""
    made = []
    for number, build in enumerate(CASES.values()):
        home = tmp_path_factory.mktemp(str(number))
        build().save_pretrained(home / "theirs")
        ours = Tokenizer.load(home / "theirs")
        ours.save(home / "ours", segments=False)
        theirs, again = (
            AutoTokenizer.from_pretrained(home / folder) for folder in ("theirs", "ours")
        )
        made.append((theirs, ours, again))
    return made


@given(texts=st.lists(hostile, min_size=1, max_size=3))
@example(
    texts=[
        "hello [MASK] the",
        "9,9,  [MASK]é [SEP]",
        " \t%&",
        "",
        "a  b\n\n[CLS] [PAD] ",
        "中文 אב 😀",
        "ﬁ e\u0301",
    ]
)
def test_ids_and_offsets_are_those_of_transformers_both_ways(
    folders: list[tuple[Any, Tokenizer, Any]], texts: list[str]
) -> None:
    for theirs, ours, again in folders:
        expected = theirs(texts, add_special_tokens=False, return_offsets_mapping=True)
        assert [ids.tolist() for ids in ours.encode(texts)] == expected["input_ids"]
        assert [
            list(map(tuple, row.offsets.tolist())) for row in ours.encode_with_offsets(texts)
        ] == expected["offset_mapping"]
        found = again(texts, add_special_tokens=False, return_offsets_mapping=True)
        assert (found["input_ids"], found["offset_mapping"]) == (
            expected["input_ids"],
            expected["offset_mapping"],
        )


@pytest.mark.parametrize("number", range(len(CASES)), ids=list(CASES))
def test_what_is_written_is_the_same_tokenizer(
    folders: list[tuple[Any, Tokenizer, Any]], number: int
) -> None:
    theirs, ours, again = folders[number]
    assert len(again) == len(theirs) == ours.size
    for use in ("pad", "cls", "sep", "unk", "mask"):
        assert getattr(again, f"{use}_token_id") == getattr(theirs, f"{use}_token_id")
    first, second = ours.encode(["hello the", "9, play"])
    wanted = theirs("hello the", "9, play")
    mine = assemble(first, second, ours.template)
    assert mine.ids.tolist() == wanted["input_ids"] == again("hello the", "9, play")["input_ids"]
    assert mine.segments.tolist() == wanted["token_type_ids"]


def write_bytes(folder: Path) -> Path:
    folder.mkdir()
    models.BPE(*byte_parts()).save(str(folder))
    return folder


def write_pieces(
    folder: Path, pieces: list[tuple[str, float]], charsmap: bytes = b"", **named: Any
) -> Path:
    folder.mkdir()
    (folder / "spm.model").write_bytes(message(pieces, charsmap=charsmap))
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


def test_the_first_versions_older_layout(tmp_path: Path) -> None:
    """As first published: the mask takes the white space before it, and two texts have one [SEP] between them."""
    ours, theirs = Tokenizer.load(write_bytes(tmp_path / "old")), of_bytes()
    texts = ["hello[MASK] world", "é中\n", "hello's"]
    assert [ids.tolist() for ids in ours.encode(texts)] == theirs(texts, add_special_tokens=False)[
        "input_ids"
    ]
    assert ours.encode(["hello  [MASK] world"])[0].tolist() == ours.encode(texts[:1])[0].tolist()
    vocab, _ = byte_parts()
    first, second = (row.tolist() for row in ours.encode(["hello", "in"]))
    cls, sep = vocab["[CLS]"], vocab["[SEP]"]
    ours.save(tmp_path / "new")
    again = AutoTokenizer.from_pretrained(tmp_path / "new")
    row = again("hello", "in")
    assert row["input_ids"] == [cls, *first, sep, *second, sep]
    assert row["token_type_ids"] == [0] * (len(first) + 2) + [1] * (len(second) + 1)
    assert Tokenizer.load(tmp_path / "new").fingerprint == ours.fingerprint


@given(text=hostile)
def test_later_versions_older_layout_without_a_normalisation(
    plain: tuple[Tokenizer, Any], text: str
) -> None:
    """As transformers' class has it, from the same pieces; the mask is added where the file lacks it."""
    ours, theirs = plain
    assert ours.encode([text])[0].tolist() == theirs(text, add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    folder = tmp_path_factory.mktemp("pieces")
    ours = Tokenizer.load(
        write_pieces(folder / "old", UNIGRAM[:-1], do_lower_case=True, split_by_punct=True)
    )
    return ours, DebertaV2Tokenizer(vocab=rounded(UNIGRAM), do_lower_case=True, split_by_punct=True)


def test_later_versions_older_layout_normalises_as_the_file_says(tmp_path: Path) -> None:
    """White space at the ends and in between falls away, as SentencePiece has it by default; transformers 5 keeps the first."""
    ours = Tokenizer.load(write_pieces(tmp_path / "old", UNIGRAM, charsmap=MAP))
    assert ours.specials.mask == len(UNIGRAM) - 1
    spelled = [
        [ours.token(id) for id in ids]
        for ids in ours.encode(["  hello   &\tthe ", "hello and the"])
    ]
    assert spelled[0] == spelled[1] == ["▁hello", "▁", "and", "▁the"]
    ours.save(tmp_path / "new")
    again = AutoTokenizer.from_pretrained(tmp_path / "new")
    assert (
        again("  hello   &\tthe ", add_special_tokens=False)["input_ids"]
        == ours.encode(["  hello   &\tthe "])[0].tolist()
    )
    assert again("hello", "the")["token_type_ids"] == [0, 0, 0, 1, 1]
