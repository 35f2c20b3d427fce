"""What the quick start learns from: text that is already on this machine, and labelled examples made from it.

Labels are made from documents that pre-training does not see (`wordorder`), or are those of a file of the user's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from bothways.core.errors import DataError
from bothways.core.keyed_rng import rng
from bothways.data.documents import Document, read_documents
from bothways.data.sentences import detect_language
from bothways.quickstart.installed_docs import installed_documentation
from bothways.quickstart.word_order import word_order
from bothways.tasks.text_examples import TextExample, read_examples

TESTED = 2000
"""Examples that are tested on, at most."""


def gather_documents(files: Sequence[str] | None, words: int) -> list[Document]:
    """The documents: of these files, or so many words of the documentation installed here.

    Raises:
        DataError: a file cannot be read, or there are fewer than ten documents.
    """
    documents = list(read_documents(files) if files else installed_documentation(max_words=words))
    if len(documents) < 10:
        raise DataError(
            f"{len(documents)} documents are too few to learn from and to hold some out",
            where=", ".join(files or ["installed documentation"]),
            fix="Give ten documents or more; in a .txt file a blank line ends one.",
        )
    return documents


def part(documents: Iterable[Document], share: float) -> tuple[list[Document], list[Document]]:
    """The documents to pre-train on, and those set aside, told apart by a hash of their name and text."""
    kept: list[Document] = []
    aside: list[Document] = []
    for document in documents:
        digest = hashlib.blake2b(
            f"{document.where}\n{document.text}".encode(), digest_size=8
        ).digest()
        (aside if int.from_bytes(digest, "little") < share * 2**64 else kept).append(document)
    return kept, aside


def labelled_examples(
    kept: list[Document], aside: list[Document], file: Path | None, most: int
) -> tuple[list[TextExample], list[TextExample]]:
    """The examples to train on, at most so many, and to test on: of the labelled file, or made from the documents set aside.

    A text that the file has several times counts once.

    Raises:
        DataError: there are fewer than 20 examples, or the text is Chinese and without labels.
    """
    if file is not None:
        read, _ = read_examples(str(file))
        once = list(
            {(example.text, example.text_b): example for example in read}.values()
        )  # none to train and to test on
        examples = [
            once[place] for place in rng(0, "labelled examples").permutation(len(once))
        ]  # a file may be sorted
        split = min(most, int(0.7 * len(examples)))
    else:
        language = detect_language(aside[0].text) if aside else "en"
        if language == "zh":
            what = "the task that is made from the text swaps words between blanks, and Chinese has none"
            raise DataError(
                what, where="the documents set aside", fix="Give labels of your own: --labels FILE."
            )
        examples = word_order(aside, kept, seed=0, language=language)
        split = min(most, len(examples) // 2)
    if len(examples) < 20:
        where = str(file) if file else "the documents set aside"
        raise DataError(
            f"{len(examples)} labelled examples are too few",
            where=where,
            fix="Give more text, or more labels.",
        )
    return examples[:split], examples[split : split + TESTED]


def counting_baselines(
    train_on: Sequence[TextExample], test_on: Sequence[TextExample]
) -> dict[str, float]:
    """Test accuracy of logistic regressions on counts of words, and of words and pairs of neighbours."""
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    def score(longest: int) -> float:
        """Of counts of up to so many words in a row."""
        model = make_pipeline(
            CountVectorizer(ngram_range=(1, longest)), LogisticRegression(max_iter=1000)
        )
        train, test = (
            [f"{e.text} {e.text_b or ''}" for e in examples] for examples in (train_on, test_on)
        )
        return float(
            model.fit(train, [e.label for e in train_on]).score(test, [e.label for e in test_on])
        )

    return {"counting words": score(1), "counting words and pairs": score(2)}
