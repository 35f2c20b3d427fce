"""Sentences of a document, and words of texts whose tokens do not show them, such as Chinese.

Sentences are split at paragraphs first, then by the rules of the `sentencex` package, which need no
download and support Chinese. A quotation or a bracket stays in the sentence that contains it. No
rule needs a model, so equal text gives equal sentences everywhere.

For the masking of whole words, sentences are divided into words when a corpus is built, and the
corpus stores one bit per token: whether a word begins there.

    sentence  他来到网易大厦
    words     他 | 来到 | 网易 | 大厦
    tokens    他 来 到 网 易 大 厦
    bits      1  1  0  1  0  1  0
"""

from __future__ import annotations

import importlib.metadata
import pickle
import re
from collections.abc import Callable, Iterable

import numpy as np
import sentencex
from numpy.typing import NDArray

from bothways.core.errors import ConfigError, DataError, optional
from bothways.core.source import Ids
from bothways.text.tokenizer import Tokenizer

AUTO = "auto"
"""Detect the language of each document from its script."""

PIECE = 8192
"""Maximum number of characters per call: the rules are quadratic in runs of full stops."""

IDEOGRAPH = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
"""Chinese characters, as the inside of a class in a regular expression."""
_IDEOGRAPH = re.compile(f"[{IDEOGRAPH}]")
_SAMPLE = 1000
_CODES = frozenset(
    """
    aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy da
    de dv dz ee el en eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz
    ia id ie ig ii ik io is it iu ja jv ka kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln
    lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn no nr nv ny oc oj om or os pa pi
    pl ps pt qu rm rn ro ru rw sa sc sd se sg sh si sk sl sm sn so sq sr ss st su sv sw ta te tg th
    ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu
    """.split()  # noqa: SIM905
)
"""The codes of ISO 639-1; of three letters there are thousands."""


def detect_language(text: str) -> str:
    """Return `zh` if at least a fifth of the first characters are Chinese, else `en`.

    Considers the first thousand characters without spaces.
    """
    sample = "".join(text[:_SAMPLE].split())
    return "zh" if 5 * len(_IDEOGRAPH.findall(sample)) >= len(sample) > 0 else "en"


def check_language(language: str) -> None:
    """Raise ConfigError unless `language` is "auto", an ISO 639 code or three letters."""
    if language not in (AUTO, *_CODES) and not re.fullmatch("[a-z]{3}", language):
        message = f"{language!r} is not a language: it must be {AUTO!r} or a code of ISO 639"
        raise ConfigError(message, where="language", fix="Write en, zh, de …")


def split_sentences(text: str, language: str = "en") -> list[str]:
    """Split a text into sentences with single spaces and without empty ones.

    Args:
        text: a newline, or any other line or page break, ends a paragraph and its sentence.
        language: ISO 639 code; languages without rules are split as English.
    """
    sentences: list[str] = []
    for line in text.splitlines():
        paragraph, start = " ".join(line.split()), 0
        while len(paragraph) - start > PIECE:
            *segments, tail = sentencex.segment(language, paragraph[start : start + PIECE])
            end = start + PIECE
            # The last sentence may go on behind the piece: it begins the next one. A piece without
            # a boundary is cut before its last word, or at its end where words have no spaces.
            if segments:
                end -= len(tail)
            else:
                space = paragraph.rfind(" ", start + 1, end + 1)
                end = end if space < 0 else space
                segments = [paragraph[start:end]]
            sentences += filter(None, map(str.strip, segments))
            start = end
        segments = sentencex.segment(language, paragraph[start:])
        sentences += filter(None, map(str.strip, segments))
    return sentences


Words = str | Callable[[str], Iterable[str]]
"""How a sentence is divided into words.

    jieba       the dictionary and the model of jieba, for Chinese (extra "zh")
    spaces      white space in the text, as other programs write it; it is then left out next to
                characters of scripts without spaces, so that the model reads ordinary text
    a function  a sentence → its words, which spell it in order
"""

