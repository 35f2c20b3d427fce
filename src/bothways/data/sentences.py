"""Sentence splitting: paragraphs first, then the rules of the `sentencex` package.

The rules need no download and support Chinese. A quotation or a bracket stays in the sentence that
contains it. No rule needs a model, so equal text gives equal sentences everywhere.
"""

from __future__ import annotations

import re

import sentencex

from bothways.core.errors import ConfigError

AUTO = "auto"
"""Detect the language of each document from its script."""

PIECE = 8192
"""Maximum number of characters per call: the rules are quadratic in runs of full stops."""

IDEOGRAPH = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
"""Chinese characters, as the inside of a class in a regular expression."""
_IDEOGRAPH = re.compile(f"[{IDEOGRAPH}]")
_SAMPLE = 1000
_CODE = re.compile(r"[a-z]{2,3}")


def detect_language(text: str) -> str:
    """Return `zh` if at least a fifth of the first characters are Chinese, else `en`.

    Considers the first thousand characters without spaces.
    """
    sample = "".join(text[:_SAMPLE].split())
    return "zh" if 5 * len(_IDEOGRAPH.findall(sample)) >= len(sample) > 0 else "en"


def check_language(language: str) -> None:
    """Raise ConfigError unless `language` is "auto" or has the form of an ISO 639 code."""
    if language != AUTO and not _CODE.fullmatch(language):
        message = (
            f"{language!r} is not a language; it is {AUTO!r} or a code of two or three letters"
        )
        raise ConfigError(message, where="language", fix="Write en, zh, de …")


def split_sentences(text: str, language: str = "en") -> list[str]:
    """Split a text into sentences with single spaces and without empty ones.

    Args:
        text: a newline, or any other line or page break, ends a paragraph and its sentence.
        language: ISO 639 code, or "auto"; languages without rules are split as English.
    """
    code = detect_language(text) if language == AUTO else language
    sentences: list[str] = []
    for line in text.splitlines():
        paragraph, start = " ".join(line.split()), 0
        while len(paragraph) - start > PIECE:
            *segments, tail = sentencex.segment(code, paragraph[start : start + PIECE])
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
        segments = sentencex.segment(code, paragraph[start:])
        sentences += filter(None, map(str.strip, segments))
    return sentences
