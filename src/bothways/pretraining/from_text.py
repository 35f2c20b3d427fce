"""From text files to a corpus with a vocabulary of its own, in one folder that is found again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bothways.core.errors import ConfigError, argument, os_errors
from bothways.core.files import replace_folder
from bothways.core.progress import SILENT, Progress
from bothways.data.corpus import Corpus, write_corpus
from bothways.data.documents import read_documents
from bothways.text.tokenizer import Tokenizer
from bothways.text.trainers import WordPiece, train_vocabulary

SIZE = "size.txt"
"""The file of the tokenizer's folder with the size that its vocabulary was trained for."""


def corpus_of_text(
    files: Sequence[str], folder: Path, vocabulary: int, progress: Progress = SILENT
) -> Corpus:
    """Train a WordPiece vocabulary, build the corpus, or open what an earlier call has built.

    Args:
        files: text files, folders or patterns, as for `read_documents`.
        folder: gets `tokenizer/` and `corpus/`.
        vocabulary: tokens of the vocabulary.

    Raises:
        DataError: a file cannot be read.
        ConfigError, ResourceError: the folder has the corpus of other files or another vocabulary,
            or cannot be written.
    """
    documents = read_documents(files)  # checks the names
    tokenizer = tokenizer_of_text(files, folder, vocabulary, progress)
    return write_corpus(documents, tokenizer, folder / "corpus", progress=progress)


def tokenizer_of_text(
    files: Sequence[str], folder: Path, vocabulary: int, progress: Progress = SILENT
) -> Tokenizer:
    """Train a WordPiece vocabulary and save it in `folder/tokenizer`, or load it from there."""
    path, size = folder / "tokenizer", str(vocabulary)  # of little text there are fewer tokens
    if (path / SIZE).exists() and (trained := (path / SIZE).read_text("utf8")) != size:
        message = f"was trained for {trained} tokens, not {size}"
        fix = f"Choose another folder, or {argument(vocabulary=int(trained))}."
        raise ConfigError(message, where=path, fix=fix)
    if not path.exists():
        progress.stage("learning the vocabulary")
        texts = (document.text for document in read_documents(files))
        tokenizer = train_vocabulary(texts, WordPiece(vocabulary))
        with os_errors(folder, "Choose another folder."):
            folder.mkdir(parents=True, exist_ok=True)
        with replace_folder(path) as hidden:
            tokenizer.save(hidden)
            (hidden / SIZE).write_text(size, "utf8")
    return Tokenizer.load(path)