_NO_SPACES = rf"[{IDEOGRAPH}\u3000-\u30ff\uff00-\uffef]"
"""A character next to which words are not separated: ideographs, kana, full-width punctuation."""
_BETWEEN = re.compile(rf"(?<={_NO_SPACES}) | (?={_NO_SPACES})")


def unpack_words(packed: NDArray[np.uint8], start: int, stop: int) -> NDArray[np.bool_]:
    """Return the bits of the tokens `[start, stop)`, stored eight in a byte, the first highest."""
    skipped = start // 8 * 8
    bits = np.unpackbits(packed[start // 8 : -(-stop // 8)])
    return bits[start - skipped : stop - skipped].astype(np.bool_)


def words_name(words: Words) -> str:
    """Return the name and the version of what finds the words, for the record of a corpus.

    Raises:
        ConfigError: neither a name nor a function that processes can share.
        ResourceError: a package is missing.
    """
    if callable(words):
        try:
            pickle.dumps(words)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            message = f"must be a function that other processes can import, not {words!r:.80}"
            raise ConfigError(message, where="words", fix="Define it in a module.") from error
        return f"{words.__module__}.{getattr(words, '__qualname__', type(words).__qualname__)}"
    if words not in ("jieba", "spaces"):
        raise ConfigError(f"must be jieba, spaces or a function, not {words!r:.40}", where="words")
    if words == "jieba":
        with optional("zh", "dividing Chinese into words"):
            import rjieba  # noqa: F401
        return f"rjieba {importlib.metadata.version('rjieba')}"
    return words


def encode_words(
    tokenizer: Tokenizer, sentences: list[str], words: Words
) -> tuple[list[str], Ids, NDArray[np.int64], NDArray[np.bool_]]:
    """Return the texts as they are read, and their ids, lengths and beginnings of words.

    Returns:
        The sentences, which "spaces" changes; the ids `(tokens)` of all of them end to end; the
        length `(sentences)` of each; True `(tokens)` where a word begins.

    Raises:
        DataError: the words of a function do not spell their sentence.
    """
    texts = sentences
    if callable(words):
        divided = [list(words(sentence)) for sentence in sentences]
    elif words == "spaces":
        texts = [_BETWEEN.sub("", sentence) for sentence in sentences]
        divided = [sentence.split() for sentence in sentences]
    else:
        import rjieba

        divided = [rjieba.cut(sentence) for sentence in sentences]
    encoded = tokenizer.encode_with_offsets(texts)
    bits = [np.zeros(0, np.bool_)]
    for text, sentence_words, encoding in zip(texts, divided, encoded, strict=True):
        # A token belongs to the word of its first character.
        word = np.searchsorted(_begins(text, sentence_words), encoding.offsets[:, 0], side="right")
        bits.append(np.diff(word, prepend=-1) != 0)
    ids = [np.zeros(0, np.int32), *(encoding.ids for encoding in encoded)]
    lengths = np.array([len(encoding.ids) for encoding in encoded], dtype=np.int64)
    return texts, np.concatenate(ids), lengths, np.concatenate(bits)


def _begins(text: str, words: list[str]) -> list[int]:
    """Return the first character of each word; white space belongs to the word after it."""
    at, begins = 0, []
    for word in filter(None, map(str.strip, words)):
        begins.append(at)
        while text[at : at + 1].isspace():
            at += 1
        if not text.startswith(word, at):
            break
        at += len(word)
    else:
        if not text[at:].strip():
            return begins
    message = f"the words {words!r:.120} do not spell the sentence {text!r:.120}"
    fix = "A function for words must return all characters of its sentence, in order."
    raise DataError(message, where="words", fix=fix)


def chinese_share(ids: Ids, tokenizer: Tokenizer) -> float:
    """Return the share of these tokens that contain a Chinese character, as far as they show it."""
    distinct, counts = np.unique(ids, return_counts=True)
    chinese = [_IDEOGRAPH.search(tokenizer.token(id)) is not None for id in distinct]
    return float(counts[chinese].sum() / max(1, len(ids)))
