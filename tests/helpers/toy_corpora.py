"""Corpora of texts, each text a document, and in memory of documents of given lengths."""

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from bothways.data.corpus import Corpus, write_corpus
from bothways.data.documents import Document
from bothways.text.tokenizer import Tokenizer
from bothways.text.trainers import ByteBPE, train_vocabulary
from toy_animals import document
from toy_folder import make_examples, make_tokenizer


def corpus_of(sizes: list[list[int]]) -> SimpleNamespace:
    """Documents given as lists of sentence lengths → a corpus whose tokens are all different: 5, 6, 7 …"""
    sentences = np.cumsum([0, *(n for document in sizes for n in document)]).astype(np.uint64)
    documents = np.cumsum([0, *map(len, sizes)]).astype(np.uint64)
    tokens = np.arange(5, 5 + int(sentences[-1]), dtype=np.uint32)
    return SimpleNamespace(tokens=tokens, sentences=sentences, documents=documents, words=None)


def write_texts(folder: Path, tokenizer: Tokenizer, texts: Iterable[str], **options: Any) -> Corpus:
    """A corpus with a document for each text."""
    documents = [Document(text, f"made:{number}") for number, text in enumerate(texts)]
    return write_corpus(documents, tokenizer, folder, workers=1, **options)


def write_bytes(folder: Path) -> Corpus:
    """The corpus of the toy animals with a byte-level vocabulary."""
    rng = np.random.default_rng(7)
    texts = [document(rng) for _ in range(80)]
    return write_texts(folder, train_vocabulary(texts, ByteBPE(320)), texts)


def write_films(folder: Path) -> Corpus:
    """A corpus of sentences with the vocabulary of `toy_folder`."""
    texts = (". ".join(e.text for e in make_examples(6, number)) + "." for number in range(60))
    return write_texts(folder, make_tokenizer(folder.parent / "t"), texts)
