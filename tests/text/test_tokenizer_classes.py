"""Every tokenizer class of transformers that a BERT-like model has: the same ids on 2,000 odd texts, or refused by name."""

import base64
import itertools
import json
import pickle
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_family_tokenizers as family
import transformers
from transformers import AutoTokenizer

from bothways.core.errors import ResourceError, TokenizerError
from bothways.text.template import assemble
from bothways.text.tokenizer import Tokenizer
from bothways.text.tokenizer_classes import CONFIG, JAPANESE
from kernel_cases import examples
from spread import in_turn
from toy_text import assert_same_tokens, bert_tokens, odd_texts, roberta_backend, save_and_open

TEXTS = odd_texts()
BERT = ["Bert", "DistilBert", "Electra"]
NAMES = {"unk_token": "<unk>", "pad_token": "<pad>", "cls_token": "<s>", "sep_token": "</s>"}
HERBERT = NAMES | {"mask_token": "<mask>"}


def write(folder: Path, config: dict[str, Any], kind: str = "", **files: Any) -> Path:
    """A folder: settings, the model type, and files by name with "_" for "."."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": kind} if kind else {}))
    for name, content in files.items():
        file = folder / name.replace("__", ".")
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            file.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def vocabulary(tokens: list[str]) -> str:
    return "".join(f"{token}\n" for token in tokens)


def words(folder: Path, name: str, kind: str, **config: Any) -> Path:
    return write(
        folder, {"tokenizer_class": name, **config}, kind, vocab__txt=vocabulary(bert_tokens())
    )


def word_ends(folder: Path, name: str | None, kind: str = "bert") -> Path:
    """BPE with "</w>": letters, and a few words."""
    letters = [chr(at) for at in range(33, 127)] + list("éñ中文東京กא")
    merges = [("t", "h"), ("th", "e</w>"), ("p", "l"), ("pl", "a"), ("pla", "y</w>"), ("i", "n")]
    tokens = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *letters, *(c + "</w>" for c in letters)]
    tokens += ["".join(merge) for merge in merges]
    config = HERBERT | ({"tokenizer_class": name} if name else {})
    lines = ["#version: 0.2", *(" ".join(merge) for merge in merges)]
    vocab = {token: at for at, token in enumerate(tokens)}
    return write(folder, config, kind, vocab__json=vocab, merges__txt="\n".join(lines) + "\n")


def saved(folder: Path, made: Any, kind: str, name: str | None = None, **config: Any) -> Path:
    """What transformers saves, perhaps with other settings; `tokenizer.json` is not changed."""
    made.save_pretrained(folder)
    change_settings(folder, **config, **({"tokenizer_class": name} if name else {}))
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    return folder


def change_settings(folder: Path, **config: Any) -> None:
    """Settings that are changed or, if "left out", removed."""
    file = folder / "tokenizer_config.json"
    held = json.loads(file.read_text()) | config
    kept = {key: value for key, value in held.items() if value != "left out"}
    file.write_text(json.dumps(kept))


def camembert() -> Any:
    names = ["<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED", "<s>", "</s>"]
    scores = [-100.0 if name == "<unk>NOTUSED" else 0.0 for name in names]
    vocab = [*zip(names, scores, strict=True), *family.PIECES, ("<mask>", 0.0)]
    return transformers.CamembertTokenizer(vocab=vocab, _spm_precompiled_charsmap=family.MAP)


def mpnet() -> Any:
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *bert_tokens(), "<mask>"]
    return transformers.MPNetTokenizer(vocab={token: at for at, token in enumerate(tokens)})


def generic(folder: Path) -> Path:
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=roberta_backend(), **HERBERT, model_max_length=9
    )
    return saved(folder, made, "modernbert")


EQUAL: dict[str, Callable[[Path], Path]] = {
    **{
        f"{stem}{fast}": lambda folder, name=f"{stem}Tokenizer{fast}": words(folder, name, "bert")
        for stem, fast in zip(BERT, itertools.cycle(("", "Fast")))
    },
    "Bert of a RoBERTa": lambda f: words(f, "BertTokenizer", "roberta"),
    "Bert, tokenizer.json": lambda f: saved(f, family.word_piece(), "bert"),
    "Electra, tokenizer.json": lambda f: saved(f, family.word_piece(), "electra", "ElectraTokenizerFast"),
    "MPNet": lambda f: saved(f, mpnet(), "mpnet"),
    "Roberta": lambda f: saved(f, family.roberta(), "roberta"),
    "Roberta with its spaces": lambda f: saved(f, family.roberta(trim_offsets=False), "roberta"),
    "Longformer": lambda f: saved(f, family.roberta(), "longformer", "LongformerTokenizerFast"),
    "Bart": lambda f: saved(f, family.roberta(add_prefix_space=True), "bart", "BartTokenizer"),
    "GPT2": lambda f: saved(f, family.roberta(), "gpt2", "GPT2Tokenizer"),
    "Deberta": lambda f: saved(f, family.deberta(), "deberta"),
    "Deberta with a space": lambda f: saved(f, family.deberta(add_prefix_space=True), "deberta"),
    "DebertaV2": lambda f: saved(f, family.deberta_v2(), "deberta-v2"),
    "DebertaV2 in lower case, marks apart": lambda f: saved(
        f, family.deberta_v2(do_lower_case=True, split_by_punct=True), "deberta-v2"
    ),
    "DebertaV2 without a space": lambda f: saved(
        f, family.deberta_v2(add_prefix_space=False), "deberta-v2"
    ),
    "XLMRoberta": lambda f: saved(f, family.xlm(_spm_precompiled_charsmap=family.MAP), "xlm-roberta"),
    "Camembert": lambda f: saved(f, camembert(), "camembert"),
    "XLMRoberta without a space": lambda f: saved(f, family.xlm(add_prefix_space=False), "xlm-roberta"),
    "Albert": lambda f: saved(f, family.albert(_spm_precompiled_charsmap=family.MAP), "albert"),
    "Albert, cased": lambda f: saved(f, family.albert(do_lower_case=False, keep_accents=True), "albert"),
    "Albert, lower case with accents": lambda f: saved(
        f, family.albert(keep_accents=True, add_prefix_space=False), "albert"
    ),
    "FNet": lambda f: saved(f, family.albert(), "fnet", "FNetTokenizer"),
    "BigBird": lambda f: saved(f, family.big_bird(), "big_bird"),
    "BigBird without a space": lambda f: saved(f, family.big_bird(add_prefix_space=False), "big_bird"),
    "Herbert": lambda f: word_ends(f, "HerbertTokenizer"),
    "OpenAIGPT": lambda f: word_ends(f, "OpenAIGPTTokenizer", "openai-gpt"),
    "OpenAIGPT by its model type": lambda f: word_ends(f, None, "openai-gpt"),
    "ModernBERT": generic,
    "Nystromformer": lambda f: saved(f, family.albert(), "nystromformer", "AlbertTokenizer"),
}  # fmt: skip


@pytest.mark.parametrize("name", EQUAL)
def test_tokens_are_those_of_transformers_both_ways(name, tmp_path):
    """Ids, offsets and special tokens, from a folder of theirs and from the one that is written."""
    folder = EQUAL[name](tmp_path / "in")
    tokenizer, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    texts = TEXTS[: 200 if name.startswith(tuple(BERT[1:])) else examples(2000)]
    assert_same_tokens(tokenizer, theirs, texts)
    segments = not name.startswith("Distil")
    again = save_and_open(tokenizer, tmp_path / "out", texts, positions=77, segments=segments)
    assert len(again) == len(theirs) == tokenizer.size
    assert again.model_max_length == 77
    for use in ("pad", "cls", "sep", "unk", "mask"):
        assert getattr(again, f"{use}_token_id") == getattr(theirs, f"{use}_token_id")
    if "GPT" in name:  # whose class has no special tokens around texts
        return
    for pair in (("",), ("", "9, [MASK] play"), ("hello the <mask>", "9, [MASK] play")):
        row, (first, *second) = again(*pair), tokenizer.encode(list(pair))
        assert row["input_ids"] == theirs(*pair)["input_ids"]
        assert ("token_type_ids" in row) == (segments and not tokenizer.flat)
        sequence = assemble(first, second[0] if second else None, tokenizer.template)
        assert sequence.ids.tolist() == row["input_ids"]
        assert (sequence.ids.dtype, sequence.segments.dtype) == (np.int32, np.int8)
        if "token_type_ids" in row:
            assert sequence.segments.tolist() == row["token_type_ids"]


def assert_equal(tokenizer: Tokenizer, theirs: Any, texts: list[str]) -> None:
    expected = theirs(texts, add_special_tokens=False)["input_ids"]
    rows = zip(texts, tokenizer.encode(texts), expected, strict=True)
    differ = [(text, ids.tolist(), other) for text, ids, other in rows if ids.tolist() != other]
    assert not differ, (len(differ), differ[:3])


REFUSED = [
    "BertweetTokenizer", "RoFormerTokenizerFast", "LukeTokenizer", "FunnelTokenizerFast",
    "T5Tokenizer", "MyRemoteTokenizer",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "layout"),
    in_turn([(name,) for name in REFUSED], ["vocab.txt", "tokenizer.json", "config.json"]),
)
def test_other_classes_are_refused_by_name(name, layout, tmp_path):
    saved(tmp_path, family.word_piece(), "bert", name)
    if layout != "tokenizer.json":
        words(tmp_path, name, "bert")
        (tmp_path / "tokenizer.json").unlink()
    if layout == "config.json":
        (tmp_path / "tokenizer_config.json").unlink()
        (tmp_path / "config.json").write_text(json.dumps({"tokenizer_class": name}))
    with pytest.raises(TokenizerError, match=f"{name}' is not supported") as caught:
        Tokenizer.load(tmp_path)
    named_in = "config.json" if layout == "config.json" else "tokenizer_config.json"
    assert Path(str(caught.value.where)).name == named_in


def japanese(folder: Path, subword: str = "wordpiece", **config: Any) -> Path:
    tokens = [*bert_tokens(), *"東京大学人工知能私は生です。例え", "東京", "大学", "##大学", "学生"]
    settings = {
        "tokenizer_class": "BertJapaneseTokenizer",
        "word_tokenizer_type": "mecab",
        "subword_tokenizer_type": subword,
        **config,
    }
    return write(folder, settings, "bert", vocab__txt=vocabulary(list(dict.fromkeys(tokens))))


@pytest.mark.parametrize(
    ("subword", "lowercase"),
    in_turn([("wordpiece",), ("character",)], [False, True]),
)
def test_japanese_ids_are_those_of_transformers(subword, lowercase, tmp_path):
    pytest.importorskip("fugashi")
    folder = japanese(tmp_path / "a", subword, do_lower_case=lowercase)
    tokenizer, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    assert_equal(tokenizer, theirs, TEXTS[:800])
    tokenizer.save(tmp_path / "b")
    again = pickle.loads(pickle.dumps(Tokenizer.load(tmp_path / "b")))
    assert again.fingerprint == tokenizer.fingerprint
    assert_equal(again, theirs, TEXTS[:300])
    assert_equal(tokenizer, AutoTokenizer.from_pretrained(tmp_path / "b"), TEXTS[:300])


def test_japanese_offsets_are_places_in_the_text(tmp_path):
    pytest.importorskip("fugashi")
    text = "ＡＢ 東京大学で[MASK]"
    (encoded,) = Tokenizer.load(japanese(tmp_path)).encode_with_offsets([text])
    parts = [text[begin:end] for begin, end in encoded.offsets.tolist()]
    assert parts[-4:] == ["東京", "大学", "で", "[MASK]"]


OTHER_DIVISIONS: list[dict[str, Any]] = [
    {"word_tokenizer_type": "basic"},
    {"word_tokenizer_type": "sudachi"},
    {"word_tokenizer_type": "jumanpp"},
    {"word_tokenizer_type": None},
    {"subword_tokenizer_type": "sentencepiece"},
    {"do_subword_tokenize": False},
    {"never_split": ["a"]},
    {"mecab_kwargs": {"mecab_dic": "other"}},
    {"mecab_kwargs": {"dictionary": "unidic"}},
    {"mecab_kwargs": ["unidic"]},
    {"mecab_kwargs": {"normalize_text": False}, "subword_tokenizer_type": "character"},
]


def test_japanese_words_need_their_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fugashi", None)
    with pytest.raises(ResourceError, match="'fugashi'") as caught:
        Tokenizer.load(japanese(tmp_path))
    assert "bothways[ja]" in str(caught.value.fix)


FOREIGN = {"word_tokenizer_type": "mecab", "never_split": ["x"], "do_basic_tokenize": False}


@pytest.mark.parametrize("side", ["left", "Left"])
def test_texts_that_are_cut_at_their_beginning_are_refused(side, tmp_path):
    """By the settings, or by a `tokenizer.json` whose settings say nothing, as in transformers."""
    cut = {"max_length": 8, "stride": 0, "strategy": "LongestFirst", "direction": "Left"}
    folder = edited(
        tmp_path, family.word_piece(), "bert", truncation=cut if side == "Left" else None
    )
    change_settings(folder, truncation_side=side if side == "left" else "left out")
    with pytest.raises(TokenizerError, match="cuts long texts at their beginning"):
        Tokenizer.load(folder)
    change_settings(folder, truncation_side="right")
    assert Tokenizer.load(folder).backend.truncation is None


BERT_NORMALIZER = json.loads(family.word_piece()._tokenizer.normalizer.__getstate__())
NFKC_FIRST = {"type": "Sequence", "normalizers": [{"type": "NFKC"}, BERT_NORMALIZER]}
ROBERTA = {
    "type": "RobertaProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2],
    "trim_offsets": True, "add_prefix_space": True,
}  # fmt: skip


@pytest.mark.parametrize("parts", [
    {"normalizer": NFKC_FIRST},
    {"normalizer": {"type": "Lowercase"}},
    {"normalizer": None},
    {"pre_tokenizer": {"type": "Whitespace"}},
    {"pre_tokenizer": {"type": "WhitespaceSplit"}},
    {"pre_tokenizer": None},
    {"post_processor": ROBERTA},
    {"model": {"continuing_subword_prefix": "@@"}},
    {"model": {"max_input_chars_per_word": 200}},
    {"model": {"type": "WordLevel"}},
])  # fmt: skip
def test_a_file_that_is_not_of_its_class_is_refused(parts, tmp_path):
    """As it is for the generic class, which the message names."""
    with pytest.raises(TokenizerError, match="BertTokenizer, the tokenizer class") as caught:
        Tokenizer.load(edited(tmp_path, family.word_piece(), "bert", **parts))
    assert caught.value.where == tmp_path / "tokenizer.json"
    assert "PreTrainedTokenizerFast" in str(caught.value.fix)
    change_settings(tmp_path, tokenizer_class="PreTrainedTokenizerFast")
    if parts.get("pre_tokenizer", 0) is not None:
        assert_equal(Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path), TEXTS[:200])


def test_pieces_of_camembert_are_shifted(tmp_path):
    heads = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    folder = write(tmp_path, {"tokenizer_class": "CamembertTokenizer"}, "camembert")
    (folder / "sentencepiece.bpe.model").write_bytes(
        family.message([*heads, *family.PIECES], charsmap=family.MAP)
    )
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.id("<s>") == 5
    assert_equal(tokenizer, camembert(), TEXTS[:800])


def test_the_class_decides_between_several_vocabularies(tmp_path):
    folder = write(
        tmp_path, {"tokenizer_class": "AlbertTokenizer"}, "albert",
        vocab__txt=vocabulary(bert_tokens()), spiece__model=family.message(family.ALBERT),
        bpe__codes="a b 3",
    )  # fmt: skip
    assert Tokenizer.load(folder).kind == "Unigram"


def test_words_of_ends_are_found(tmp_path):
    tokenizer = Tokenizer.load(word_ends(tmp_path, "HerbertTokenizer"))
    ids = tokenizer.encode("the play in")
    _, ends = tokenizer.word_pieces
    assert ends[ids].tolist() == [True, True, False, True]


BROKEN_MAP = base64.b64encode(b"\x04\x00\x00\x00" + b"\x01\x02\x03\xff").decode()
LOST = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "[LOST]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {},
}  # fmt: skip


PRECOMPILED = {"type": "Precompiled", "precompiled_charsmap": BROKEN_MAP}


@pytest.mark.parametrize("parts", [{"post_processor": LOST}, {"normalizer": PRECOMPILED}])
@pytest.mark.parametrize("name", ["BertTokenizer", "PreTrainedTokenizerFast"])
def test_a_panic_of_the_library_is_an_error_of_the_file(parts, name, tmp_path):
    folder = edited(tmp_path, family.word_piece(), "bert", **parts)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.load(folder)
    assert caught.value.where == folder / "tokenizer.json"


def edited(folder: Path, made: Any, kind: str, **parts: Any) -> Path:
    """A folder of transformers whose `tokenizer.json` has other parts, "model" with other settings."""
    spec = json.loads((saved(folder, made, kind) / "tokenizer.json").read_text())
    parts["model"] = spec["model"] | parts.get("model", {})
    (folder / "tokenizer.json").write_text(json.dumps(spec | parts))
    return folder


CUT = json.loads(family.xlm()._tokenizer.pre_tokenizer.__getstate__())
DIGITS = [{"type": "Digits", "individual_digits": True}, CUT]


OTHER_PARTS: list[tuple[Callable[[], Any], str, dict[str, Any]]] = [
    (family.roberta, "roberta", {"model": {"ignore_merges": True}}),
    (family.roberta, "roberta", {"model": {"end_of_word_suffix": "</w>"}}),
    (family.xlm, "xlm-roberta", {"normalizer": {"type": "Lowercase"}}),
    (family.xlm, "xlm-roberta", {"pre_tokenizer": {"type": "Sequence", "pretokenizers": DIGITS}}),
    (family.xlm, "xlm-roberta", {"model": {"unk_id": 0}}),
]
REFUSED_FOLDERS: list[tuple[Callable[[Path], object], str, str]] = [
    *(
        (partial(words, name="BertTokenizer", kind="bert", **{key: value}), f"'{key}' is .* BertTokenizer", CONFIG)
        for key, value in FOREIGN.items()
    ),
    *((partial(japanese, **config), f"{JAPANESE}|mecab_kwargs", CONFIG) for config in OTHER_DIVISIONS),
    *(
        (lambda f, case=case: edited(f, case[0](), case[1], **case[2]), "RobertaTokenizer, the tokenizer class", "tokenizer.json")
        for case in OTHER_PARTS
    ),
    (partial(write, config={}, vocab__txt="a\n", spiece__model=family.message(family.ALBERT)), "several vocabularies", ""),
    (partial(write, config={}, vocab__txt=vocabulary(bert_tokens()), bpe__codes="a b 3"), "bpe.codes", ""),
    (partial(write, config={}, tokenizer__model=b"x"), "tokenizer.model", ""),
    *((partial(word_ends, name=None, kind=kind), "ends of words by </w>", "merges.txt") for kind in ("roberta", "")),
    (lambda f: roberta_backend(dropout=0.5).save(str(f / "tokenizer.json")), r"at random \(0\.5\)", "tokenizer.json"),
]  # fmt: skip
"""What writes a folder, the message, and the file that it names."""


@pytest.mark.parametrize(("write_folder", "says", "file"), REFUSED_FOLDERS)
def test_what_is_not_of_its_class_is_refused(write_folder, says, file, tmp_path):
    write_folder(tmp_path)
    with pytest.raises(TokenizerError, match=says) as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.where == tmp_path / file


def test_blanks_divide_as_the_class_has_it(tmp_path):
    """Files of transformers 4 keep a blank at the end as a word, the class does not."""
    made = family.xlm(_spm_precompiled_charsmap=family.MAP)
    folder = edited(tmp_path, made, "xlm-roberta", pre_tokenizer=CUT["pretokenizers"][1])
    assert_equal(Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder), TEXTS[:800])


@pytest.mark.parametrize(
    ("model", "file"), [("roberta", "vocab.txt"), ("albert", "vocab.txt"), ("bert", "vocab.json")]
)
def test_a_vocabulary_of_another_class_than_the_models_is_refused(model, file, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model}))
    (tmp_path / file).write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.where == tmp_path
    assert file in caught.value.what
    if file == "vocab.txt":
        named = {"tokenizer_class": "BertTokenizer"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
        assert Tokenizer.load(tmp_path).size == 6
