"""Texts on which tokenizers differ: all of Unicode, blanks of every kind, marks, long runs, special tokens."""

import random
import sys
import unicodedata

_SPECIAL = [
    "[CLS]", "[SEP]", "[MASK]", "[PAD]", "[UNK]", "<s>", "</s>", "<mask>", "<pad>", "<unk>",
    "[mask]", "[MASK", "< mask >", "<s>NOTUSED", "##ing", "▁the", "</w>",
]  # fmt: skip
_BLANKS = (
    " \t\n\r\v\f\x1c\x1d\x85\xa0\u1680\u2000\u2003\u2009\u200a\u2028\u2029\u202f\u205f\u3000\u200b"
)
_WORDS = [
    "hello", "world", "play", "playing", "the", "don't", "I'll", "3.14", "1,000", "9,", "$5", "A-B", "it's", "CAFÉ",
    "naïve", "Straße", "İstanbul", "ßſﬁ", "a_b", "x@y.z", "https://example.org/a?b=c&d=%20#e", "http://例え.jp", "①½Ⅷ",
    "ＡＢＣ", "ﾊﾝｶｸ", "東京大学", "人工知能", "私は学生です。", "中文字", "한국어", "한", "ไทยภาษา", "हिन्दी", "מרחב", "مرحبا", "Привет",
    "Ελλάς", "ΟΔΟΣ", "👩\u200d👩\u200d👧", "👍🏽", "🇫🇷", "ẹ́", "ö", "ñ", "q̣̇", "\u0600\u202eabc\u202c", "«q»", "“x”",
    "``y''", "…—‑", "ﷺ", "㍿", "\ufeff", "�", "\ue000",
]  # fmt: skip
_RANGES = [
    (0x20, 0x7F), (0xA0, 0x250), (0x300, 0x370), (0x370, 0x530), (0x590, 0x700), (0x900, 0xE80),
    (0x1100, 0x1200), (0x1E00, 0x2000), (0x2000, 0x2BFF), (0x3000, 0x3100), (0x3400, 0x3500),
    (0x4E00, 0x4F00), (0xAC00, 0xAD00), (0xF900, 0xFB50), (0xFE00, 0xFFF0), (0x1D400, 0x1D500),
    (0x1F300, 0x1F700), (0x20000, 0x20050), (0x2B820, 0x2B830),
]  # fmt: skip


def odd_texts(count: int = 2000) -> list[str]:
    """Return texts without halves of surrogate pairs and characters that this Python does not know."""
    rng = random.Random("odd texts 0")

    def character() -> str:
        first, last = rng.choice(_RANGES) if rng.random() < 0.9 else (1, sys.maxunicode)
        drawn = chr(rng.randrange(first, last))
        return drawn if unicodedata.category(drawn) not in ("Cs", "Cn") else "x"

    def piece() -> str:
        match rng.randrange(12):
            case 0:
                return rng.choice(_SPECIAL)
            case 1 | 2 | 3 | 4:
                return rng.choice(_WORDS)
            case 5 | 6:
                return rng.choice(_BLANKS) * rng.randrange(1, 4)
            case 7:
                return rng.choice(".,!?-'\"#/@…、。") * rng.choice((1, 2, 3, 40))
            case 8:
                return str(rng.randrange(10 ** rng.randrange(1, 15)))
            case 9:
                return chr(rng.randrange(1, 0x20))
            case _:
                return "".join(character() for _ in range(rng.randrange(1, 5)))

    made = ["", " ", "a" * 100, "a" * 101, "中" * 120, "\u0301", "\u200d"]
    while len(made) < count:
        glue = rng.choice(("", " ", " "))
        made.append(glue.join(piece() for _ in range(rng.randrange(1, 7))))
    return made
