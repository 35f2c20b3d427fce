"""Words of texts whose tokens do not show them, such as Chinese, for the masking of whole words.

Sentences are divided into words when a corpus is built, and the corpus stores one bit per token:
whether a word begins there.

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
from numpy.typing import NDArray

from bothways.core.errors import ConfigError, DataError, optional
from bothways.core.sequence import Ids
from bothways.data.sentences import IDEOGRAPH
from bothways.text.tokenizer import Tokenizer

Words = str | Callable[[str], Iterable[str]]
"""How a sentence is divided into words.

    jieba       the dictionary and the model of jieba, for Chinese (extra "zh")
    spaces      white space in the text, as other programs write it; it is then left out next to
                characters of scripts without spaces, so that the model reads ordinary text
    a function  a sentence → its words, which spell it in order
"""

_NO_SPACES = rf"[{IDEOGRAPH}\u3000-\u30ff\uff00-\uffef]"
"""A character next to which words are not separated: ideographs, kana, full-width punctuation."""
_IDEOGRAPHS = re.compile(f"[{IDEOGRAPH}]")
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
        message = f"must be jieba, spaces or a function, not {words!r:.40}"
        raise ConfigError(message, where="words")
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
    chinese = [_IDEOGRAPHS.search(tokenizer.token(id)) is not None for id in distinct]
    return float(counts[chinese].sum() / max(1, len(ids)))
