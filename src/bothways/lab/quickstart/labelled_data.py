"""Documents and labelled examples of the quickstart.

Labels come from documents that pre-training does not see (`word_order`), or from a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from bothways.core.errors import DataError
from bothways.core.keyed_rng import rng
from bothways.core.terminal import quantity
from bothways.data.documents import Document, read_documents
from bothways.data.sentences import detect_language
from bothways.lab.quickstart.installed_docs import installed_documentation
from bothways.lab.quickstart.word_order import word_order
from bothways.tasks.text_examples import TextExample, read_examples

TESTED = 1500
"""Maximum number of test examples."""


def gather_documents(files: Sequence[str] | None, words: int) -> list[Document]:
    """Read the documents of files, or up to `words` words of the installed documentation.

    Raises:
        DataError: a file cannot be read, or there are fewer than ten documents.
    """
    documents = list(read_documents(files) if files else installed_documentation(max_words=words))
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
    train_documents: list[Document], aside: list[Document], file: Path | None, max_train: int
) -> tuple[list[TextExample], list[TextExample]]:
    """Return examples to train and to test on, from a labelled file or from the documents set
    aside.

    Duplicate texts of the file are used once.

    Args:
        max_train: maximum number of training examples.

    Raises:
        DataError: there are fewer than 20 examples, or the text is Chinese and without labels.
    """
    if file is not None:
        rows, _ = read_examples(str(file))
        # Without duplicates, so that no text is trained and tested on.
        unique = list({(row.text, row.text_b): row for row in rows}.values())
        # Shuffled, since a file may be sorted by label.
        order = rng(0, "labelled examples").permutation(len(unique))
        examples = [unique[index] for index in order]
        split = min(max_train, int(0.7 * len(examples)))
    else:
        language = detect_language(aside[0].text) if aside else "en"
        if language == "zh":
            message = "the generated task swaps words between spaces, and Chinese has none"
            fix = "Give a labelled file: --labels FILE."
            raise DataError(message, where="the documents set aside", fix=fix)
        examples = word_order(aside, train_documents, seed=0, language=language)
        split = min(max_train, len(examples) // 2)
    if len(examples) < 20:
        location = str(file) if file else "the documents set aside"
        message = f"{len(examples)} labelled examples are too few"
        raise DataError(message, where=location, fix="Give more text or more labels.")
    return examples[:split], examples[split : split + TESTED]
