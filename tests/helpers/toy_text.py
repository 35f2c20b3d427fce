"""Small vocabularies, hostile text, and google-research/bert's tokenizer told again in plain Python."""

import json
import random
import sys
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from bothways.text.tokenizer import Tokenizer

BERT_NAMES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789éüñßıøαςσяйあかのア가각한אبخก你好中文字𠀀😀"
_MARKS = ".,:;!?'\"-_()[]<>{}/\\@#$%^&*+=|~`“”’…、。，！？·•€"
_WORDS = ["hello", "world", "play", "un", "the", "don", "Hello", "naive", "naïve", "unused", "mask"]
_TAILS = ["ing", "ed", "lo", "able", "s", "\u0301", "\u0308", "ï"]


def bert_tokens() -> list[str]:
    """A vocabulary in which much, but not all, can be spelled."""
    inner = ["##" + letter for letter in _LETTERS] + ["##" + tail for tail in _TAILS]
    return list(dict.fromkeys([*BERT_NAMES, *_LETTERS, *_MARKS, *_WORDS, "\u0301", *inner]))


def write_vocabulary(folder: Path, tokens: Iterable[str] = (), **config: object) -> Path:
    """A folder with a `vocab.txt` and its settings."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text(
        "".join(f"{token}\n" for token in tokens or bert_tokens()), encoding="utf8"
    )
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf8")
    return folder


def roberta_backend(
    *, prefix_space: bool = False, dropout: float | None = None
) -> tokenizers.Tokenizer:
    """Byte-level BPE with RoBERTa's special tokens, <mask> taking the space before it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = "h e, l l, he ll, hell o, Ġ w, Ġw o, Ġ Ġ, i n, ' s"
    merges = [tuple(pair.split()) for pair in pairs.split(", ")]
    names = ["<s>", "<pad>", "</s>", "<unk>", *alphabet, *map("".join, merges), "<mask>"]
    vocab = {token: id for id, token in enumerate(names)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, dropout=dropout))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.RobertaProcessing(
        ("</s>", vocab["</s>"]), ("<s>", vocab["<s>"])
    )
    backend.add_special_tokens(
        ["<s>", "<pad>", "</s>", "<unk>", AddedToken("<mask>", lstrip=True, normalized=False)]
    )
    return backend


