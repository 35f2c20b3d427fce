"""Documents and labelled examples of the quickstart.

Labels come from documents that pre-training does not see (`word_order`), or from a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from bothways.core.errors import DataError
from bothways.core.keyed_rng import rng
from bothways.core.terminal import counted
from bothways.data.documents import Document, read_documents
from bothways.data.sentences import detect_language
from bothways.lab.quickstart.installed_docs import installed_documentation
from bothways.lab.quickstart.word_order import word_order
from bothways.tasks.text_examples import TextExample, read_examples

TESTED = 2000
"""Maximum number of test examples."""


def gather_documents(files: Sequence[str] | None, words: int) -> list[Document]:
    """Read the documents of files, or up to `words` words of the installed documentation.

    Raises:
        DataError: a file cannot be read, or there are fewer than ten documents.
    """
    documents = list(read_documents(files) if files else installed_documentation(max_words=words))
    if len(documents) < 10:
        what = (
            f"{counted(len(documents), 'documents are')} too few to train on and to hold some out"
        )
        fix = "Give at least ten documents; in a .txt file, blank lines separate documents."
        raise DataError(what, where=", ".join(files or ["installed documentation"]), fix=fix)
    return documents


def split_documents(
    documents: Iterable[Document], share: float
) -> tuple[list[Document], list[Document]]:
    """Split documents into those to train on and those set aside, by a hash of name and text."""
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
    """Return examples to train and to test on, from a labelled file or from the documents set
    aside.

    Duplicate texts of the file are used once.

    Args:
        most: maximum number of training examples.

    Raises:
        DataError: there are fewer than 20 examples, or the text is Chinese and without labels.
    """
    if file is not None:
        read, _ = read_examples(str(file))
        # Without duplicates, so that no text is in both parts.
        unique = list({(example.text, example.text_b): example for example in read}.values())
        # Shuffled, since a file may be sorted by label.
        order = rng(0, "labelled examples").permutation(len(unique))
        examples = [unique[place] for place in order]
        split = min(most, int(0.7 * len(examples)))
    else:
        language = detect_language(aside[0].text) if aside else "en"
        if language == "zh":
            what = "the generated task swaps words between spaces, and Chinese has none"
            raise DataError(
                what, where="the documents set aside", fix="Give a labelled file: --labels FILE."
            )
        examples = word_order(aside, kept, seed=0, language=language)
        split = min(most, len(examples) // 2)
    if len(examples) < 20:
        where = str(file) if file else "the documents set aside"
        what = f"{len(examples)} labelled examples are too few"
        raise DataError(what, where=where, fix="Give more text or more labels.")
    return examples[:split], examples[split : split + TESTED]


def counting_baselines(
    train_on: Sequence[TextExample], test_on: Sequence[TextExample]
) -> dict[str, float]:
    """Return the test accuracy of logistic regressions on counts of words and of word pairs."""
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    def score(longest: int) -> float:
        """Score a model on counts of n-grams up to `longest` words."""
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
