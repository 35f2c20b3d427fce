"""The tokenizers of BERT's descendants against the classes of transformers: folders both ways, old layouts, every error."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from tokenizers import AddedToken, models, normalizers

import toy_text
from bothways.core.errors import TokenizerError
from bothways.text.tokenizer import Tokenizer
from protobuf_writer import field, varint


def charsmap(replacements: dict[str, str]) -> bytes:
    """A compiled normalisation of SentencePiece for single ASCII characters: a double-array trie, then the replacements."""
    units, texts = np.zeros(2048, dtype="<u4"), b""
    units[0] = 256 << 10
    for number, (character, text) in enumerate(replacements.items()):
        place, leaf = 256 ^ ord(character), 700 + number
        units[place] = ord(character) | 1 << 8 | (place ^ leaf) << 10
        units[leaf] = 1 << 31 | len(texts)
        texts += text.encode() + b"\0"
    return struct.pack("<I", units.nbytes) + units.tobytes() + texts


MAP = charsmap({"%": "percent", "&": "and", "\t": " ", "#": "no"})  # "#" is in `PROBES`
WORDS = ["▁", "▁the", "▁hello", "lo", "he", "ing", "▁play", "and", "9,"]
LETTERS = "abcdefghijklmnopqrstuvwxyzABCÉß0123456789.,!?'\"()中文é😀אבβ"
PIECES = [
    *((piece, -2.0 - number / 7) for number, piece in enumerate(WORDS)),
    *((letter, -6.0 - number / 50) for number, letter in enumerate(LETTERS)),
]
Pieces = list[tuple[str, float]]
ROBERTA_NAMES = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
DEBERTA_NAMES = dict(
    zip(ROBERTA_NAMES, ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"), strict=True)
)
DEBERTA_HEAD = [("[PAD]", 0.0), ("[CLS]", 0.0), ("[SEP]", 0.0), ("[UNK]", 0.0)]
DEBERTA = [*DEBERTA_HEAD, *PIECES, ("[MASK]", 0.0)]
ALBERT = [("<pad>", 0.0), ("<unk>", 0.0), ("[CLS]", 0.0), ("[SEP]", 0.0), ("[MASK]", 0.0), *PIECES]
BIG_BIRD = [
    (name, 0.0) for name in ("<pad>", "</s>", "<s>", "[CLS]", "[SEP]", "[MASK]", "<unk>")
] + PIECES
XLM = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *PIECES, ("<mask>", 0.0)]


def mask(name: str) -> AddedToken:
    return AddedToken(name, lstrip=True, special=True, normalized=False)


def roberta(**settings: Any) -> transformers.RobertaTokenizer:
    spec = json.loads(toy_text.roberta_backend().to_str())["model"]
    merges = [tuple(merge) for merge in spec["merges"]]
    return transformers.RobertaTokenizer(
        vocab=spec["vocab"], merges=merges, mask_token=mask("<mask>"), **settings
    )


def xlm(vocab: Pieces = XLM, **settings: Any) -> transformers.XLMRobertaTokenizer:
    return transformers.XLMRobertaTokenizer(vocab=vocab, mask_token=mask("<mask>"), **settings)


def albert(vocab: Pieces = ALBERT, **settings: Any) -> transformers.AlbertTokenizer:
    return transformers.AlbertTokenizer(vocab=vocab, mask_token=mask("[MASK]"), **settings)


def big_bird(vocab: Pieces = BIG_BIRD, **settings: Any) -> transformers.BigBirdTokenizer:
    return transformers.BigBirdTokenizer(vocab=vocab, mask_token=mask("[MASK]"), **settings)


def word_piece(**settings: Any) -> transformers.BertTokenizer:
    return transformers.BertTokenizer(
        vocab={token: id for id, token in enumerate(toy_text.bert_tokens())}, **settings
    )


def deberta_parts() -> tuple[dict[str, int], list[tuple[str, str]]]:
    spec = json.loads(toy_text.roberta_backend().to_str())["model"]
    vocab = {DEBERTA_NAMES.get(token, token): id for token, id in spec["vocab"].items()}
    return vocab, [(first, second) for first, second in spec["merges"]]


def deberta(**settings: Any) -> transformers.DebertaTokenizer:
    vocab, merges = deberta_parts()
    return transformers.DebertaTokenizer(vocab=vocab, merges=merges, **settings)


def deberta_v2(**settings: Any) -> transformers.DebertaV2Tokenizer:
    return transformers.DebertaV2Tokenizer(vocab=DEBERTA, **settings)


TEXTS = [
    *("hello <mask> the", "9,9, [MASK]é </s>", " \t%&", "", "``the''", "a  b\n\n<s> <pad>"),
    "中文 אב 😀",
    *toy_text.odd_texts(150),
]


def write_bytes_layout(folder: Path, **names: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    toy_text.roberta_backend().model.save(str(folder))
    (folder / "config.json").write_text('{"model_type": "roberta"}')
    if names:
        (folder / "special_tokens_map.json").write_text(json.dumps(names))
    return folder


MASK = dict.fromkeys(("rstrip", "normalized", "single_word"), False)
MASK |= {"content": "<mask>", "lstrip": True}


def old_layouts(home: Path) -> Iterator[tuple[Tokenizer, Any]]:
    """Ours from folders without `tokenizer.json`, and transformers' classes with the vocabulary in them."""
    heads = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    spaced = {"add_prefix_space": True, "trim_offsets": False}
    cased = {"do_lower_case": False, "keep_accents": True}
    apart = {"do_lower_case": True, "split_by_punct": True}  # the mask is added to its pieces
    files = [
        ("sentencepiece.bpe.model", message([*heads, *XLM[4:-1]], charsmap=MAP), {}),
        ("spiece.model", message(ALBERT, charsmap=MAP), {}),
        ("spiece.model", message(ALBERT), cased),
        ("spiece.model", message(BIG_BIRD), {}),
        ("spm.model", message(DEBERTA[:-1]), apart),
    ]
    peers = [
        xlm(rounded(XLM), _spm_precompiled_charsmap=MAP),
        albert_of(rounded(ALBERT), _spm_precompiled_charsmap=MAP),
        albert_of(rounded(ALBERT), **cased),
        big_bird(rounded(BIG_BIRD)),
        transformers.DebertaV2Tokenizer(vocab=rounded(DEBERTA), **apart),
    ]
    masked = write_bytes_layout(home / "bytes", mask_token=MASK)
    yield Tokenizer.load(masked), transformers.AutoTokenizer.from_pretrained(masked)
    folder = write_bytes_layout(home / "spaced")
    (folder / "tokenizer_config.json").write_text(json.dumps(spaced))
    yield Tokenizer.load(folder / "vocab.json"), roberta(**spaced)
    for number, ((name, content, settings), peer) in enumerate(zip(files, peers, strict=True)):
        folder = home / str(number)
        folder.mkdir()
        (folder / name).write_bytes(content)
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        yield Tokenizer.load(folder), peer