def load(backend: tokenizers.Tokenizer, folder: Path) -> Tokenizer:
    """Through a file, as users have it."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


def assert_same_tokens(model: Tokenizer, reference: Any, texts: list[str]) -> None:
    """The ids and offsets of a tokenizer of transformers, without special tokens."""
    expected = reference(texts, add_special_tokens=False, return_offsets_mapping=True)
    assert [ids.tolist() for ids in model.encode(texts)] == expected["input_ids"]
    rows = [list(map(tuple, row.offsets.tolist())) for row in model.encode_with_offsets(texts)]
    assert rows == expected["offset_mapping"]


def save_and_open(tokenizer: Tokenizer, folder: Path, texts: list[str], **settings: Any) -> Any:
    """The saved folder in transformers, with the same ids; opened here it is the same tokenizer."""
    from transformers import AutoTokenizer

    tokenizer.save(folder, **settings)
    reference = AutoTokenizer.from_pretrained(folder)
    expected = [ids.tolist() for ids in tokenizer.encode(texts)]
    assert reference(texts, add_special_tokens=False).input_ids == expected
    assert Tokenizer.load(folder).fingerprint == tokenizer.fingerprint
    return reference


_TRICKY = [
    *" \n\t\r\v\f\0\x1c\x7f\x85\xa0\u1680\u200b\u200d\u2028\u3000\ufeff\ufffd\ue000\u0378",  # spaces and what looks like one
    *"\u0300\u0301\u0308\u0345\u0591\u064b\u0e31\u20d0\u1e0b\u0323\u0307",  # marks, in orders that normalisation changes
    *"İıßſﬁΣςǅ\u212b\u1e9e가각\u1100\u1161\uf900\ufa30中文㐀\U00020000\U0002b820\U0002ceb0",  # cases, compositions, ideographs
    *"😀👩\u200d👩\U0001f3fdאבمرحبا",
    *BERT_NAMES,
    *("<mask>", "</s>", "<s", "[MASK", "MASK]", "[[SEP]]", "[ SEP ]", "[mask]"),
    *("hello", "playing", "don't", "'s", "e\u0301", "  ", "\n ", " \n"),
    *("a" * 99, "a" * 100, "a" * 101, "中" * 50, "." * 30),
    *("<s>NOTUSED", "##ing", "▁the", "</w>", "3.14", "1,000", "9,", "$5", "①½Ⅷ", "A-B", "a_b", "CAFÉ", "Straße", "İstanbul"),
    *("https://example.org/a?b=c&d=%20#e", "http://例え.jp", "x@y.z", "ＡＢＣ", "ﾊﾝｶｸ", "東京大学", "私は学生です。", "한국어", "한"),
    *("ไทยภาษา", "हिन्दी", "מרחב", "Привет", "ΟΔΟΣ", "🇫🇷", "ẹ́", "q̣̇", "\u0600\u202eabc\u202c", "“x”", "``y''", "…—‑", "ﷺ", "㍿"),
]  # fmt: skip
_RANGES = [
    (0x20, 0x7F), (0xA0, 0x250), (0x300, 0x370), (0x370, 0x530), (0x590, 0x700), (0x900, 0xE80),
    (0x1100, 0x1200), (0x1E00, 0x2000), (0x2000, 0x2BFF), (0x3000, 0x3100), (0x3400, 0x3500),
    (0x4E00, 0x4F00), (0xAC00, 0xAD00), (0xF900, 0xFB50), (0xFE00, 0xFFF0), (0x1D400, 0x1D500),
    (0x1F300, 0x1F700), (0x20000, 0x20050), (0x2B820, 0x2B830), (1, 0x20), (1, sys.maxunicode),
]  # fmt: skip
"""Scripts and symbols, control characters, and all of Unicode."""

hostile = st.lists(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from(_TRICKY),
        st.sampled_from(_LETTERS + " "),
    ),
    max_size=24,
).map("".join)
"""Text over all of Unicode but halves of surrogate pairs, thick with what tokenizers stumble over."""


def odd_texts(count: int = 2000) -> list[str]:
    """The same texts each time, without characters that this Python does not know."""
    rng = random.Random(0)

    def piece() -> str:
        if rng.random() < 0.6:
            return rng.choice(_TRICKY) * rng.choice((1, 1, 1, 3))
        drawn = [chr(rng.randrange(*rng.choice(_RANGES))) for _ in range(rng.randrange(1, 5))]
        return "".join("x" if unicodedata.category(c) in ("Cs", "Cn") else c for c in drawn)

    glues = [rng.choice(("", " ", " ")) for _ in range(count - 2)]
    return ["", " ", *(glue.join(piece() for _ in range(rng.randrange(1, 7))) for glue in glues)]


def pseudo_text(words: int, seed: int) -> list[str]:
    """Lines of made-up words with the frequencies of real ones, and rare characters that occur equally often."""
    rng = np.random.default_rng(seed)
    syllables = [
        "ka", "ro", "mi", "ten", "so", "lu", "ba", "é", "ing", "der", "x", "un", "Zu", "10", "pli", "o", "ves", "hu",
    ]  # fmt: skip
    lexicon = ["".join(rng.choice(syllables, size=rng.integers(1, 5))) for _ in range(2000)]
    chosen = [lexicon[int(place) % 2000] for place in rng.zipf(1.3, size=words)]
    lines = [
        " ".join(chosen[start : start + 12]) + rng.choice([".", "?", ", and"])
        for start in range(0, words, 12)
    ]
    return [*lines, "ωψφχ ωψφχ жзцщ жзцщ", "你好 世界"]


GOOGLE_RANGES = (
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
)  # fmt: skip


def google_tokens(text: str, vocab: set[str], *, lowercase: bool) -> list[str]:
    """google-research/bert's FullTokenizer from its description."""
    return [
        piece for word in _google_words(text, lowercase) for piece in _google_pieces(word, vocab)
    ]


def _google_words(text: str, lowercase: bool) -> list[str]:
    cleaned = ""
    for character in text:
        if character in "\t\n\r" or unicodedata.category(character) == "Zs":
            cleaned += " "
        elif character not in "\0\ufffd" and unicodedata.category(character) not in ("Cc", "Cf"):
            ideograph = any(low <= ord(character) <= high for low, high in GOOGLE_RANGES)
            cleaned += f" {character} " if ideograph else character
    words = []
    for raw in cleaned.split():
        bare = "".join(
            c for c in unicodedata.normalize("NFD", raw.lower()) if unicodedata.category(c) != "Mn"
        )
        words.append("".join(f" {c} " if _is_mark(c) else c for c in (bare if lowercase else raw)))
    return " ".join(words).split()


def _is_mark(character: str) -> bool:
    ascii_mark = 33 <= ord(character) <= 126 and not character.isalnum()
    return ascii_mark or unicodedata.category(character).startswith("P")


def _google_pieces(word: str, vocab: set[str]) -> list[str]:
    pieces, start = [], 0
    while start < len(word) <= 200:  # its cap on the characters of a word
        prefix = "##" if start else ""
        ends = (end for end in range(len(word), start, -1) if prefix + word[start:end] in vocab)
        end = next(ends, None)
        if end is None:
            return ["[UNK]"]
        pieces.append(prefix + word[start:end])
        start = end
    return pieces or ["[UNK]"]


def code_points(step: int) -> list[int]:
    """The code points with characters; of the large scripts, which are each of one kind, every `step`th."""
    large = (range(0x3400, 0xA000), range(0xAC00, 0xD7A4), range(0xE000, 0xF900))
    small = (range(0x3400), range(0xA000, 0xAC00), range(0xD7A4, 0xD800), range(0xF900, 0x20000))
    codes = [code for script in small for code in script]
    for script in (*large, range(0x20000, 0x34000)):
        codes += script[::step]
    return [*codes, *range(0xE0000, 0xE1000)]
