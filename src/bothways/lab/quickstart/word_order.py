"""A labelled task from any text: detect whether two neighbouring words of a sentence are swapped.

Half of the sentences are unchanged; in the other half two neighbouring words are exchanged. Both
classes contain the same words, so counting words does not help: the task needs word order, which a
masked language model learns. Each sentence is used once, and no sentence is in the pre-training
text. Words at either end, words with capitals, digits or punctuation, and equal words are never
moved, so that only the order reveals the label.

Source: the bigram-shift probe of Conneau et al. 2018 (What you can cram into a single vector).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from bothways.core.keyed_rng import rng
from bothways.data.documents import Document
from bothways.data.sentences import split_sentences
from bothways.tasks.text_examples import TextExample

AS_WRITTEN, SWAPPED = "as written", "swapped"
WORDS = (6, 25)
"""Minimum and maximum length of a sentence in words."""
_MOVABLE = re.compile(r"[a-z]+")


def word_order(
    documents: Iterable[Document], known: Iterable[Document], seed: int, language: str = "en"
) -> list[TextExample]:
    """Make examples of the sentences of `documents` that are not in `known`, in a keyed order.

    Each label is drawn with probability 1/2.
    """
    seen = {
        _key(sentence)
        for document in known
        for sentence in split_sentences(document.text, language)
    }
    draws = rng(seed, "word order")
    examples = []
    for where, sentence in _sentences(documents, language):
        key = _key(sentence)
        places = _places(sentence.split())
        if places and key not in seen:
            seen.add(key)
            examples.append(_example(sentence.split(), places, where, draws))
    return [examples[place] for place in draws.permutation(len(examples))]


def _sentences(documents: Iterable[Document], language: str) -> Iterator[tuple[str, str]]:
    for document in documents:
        for sentence in split_sentences(document.text, language):
            if WORDS[0] <= len(sentence.split()) <= WORDS[1]:
                yield document.where, sentence


def _key(sentence: str) -> str:
    """Normalise a sentence, so that case and punctuation do not matter."""
    return re.sub(r"\W+", " ", sentence.lower()).strip()


def _places(words: Sequence[str]) -> list[int]:
    """Return the positions of words that may be swapped with the next one."""
    inner = range(1, len(words) - 2)
    movable = [_MOVABLE.fullmatch(word) is not None for word in words]
    return [at for at in inner if movable[at] and movable[at + 1] and words[at] != words[at + 1]]


def _example(
    words: list[str], places: list[int], where: str, draws: np.random.Generator
) -> TextExample:
    at, swap = places[draws.integers(len(places))], draws.random() < 0.5
    if swap:
        words = [*words[:at], words[at + 1], words[at], *words[at + 2 :]]
    return TextExample(" ".join(words), label=SWAPPED if swap else AS_WRITTEN, where=where)
