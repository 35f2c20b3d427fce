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
from collections.abc import Iterable, Sequence

from bothways.core.keyed_rng import rng
from bothways.data.documents import Document
from bothways.data.sentences import split_sentences
from bothways.tasks.text_examples import TextExample

AS_WRITTEN, SWAPPED = "as written", "swapped"
WORDS = (6, 25)
"""Minimum and maximum length of a sentence in words."""
_MOVABLE = re.compile(r"[a-z]+")


def word_order(
    documents: Iterable[Document], excluded: Iterable[Document], seed: int, language: str = "en"
) -> list[TextExample]:
    """Make examples of the sentences of `documents` that are not in `excluded`, in a keyed order.

    Each label is drawn with probability 1/2.
    """
    keys = {
        _key(text) for document in excluded for text in split_sentences(document.text, language)
    }
    draws = rng(seed, "word order")
    examples = []
    for document in documents:
        for sentence in split_sentences(document.text, language):
            words, key = sentence.split(), _key(sentence)
            positions = _movable_pairs(words)
            if not WORDS[0] <= len(words) <= WORDS[1] or not positions or key in keys:
                continue
            keys.add(key)
            at, swap = positions[draws.integers(len(positions))], draws.random() < 0.5
            if swap:
                words[at : at + 2] = words[at + 1], words[at]
            label = SWAPPED if swap else AS_WRITTEN
            examples.append(TextExample(" ".join(words), label=label, where=document.where))
    return [examples[index] for index in draws.permutation(len(examples))]


def _key(sentence: str) -> str:
    """Normalise a sentence, so that case and punctuation do not matter."""
    return re.sub(r"\W+", " ", sentence.lower()).strip()


def _movable_pairs(words: Sequence[str]) -> list[int]:
    """Return the positions of words that may be swapped with the next one."""
    movable = [_MOVABLE.fullmatch(word) is not None for word in words]
    return [
        at
        for at in range(1, len(words) - 2)
        if movable[at] and movable[at + 1] and words[at] != words[at + 1]
    ]
