"""Documents and labelled examples of the quickstart.

Labels come from a file, or from documents that pre-training does not see, by a task that any text
gives: detect whether two neighbouring words of a sentence are swapped. Half of the sentences are
unchanged; in the other half two neighbouring words are exchanged. Both classes contain the same
words, so counting words does not help: the task needs word order, which a masked language model
learns. Each sentence is used once. Words at either end, words with capitals, digits or punctuation,
and equal words are never moved, so that only the order reveals the label.

Source: the bigram-shift probe of Conneau et al. 2018 (What you can cram into a single vector).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from bothways.core.errors import DataError
from bothways.core.keyed_rng import rng
from bothways.core.terminal import quantity
from bothways.data.documents import Document, read_documents
from bothways.data.sentences import detect_language, split_sentences
from bothways.lab.quickstart.installed_docs import installed_documentation
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.text_examples import TextExample

TRAINED, TESTED = 1200, 1500
"""Maximum number of examples to fine-tune on, and to test on."""
AS_WRITTEN, SWAPPED = "as written", "swapped"
WORDS = (6, 25)
"""Minimum and maximum length of a sentence in words."""
_MOVABLE = re.compile(r"[a-z]+")


def gather_documents(files: Sequence[str] | None) -> list[Document]:
    """Read the documents of files, or of the installed documentation.

    Raises:
        DataError: a file cannot be read, or there are fewer than ten documents.
    """
    documents = list(read_documents(files) if files else installed_documentation())
    if len(documents) < 10:
        count = quantity(len(documents), "document(s) is|are")
        message = f"{count} too few to train on and to hold some out"
        fix = "Give at least ten documents; in a .txt file, blank lines separate documents."
        raise DataError(message, where=", ".join(files or ["installed documentation"]), fix=fix)
    return documents


def split_documents(
    documents: Iterable[Document], share: float
) -> tuple[list[Document], list[Document]]:
    """Split documents into those to train on and those set aside, by a hash of name and text."""
    train: list[Document] = []
    aside: list[Document] = []
    for document in documents:
        content = f"{document.where}\n{document.text}".encode()
        digest = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
        (aside if digest < share * 2**64 else train).append(document)
    return train, aside


def labelled_examples(
    train_documents: list[Document], aside: list[Document], file: Path | None
) -> tuple[list[TextExample], list[TextExample]]:
    """Make examples to train and to test on, of a labelled file or of the documents set aside.

    Duplicate texts of the file are used once.

    Raises:
        DataError: there are fewer than 20 examples, or the text is Chinese and without labels.
    """
    if file is not None:
        rows = ClassificationTask().read(str(file)).examples
        # Without duplicates, so that no text is trained and tested on.
        unique = list({(row.text, row.text_b): row for row in rows}.values())
        # Shuffled, since a file may be sorted by label.
        order = rng(0, "labelled examples").permutation(len(unique))
        examples = [unique[index] for index in order]
        split = min(TRAINED, int(0.7 * len(examples)))
    else:
        language = detect_language(aside[0].text) if aside else "en"
        if language == "zh":
            message = "the generated task swaps words between spaces, and Chinese has none"
            fix = "Give a labelled file: --labels FILE."
            raise DataError(message, where="the documents set aside", fix=fix)
        examples = word_order(aside, train_documents, seed=0, language=language)
        split = min(TRAINED, len(examples) // 2)
    if len(examples) < 20:
        location = str(file) if file else "the documents set aside"
        message = f"{len(examples)} labelled examples are too few"
        raise DataError(message, where=location, fix="Give more text or more labels.")
    return examples[:split], examples[split : split + TESTED]


def word_order(
    documents: Iterable[Document], excluded: Iterable[Document], seed: int, language: str = "en"
) -> list[TextExample]:
    """Make examples of the sentences of `documents` that are not in `excluded`, in a keyed order.

    Each label is drawn with probability 1/2.
    """

    def key(sentence: str) -> str:
        """Normalise a sentence, so that case and punctuation do not matter."""
        return re.sub(r"\W+", " ", sentence.lower()).strip()

    keys = {key(text) for item in excluded for text in split_sentences(item.text, language)}
    draws = rng(seed, "word order")
    examples = []
    for document in documents:
        for sentence in split_sentences(document.text, language):
            words = sentence.split()
            movable = [_MOVABLE.fullmatch(word) is not None for word in words]
            positions = [
                at
                for at in range(1, len(words) - 2)
                if movable[at] and movable[at + 1] and words[at] != words[at + 1]
            ]
            suits = WORDS[0] <= len(words) <= WORDS[1] and positions
            if not suits or key(sentence) in keys:
                continue
            keys.add(key(sentence))
            at, swap = positions[draws.integers(len(positions))], draws.random() < 0.5
            if swap:
                words[at : at + 2] = words[at + 1], words[at]
            label = SWAPPED if swap else AS_WRITTEN
            examples.append(TextExample(" ".join(words), label=label, where=document.where))
    return [examples[index] for index in draws.permutation(len(examples))]