def rounded(pieces: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """As a file holds them, in 32 bits."""
    return [(piece, float(np.float32(score))) for piece, score in pieces]


def albert_of(pieces: list[tuple[str, float]], **settings: Any) -> transformers.AlbertTokenizer:
    """As the published `tokenizer.json` was made: a piece such as "9," is the last choice."""
    scored = [(piece, score - 100 if piece == "9," else score) for piece, score in pieces]
    return albert(scored, **settings)


def message(pieces: list[tuple[str, float]], *, kind: int = 1, charsmap: bytes = b"") -> bytes:
    """A SentencePiece model: pieces (text, score, type), the trainer's settings, the normaliser's, and fields to skip."""
    held = b"".join(
        field(1, field(1, text.encode()) + field(2, score) + field(3, 1)) for text, score in pieces
    )
    trainer = field(4, 300) + field(3, kind) + varint(99 << 3 | 1) + bytes(8)
    return (
        held
        + field(2, trainer)
        + field(3, field(1, b"nmt") + field(2, charsmap))
        + field(9, b"more")
    )


def test_old_layouts_give_the_ids_of_transformers_both_ways(tmp_path):
    for number, (ours, theirs) in enumerate(old_layouts(tmp_path)):
        toy_text.assert_same_tokens(ours, theirs, TEXTS)
        again = toy_text.save_and_open(ours, tmp_path / "new" / str(number), TEXTS)
        pair = ours.backend.encode("a", "b").ids
        assert pair == theirs("a", "b").input_ids == again("a", "b").input_ids


def test_what_a_class_would_not_arrive_at_is_declared_generic(tmp_path):
    """A normaliser beside byte-level BPE, an added token, an unknown token elsewhere: the same ids in transformers."""
    normal, added, words = (
        toy_text.roberta_backend(),
        toy_text.roberta_backend(),
        word_piece()._tokenizer,
    )
    normal.normalizer = normalizers.NFC()
    added.add_tokens(["zzz"])
    words.add_tokens(["zzz"])
    shifted = albert([*ALBERT[:1], ("extra", -9.0), *ALBERT[1:]])._tokenizer
    spec = json.loads(shifted.to_str())
    spec["model"]["unk_id"] = 2
    shifted = type(shifted).from_str(json.dumps(spec))
    for number, backend in enumerate((normal, added, shifted, words)):
        ours = toy_text.load(backend, tmp_path / f"in{number}")
        theirs = toy_text.save_and_open(
            ours, tmp_path / str(number), ["hello zzz é e\u0301", "☃ 中"]
        )
        assert type(theirs).__name__ == "TokenizersBackend"


def test_a_last_normaliser_that_joins_spaces_changes_nothing(tmp_path):
    """Files converted by older versions of transformers have it."""
    backend = albert(_spm_precompiled_charsmap=MAP)._tokenizer
    spec = json.loads(backend.to_str())
    joined = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    spec["normalizer"]["normalizers"].append(joined)
    ours = toy_text.load(type(backend).from_str(json.dumps(spec)), tmp_path / "in")
    toy_text.save_and_open(ours, tmp_path / "out", ["the   hello \t  play", "  %  &"])


GPT = json.dumps({token: id for id, token in enumerate([*"abcdefg", "<|endoftext|>"])}).encode()
XLNET = message([("<unk>", 0.0), ("<cls>", 0.0), ("<sep>", 0.0), ("<mask>", 0.0), *PIECES])
SCORE_CUT = field(1, field(1, b"a") + varint(2 << 3 | 5) + b"\0")
NO_MODEL = "is not a SentencePiece model: "


@pytest.mark.parametrize(("files", "says"), [
    ({"vocab.json": b'{"a": 0}'}, r"has a vocab.json, but not its merges.txt"),
    ({"vocab.json": b'{"a": 0, "b": 1}', "merges.txt": b"#version: 0.2\na c\n"}, "does not match merges.txt"),
    ({"vocab.json": GPT, "merges.txt": b"#version: 0.2\n"}, r"lacks special tokens: \[PAD\] or <pad>, .*\[MASK\] or <mask>"),
    ({"spiece.model": b"\x1f\x8b\x08\x00\xff\xfe"}, f"{NO_MODEL}.* the unknown wire type 7"),
    ({"spiece.model": message(ALBERT)[:-2]}, f"{NO_MODEL}a field of 4 bytes has only 2 left"),
    ({"spiece.model": b"\xff"}, f"{NO_MODEL}a number has no end"),
    ({"spiece.model": SCORE_CUT}, f"{NO_MODEL}.* 4 bytes has only 1 left"),
    ({"spiece.model": field(1, field(2, 1.0))}, "a piece has no text"),
    ({"spiece.model": b""}, "holds no pieces"),
    ({"spiece.model": message(ALBERT, kind=9)}, "of the unknown kind 9"),
    ({"sentencepiece.bpe.model": message(ALBERT, kind=2)}, "its bpe pieces are neither ALBERT's"),
    ({"spiece.model": XLNET}, "its unigram pieces are neither ALBERT's"),
    ({"spm.model": XLNET, "config.json": b'{"model_type": "deberta-v2"}'}, "neither .*; DebertaV2Tokenizer is the class"),
])  # fmt: skip
def test_what_is_no_tokenizer_of_these_families(tmp_path, files, says):
    for file, content in files.items():
        (tmp_path / file).write_bytes(content)
    with pytest.raises(TokenizerError, match=says) as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert caught.value.fix


def test_a_big_birds_compiled_normalisation_is_followed(tmp_path):
    """transformers' class leaves it out; SentencePiece, with which BigBird was trained, does not."""
    (tmp_path / "spiece.model").write_bytes(message(BIG_BIRD, charsmap=MAP))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("he & he").tolist() == tokenizer.encode("he and he").tolist()
    toy_text.save_and_open(tokenizer, tmp_path / "again", ["he & he"])


def test_debertas_older_layout(tmp_path):
    """As first published: the mask takes the white space before it, and two texts have one [SEP] between them."""
    models.BPE(*deberta_parts()).save(str(tmp_path))
    ours, theirs = Tokenizer.load(tmp_path), deberta()
    texts = ["hello[MASK] world", "é中\n", "hello's"]
    expected = theirs(texts, add_special_tokens=False).input_ids
    assert [ids.tolist() for ids in ours.encode(texts)] == expected
    assert ours.encode(["hello  [MASK] world"])[0].tolist() == ours.encode(texts[:1])[0].tolist()
    vocab, _ = deberta_parts()
    first, second = (row.tolist() for row in ours.encode(["hello", "in"]))
    cls, sep = vocab["[CLS]"], vocab["[SEP]"]
    row = toy_text.save_and_open(ours, tmp_path / "new", texts)("hello", "in")
    assert row["input_ids"] == [cls, *first, sep, *second, sep]
    assert row["token_type_ids"] == [0] * (len(first) + 2) + [1] * (len(second) + 1)


def test_deberta_v2s_older_layout_normalises_as_the_file_says(tmp_path):
    """White space at the ends and in between falls away, as SentencePiece has it by default; transformers 5 keeps the first."""
    (tmp_path / "spm.model").write_bytes(message(DEBERTA, charsmap=MAP))
    ours = Tokenizer.load(tmp_path)
    assert ours.specials.mask == len(DEBERTA) - 1
    texts = ["  hello   &\tthe ", "hello and the"]
    spelled = [[*map(ours.token, ids)] for ids in ours.encode(texts)]
    assert spelled[0] == spelled[1] == ["▁hello", "▁", "and", "▁the"]
    again = toy_text.save_and_open(ours, tmp_path / "new", texts)
    assert again("hello", "the")["token_type_ids"] == [0, 0, 0, 1, 1]
